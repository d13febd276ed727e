"""The planner's rates and memory, and the doctor, on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from ottava.cli.main import main
from ottava.doctor import Options, examine
from ottava.plan.calibrate import calibrate
from ottava.plan.devices import packaged

pytestmark = pytest.mark.gpu


def test_calibration_is_near_the_table_on_an_h200(tmp_path) -> None:
    key, gpu = calibrate(torch.device("cuda"))
    print(json.dumps({**vars(gpu), "products": list(gpu.products)}, default=str))
    assert gpu.gemm_tflops["bf16"] > 50 and gpu.copy_tb_s > 0.2
    if key == "h200":
        known = packaged()["h200"]
        for kind, rate in known.gemm_tflops.items():
            assert gpu.gemm_tflops[kind] == pytest.approx(rate, rel=0.3), kind
        assert gpu.copy_tb_s == pytest.approx(known.copy_tb_s, rel=0.15)


def test_the_command_calibrates_and_plans(tmp_path, capsys) -> None:
    assert main(["plan", "llama3-1b", "--gpus", "1", "--calibrate", str(tmp_path / "gpus.json")]) == 0
    assert "tokens/s/GPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpus.json").read_text())


def test_the_doctor_looks_at_a_gpu(tmp_path) -> None:
    report = examine(Options(run=str(tmp_path), space_gib=0.01))
    print(report.as_text())
    said = {finding.check: finding for finding in report.findings}
    assert "bf16" in said["speed"].message and said["speed"].status == "ok"
    if torch.cuda.get_device_capability() >= (8, 9):
        assert "FP8" in said["speed"].message
    assert report.seconds < 60
