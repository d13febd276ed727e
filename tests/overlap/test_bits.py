"""A gather under a product has the bits of no overlap: where a GPU's chunks could have others, nothing is cut, or it is said."""

from __future__ import annotations

import doctest
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from distributed.ranks import Ranks
from ottava.nn.operand import Operand
from ottava.overlap import Engine, Product, Schedule, VirtualLink, bits, choose, crossing, engine, machine_of, wrapping
from ottava.overlap.bits import ANY, IN_EIGHTS, LARGE, chunk_rows, exact_chunks, inexact_because
from ottava.quant.scheme import Scheme

# Messages and launches that cost nothing, so that every method pays: what decides is bits alone.
MACHINE = replace(machine_of("cuda"), latency_s=0.0, start_s=0.0)


def product(tokens: int, features: int = 2048, exact: str = LARGE) -> Product:
    """Tokens of all ranks, bf16, as proj's dgrad of Llama-3-8B on two ranks."""
    return Product(tokens, 4096, features, tokens * 4096 * 2, quantized=False, exact_chunks=exact)


def test_chunks_that_a_gpu_may_split_are_not_cut() -> None:
    """Measured on an H200: chunks of 64 rows of 512 have other bits at n 2048, k 4096."""
    few = product(512)
    for method in ("ring", "pipeline", "auto"):
        choice = choose("gather", method, few, 8, MACHINE)
        assert choice.method == "none" and "64 x 2048 elements in another order" in choice.why, choice
        assert choose("gather", method, replace(few, exact_chunks=ANY), 8, MACHINE).overlaps
    assert choose("scatter", "pipeline", few, 8, MACHINE).overlaps  # sums over ranks are close, and promise no more


def test_a_limit_by_hand_is_obeyed_and_its_chunks_are_named() -> None:
    choice = choose("gather", "ring", product(512), 8, MACHINE, minimum_tokens=0)
    assert choice.method == "ring" and choice.inexact is not None and "64 x 2048" in choice.inexact
    assert choose("gather", "ring", product(8192), 8, MACHINE, minimum_tokens=0).inexact is None


def test_auto_takes_the_method_whose_chunks_are_large_enough() -> None:
    """1,024 tokens of two ranks: 512 rows in a ring, 128 in a pipeline of four pieces, which would be shorter."""
    sizes = product(1024)
    assert (
        choose("gather", "pipeline", replace(sizes, exact_chunks=ANY), 2, MACHINE).overlapped_s
        < choose("gather", "ring", sizes, 2, MACHINE).overlapped_s
    )
    assert choose("gather", "pipeline", sizes, 2, MACHINE).method == "none"
    assert choose("gather", "auto", sizes, 2, MACHINE).method == "ring"


def test_narrow_products_need_more_rows() -> None:
    """qkv of 8 ranks has 768 columns: 256 rows are fewer elements than were seen to be safe."""
    assert crossing("gather", "ring", product(8192, 2048), 8, MACHINE) == 2048
    assert crossing("gather", "ring", product(8192, 768), 8, MACHINE) == 8192
    assert crossing("gather", "ring", product(8192, 28672), 8, MACHINE) == 1024  # 128 rows, however wide
    assert inexact_because(LARGE, [64], 64, 2048) is None  # one chunk is the whole


def test_rows_of_chunks_are_those_that_the_methods_multiply() -> None:
    assert chunk_rows(100, 4, "ring", 2) == [100] * 4
    assert chunk_rows(1024, 2, "pipeline", 4) == [1024, 256, 256, 256, 256]
    assert doctest.testmod(bits).failed == 0


def test_blocks_of_128_in_odd_numbers_of_rows_are_emulated_and_so_not_cut() -> None:
    sizes = Product(2056, 4096, 2048, 2056 * 4096, quantized=True, exact_chunks=IN_EIGHTS)  # 1,028 of each rank
    choice = choose("gather", "ring", sizes, 2, MACHINE)
    assert choice.method == "none" and "emulates a chunk of 1028" in choice.why
    assert choose("gather", "ring", replace(sizes, tokens=2048), 2, MACHINE).overlaps
    assert inexact_because(IN_EIGHTS, [1025], 2050, 2048) is None  # the whole is emulated too


def test_it_is_a_matter_of_gpus_and_of_what_bf16_kernels_multiply() -> None:
    def operands(device: str, scheme: str | None = None, groups: int = 1) -> list[Operand]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            data = torch.empty(8, 256, device=device)
        return [Operand(data, scheme=None if scheme is None else Scheme.parse(scheme))] * groups

    assert exact_chunks(operands("cpu")) == exact_chunks(operands("cpu", "e4m3:1x32")) == ANY
    assert exact_chunks(operands("cuda")) == LARGE
    assert exact_chunks(operands("cuda", groups=2)) == ANY
    assert exact_chunks(operands("cuda", "e4m3:tensor")) == ANY
    assert exact_chunks(operands("cuda", "e4m3:1x128")) == IN_EIGHTS
    for emulated in ("e4m3:1x32", "e2m1:1x16", "e4m3:128x128", "e5m2:1x128"):
        assert exact_chunks(operands("cuda", emulated)) == LARGE


# ----------------------------------------------------------------------------------------------------------------- on ranks


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _said(schedules: list[Schedule]) -> tuple[list[bool], list[str]]:
    """Whether each schedule cuts a gather of 64 rows a rank, as if on a GPU; and what was said."""
    log, real = _Log(), engine.exact_chunks
    logging.getLogger("ottava").addHandler(log)
    engine.exact_chunks = lambda operands: LARGE
    weight = torch.eye(16)  # it stands for one with 4,096 outputs, which takes as long as its gather

    def multiply(operands: list[Operand]) -> torch.Tensor:
        return operands[0].data @ weight

    def cuts(schedule: Schedule) -> bool:
        return (
            Engine(dist.group.WORLD, schedule).gather_multiply([Operand(torch.ones(64, 16))], multiply, 4096)
            is not None
        )

    try:
        with wrapping(lambda transport: VirtualLink(transport, 1e7)):
            return [cuts(schedule) for schedule in schedules for _ in range(2)], log.lines
    finally:
        engine.exact_chunks = real
        logging.getLogger("ottava").removeHandler(log)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("schedule", "cut", "words"),
    [
        (Schedule.of("ring"), False, 'overlap="ring": a gather is not overlapped: a GPU may sum products of 64 x 4096'),
        (Schedule.of("auto"), False, None),
        (
            Schedule.of("ring", minimum_tokens=0),
            True,
            'overlap="ring": a gather is cut as ordered, and the last bits may differ',
        ),
        (Schedule.of("auto", minimum_tokens=0), True, "overlap_minimum_tokens: a gather is cut as ordered"),
        (
            Schedule(gather="ring", minimum_tokens=0, requested=("ub_overlap_ag",)),
            True,
            "ub_overlap_ag: a gather is cut as ordered",
        ),
    ],
    ids=["a wish", "auto", "an order", "auto by hand", "a switch"],
)
def test_the_engine_leaves_them_alone_or_says_once_what_may_differ(
    ranks: Ranks, schedule: Schedule, cut: bool, words: str | None
) -> None:
    results: list[Any] = ranks.run(_said, [schedule])
    assert [cuts for cuts, _ in results] == [[cut, cut]] * 2
    said = [line for line in results[0][1] if "gather is" in line]
    assert len(said) == (words is not None) and results[1][1] == []
    assert words is None or words in said[0], said
