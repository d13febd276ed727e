"""`initialize_ub`: what it is told reaches the schedules of modules; what cannot act is said once; nonsense is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import ottava
from ottava.nn.options import OverlapOptions
from ottava.notices import warn_once
from ottava.overlap.switches import schedule_of
from ottava.overlap.user_buffers import UserBufferQuantizationMode as Mode
from ottava.overlap.user_buffers import is_ub_initialized

EVERYTHING = OverlapOptions(True, True, True, True, True)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    warn_once.cache_clear()
    ottava.destroy_ub()
    yield
    ottava.destroy_ub()


def test_the_method_and_the_pieces_of_a_product_reach_modules_that_are_made_later() -> None:
    before = schedule_of(EVERYTHING, "column", "qkv", True, 2)
    ottava.initialize_ub(
        [128, 64],
        2,
        quantization_modes=[Mode.NONE, Mode.FP8],
        ub_cfgs={
            "qkv_fprop": {"method": "pipeline", "num_splits": 8},
            "fc2_fprop": {"method": "pipeline", "num_splits": 2},
        },
    )
    assert is_ub_initialized()
    qkv, fc1, fc2 = (
        schedule_of(EVERYTHING, *stage, True, 2) for stage in (("column", "qkv"), ("column", "fc1"), ("row", "fc2"))
    )
    assert (qkv.gather, qkv.splits) == ("pipeline", 8)
    assert fc1 == before and before.gather == "ring"
    assert (fc2.scatter, fc2.splits) == ("pipeline", 2)
    ottava.destroy_ub()
    assert not is_ub_initialized()
    assert schedule_of(EVERYTHING, "column", "qkv", True, 2) == before


def test_options_that_cannot_act_say_so_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with caplog.at_level(logging.WARNING, logger="ottava"):
            ottava.initialize_ub(
                [128, 64],
                2,
                use_fp8=True,
                bootstrap_backend="gloo",
                ub_cfgs=[{"qkv_fprop": {"num_sm": 1, "atomic_gemm": False}, "fc1_fprop": {"num_sm": 4}}],
                with_cublasmp=True,
            )
        ottava.destroy_ub()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    for option, reason in {
        "bootstrap_backend='gloo'": "ranks meet through the tensor-parallel group",
        "'num_sm'": "no multiprocessors are set aside",
        "'atomic_gemm'": "chunks are products of their own",
        "with_cublasmp=True": "overlap_transport",
    }.items():
        assert sum(option in line and "has no effect" in line and reason in line for line in said) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": [128]}, "shape must be \\[tokens, hidden\\]"),
        ({"tp_size": 3}, "128 tokens cannot be split evenly over tp_size=3"),
        ({"quantization_modes": ["fp8"]}, "quantization_modes must be a list of UserBufferQuantizationMode.NONE"),
        ({"ub_cfgs": {"qkv": {}}}, "ub_cfgs has 'qkv'; its names are qkv_fprop"),
        ({"ub_cfgs": {"qkv_fprop": {"method": "magic"}}}, "has method 'magic'"),
        ({"ub_cfgs": {"qkv_fprop": {"splits": 2}}}, "has 'splits'; its keys are method, num_splits"),
        ({"ub_cfgs": [{}, {}]}, "2 ub_cfgs for 1 quantization_modes"),
        (
            {"quantization_modes": [Mode.NONE, Mode.FP8], "ub_cfgs": [{}, {"qkv_fprop": {"method": "pipeline"}}]},
            "ub_cfgs differ between quantization_modes",
        ),
    ],
)
def test_nonsense_is_refused_and_leaves_nothing_behind(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ottava.initialize_ub(**({"shape": [128, 64], "tp_size": 2} | arguments))
    assert not is_ub_initialized()


def test_two_calls_need_a_destroy_between_them() -> None:
    ottava.initialize_ub([128, 64], 2)
    with pytest.raises(ValueError, match="already, with shape \\[128, 64\\]: call destroy_ub"):
        ottava.initialize_ub([128, 64], 2)


def test_pieces_without_a_method_reach_the_products_that_are_made_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    ottava.initialize_ub([128, 64], 2, ub_cfgs={"proj_fprop": {"num_splits": 8}, "qkv_fprop": {"num_splits": 16}})
    assert schedule_of(EVERYTHING, "row", "proj", True, 2).splits == 8
    assert schedule_of(EVERYTHING, "column", "qkv", True, 2).splits == 4  # its gather goes in a ring
    ottava.destroy_ub()
    both = {"qkv_fprop": {"method": "pipeline", "num_splits": 8}, "qkv_dgrad": {"method": "pipeline", "num_splits": 2}}
    ottava.initialize_ub([128, 64], 2, ub_cfgs=both)
    assert schedule_of(EVERYTHING, "column", "qkv", True, 2).splits == 2
    assert "qkv has one number of pieces for all of its products: 2" in caplog.text


def test_a_method_that_a_product_does_not_know_is_named(caplog: pytest.LogCaptureFixture) -> None:
    unserved = {
        "qkv_fprop": "bulk",
        "fc1_wgrad": "pipeline",
        "proj_wgrad": "bulk",
        "fc2_dgrad": "bulk",
    }
    ottava.initialize_ub([128, 64], 2, ub_cfgs={name: {"method": method} for name, method in unserved.items()})
    for name, method in unserved.items():
        assert f"ub_cfgs['{name}'] has method '{method}', which has no effect" in caplog.text
    assert "nothing travels under it" in caplog.text and caplog.text.count("has no effect") == 4
    ottava.destroy_ub()
    caplog.clear()
    served = {"qkv_fprop": "ring_exchange", "qkv_dgrad": "bulk", "qkv_wgrad": "bulk", "proj_fprop": "pipeline"}
    ottava.initialize_ub([128, 64], 2, ub_cfgs={name: {"method": method} for name, method in served.items()})
    assert caplog.text == ""
