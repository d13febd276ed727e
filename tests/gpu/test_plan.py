"""The planner's rates and memory, and the doctor, on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from ottava.cli.main import main
from ottava.doctor import Options, examine
from ottava.plan.calibrate import calibrate

pytestmark = pytest.mark.gpu


def test_calibration_measures_every_product_that_this_gpu_has(tmp_path) -> None:
    """Rates are not compared: other tests run on this GPU at the same time."""
    _, gpu = calibrate(torch.device("cuda"))
    print(json.dumps({**vars(gpu), "products": list(gpu.products)}, default=str))
    wanted = {"bf16", "delayed", "current", "block"} if torch.cuda.get_device_capability() == (9, 0) else {"bf16"}
    assert wanted <= set(gpu.gemm_tflops) and all(rate > 1 for rate in gpu.gemm_tflops.values())
    assert gpu.copy_tb_s > 0.01 and gpu.attention_tflops["128"]["backward"] > 1
    assert {row["kind"] for row in gpu.products} == set(gpu.gemm_tflops)


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
