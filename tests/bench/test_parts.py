"""`ottava bench kernels`, `gemm` and `attention` on a CPU, and how a profile is summed up."""

from __future__ import annotations

import json

import pytest
import torch

from ottava.bench import attention, gemm, kernels, timing
from ottava.bench.gpu_profile import kind_of, summarize
from ottava.bench.shapes import workloads
from ottava.cli.main import main


def test_kernels_are_checked_and_their_bytes_counted(tmp_path, capsys) -> None:
    path = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--rounds", "1", "--rows", "64", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    rows = {row["kernel"]: row for row in document["results"]}
    assert {"cast tensor", "norm + cast 1x128", "dswiglu + cast 128x128", "norm backward", "split qkv + RoPE"} <= set(
        rows
    )
    # bf16 in, two copies of a byte out, a scale in and, out, two inverse scales and an amax
    assert rows["cast tensor"]["bytes"] == 64 * 128 * 4 + 4 * 4
    assert document["copy_gb_per_s"] > 0 and "of copy" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_is_not_timed() -> None:
    case = next(case for case in kernels.cases(kernels.SMALL) if case.name == "amax")
    turns = iter([1.0, 2.0])
    wrong = kernels.Case("amax", case.inputs, lambda x: case.run(x) * next(turns))
    with pytest.raises(SystemExit, match="amax differs from its reference"):
        kernels.check(wrong, "cpu")


def test_no_kernel_of_that_name(capsys) -> None:
    assert main(["bench", "kernels", "--only", "softmax"]) == 2
    assert "no kernel's name contains 'softmax'" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["many", "0", "8,-5"])
def test_rows_are_numbers_above_0(rows: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "kernels", "--rows", rows])
    assert stopped.value.code == 2 and "argument --rows: " in capsys.readouterr().err


def test_products_of_a_layer_and_their_rates(tmp_path) -> None:
    assert len(list(gemm.products(workloads()["8b"]))) == 15
    path = tmp_path / "gemm.json"
    assert main(["bench", "gemm", "--shape", "tiny", "--rounds", "1", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["results"]) == 4 * 3 * 4 + 3  # the head is not quantized
    row = document["results"][0]
    assert {"device", "kind", "m", "n", "k", "tflops"} <= set(row)
    assert row["tflops"] == pytest.approx(2e-9 * row["m"] * row["n"] * row["k"] / row["ms"])
    assert max(document["relative_errors"].values()) < 0.01


def test_attention_is_compared_with_float64_and_timed(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "attention.json"
    words = ["bench", "attention", "--shape", "tiny", "--rounds", "1", "--output", str(path)]
    assert main([*words, "--documents", "20"]) == 0
    results = json.loads(path.read_text())["results"]
    for row in (results["ottava"], results["packed triton"]):
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["relative_error"] < 0.02
    for row in (results["fp8"], results["packed fp8"]):
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and 0.02 < row["relative_error"] < 0.08
    assert results["packed flash4"]["failed"] and results["packed flash"]["failed"]  # a CPU has neither
    real = attention._ours
    monkeypatch.setattr(attention, "_ours", lambda q, k, v: real(q, k, v) * (1.0 if q.dtype is torch.float64 else 1.1))
    assert main(words) == 1
    assert "wrong: relative error" in json.loads(path.read_text())["results"]["ottava"]["failed"]


def test_kernels_have_kinds() -> None:
    kinds = {
        "nvjet_qqtst_128x256": "gemm",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "multi_tensor_apply_kernel<FusedAdam>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copy",
        "tile_kernel": "quantize, norm, activation",
        "at::native::vectorized_elementwise_kernel<4, AddFunctor>": "elementwise",
        "something": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_a_profile_is_summed_by_kind_and_launches_are_counted() -> None:
    cuda, cpu = "DeviceType.CUDA", "DeviceType.CPU"
    rows = [
        ("nvjet", 2, 3000.0, cuda),
        ("tile_kernel", 1, 500.0, cuda),
        ("cudaLaunchKernelExC", 3, 0.0, cpu),
        ("aten::mm", 2, 0.0, cpu),
    ]
    found = summarize(rows, top=1)
    assert (found["kernels"], found["launches"], found["busy_ms"]) == (3, 3, 3.5)
    assert found["kinds"]["gemm"] == {"ms": 3.0, "calls": 2} and [k["name"] for k in found["top"]] == ["nvjet"]


def test_waiting_for_numbers_is_counted_and_tensors_are_left_as_they_were() -> None:
    before = (torch.Tensor.item, torch.Tensor.__float__, torch.cuda.synchronize)
    waits = timing.Waits()
    with waits.counting():
        assert torch.ones(1).item() == 1.0 and float(torch.ones(1)) == 1.0
    assert waits.seconds > 0 and (torch.Tensor.item, torch.Tensor.__float__, torch.cuda.synchronize) == before
    assert timing.host_times(lambda: None, 2)[0] >= 0
