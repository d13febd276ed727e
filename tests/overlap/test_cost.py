"""Where chunks would lose, nothing is cut; and the choice is the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ottava
from distributed.ranks import Ranks
from ottava.nn.options import OverlapOptions
from ottava.overlap import (
    Machine,
    Product,
    Schedule,
    VirtualLink,
    choose,
    crossing,
    machine_of,
    measuring,
    transport_of,
    wrapping,
)
from ottava.overlap.cost import WORTH, message_s, overlapped_s, product_s, sequential_s

LLAMA = Product(
    tokens=8192, contraction=4096, features=1536, bytes=8192 * 4096, quantized=True
)  # qkv of 8B over 4 ranks
FLAT = Machine(1e12, 1e12, 1e9, 0.0, 0.0)  # nothing but rates


def test_the_estimates_are_those_of_the_schedules() -> None:
    """On paper: collective and product of one second each."""
    product = Product(tokens=1000, contraction=1000, features=500_000, bytes=2_000_000_000, quantized=False)
    assert product_s(FLAT, product, 1000) == pytest.approx(1.0) and sequential_s(FLAT, product, 2) == pytest.approx(2.0)
    assert overlapped_s(FLAT, product, 2, "gather", "ring", 4) == pytest.approx(1.5)
    assert overlapped_s(FLAT, product, 2, "gather", "pipeline", 4) == pytest.approx(1.125)
    assert overlapped_s(FLAT, product, 2, "scatter", "pipeline", 4) == pytest.approx(1.125)
    four = replace(product, bytes=4_000_000_000 // 3)
    assert overlapped_s(FLAT, four, 4, "gather", "ring", 4) == pytest.approx(1.25)
    assert message_s(replace(FLAT, latency_s=0.5), 1e9) == pytest.approx(1.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("collective", "method"), [("gather", "ring"), ("gather", "pipeline"), ("scatter", "pipeline")]
)
def test_few_tokens_are_left_alone_and_many_are_cut(device: str, collective: str, method: str) -> None:
    machine = machine_of(device)
    limit = crossing(collective, method, LLAMA, 4, machine)
    assert limit is not None and 16 <= limit <= 65536  # a CPU unpacks the weight for every chunk
    for tokens, overlaps in ((limit // 4, False), (limit, True), (limit * 16, True)):
        product = replace(LLAMA, tokens=tokens, bytes=tokens * 4096)
        choice = choose(collective, method, product, 4, machine)
        assert choice.overlaps is overlaps, choice
        assert (choice.overlapped_s < WORTH * choice.sequential_s) is overlaps
        assert overlaps or "would take" in choice.why


def test_a_gpu_cuts_nothing_below_two_thousand_tokens() -> None:
    """What the field has measured (docs/overlap.md)."""
    limit = crossing("gather", "ring", LLAMA, 8, machine_of("cuda"))
    assert limit is not None and 2048 <= limit <= 8192


def test_auto_takes_the_best_and_a_limit_by_hand_overrules_the_estimate() -> None:
    machine = machine_of("cuda")
    auto = choose("gather", "auto", LLAMA, 4, machine)
    assert auto.overlapped_s == min(choose("gather", m, LLAMA, 4, machine).overlapped_s for m in ("ring", "pipeline"))
    few = replace(LLAMA, tokens=64, bytes=64 * 4096)
    assert choose("gather", "ring", few, 4, machine).method == "none"
    assert choose("gather", "ring", few, 4, machine, minimum_tokens=0).method == "ring"
    assert choose("gather", "ring", few, 4, machine, minimum_tokens=65).method == "none"
    assert choose("scatter", "ring", LLAMA, 4, machine).method == "none"  # a sum has no ring
    assert choose("gather", "none", LLAMA, 4, machine).method == "none"


def test_a_schedule_names_its_mistakes() -> None:
    with pytest.raises(ValueError, match="gather must be one of.*got 'rnig'. Did you mean 'ring'"):
        Schedule(gather="rnig")
    with pytest.raises(ValueError, match="method must be one of"):
        Schedule.of("always")
    with pytest.raises(ValueError, match="splits must be a number of pieces"):
        Schedule(splits=0)
    assert not Schedule.of("none").active and Schedule.of("bulk").active


# ----------------------------------------------------------------------------------------------------------------- on ranks


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def _by_tokens(bytes_per_second: float, method: str) -> dict[int, list[str]]:
    """What moved bytes in the forward pass of a column, by the tokens of a rank; and what was said, under 0."""
    log, found = _Log(), {}
    logging.getLogger("ottava").addHandler(log)
    with wrapping(lambda transport: VirtualLink(transport, bytes_per_second)):
        layer = ottava.Linear(
            256, 512, device="cpu", parallel_mode="column", sequence_parallel=True, tp_size=dist.get_world_size()
        )
        layer.overlap = OverlapOptions(method=method)
        layer.set_tensor_parallel_group(dist.group.WORLD)
        for tokens in (1, 8, 64, 512):
            with measuring() as meter, torch.no_grad():
                layer(torch.randn(tokens, 256))
            found[tokens] = sorted(meter.by_name)
    logging.getLogger("ottava").removeHandler(log)
    return found | {0: log.lines}


def _measured() -> tuple[float, float]:
    link = transport_of(None, "auto", torch.device("cpu")).link()  # type: ignore[union-attr]
    assert link is not None
    return link


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_the_engine_itself_leaves_few_tokens_alone(ranks: Ranks) -> None:
    slow = ranks.run(_by_tokens, 1e9, "ring")  # 512 tokens of a rank take 0.5 ms on the link, and a few to multiply
    assert slow[0][1] == [] and slow[0][512] == ["ring_all_gather"]
    assert slow[0] == slow[1] | {0: slow[0][0]}
    (warning,) = [line for line in slow[0][0] if line.startswith("WARNING")]
    assert 'overlap="ring": a gather is not overlapped: 2 tokens in chunks would take' in warning


def test_auto_says_nothing_of_what_it_leaves_out(ranks: Ranks) -> None:
    found = ranks.run(_by_tokens, 1e9, "auto")
    assert found[0][1] == [] and found[0][512] != []
    assert not [line for line in found[0][0] if line.startswith("WARNING")]


def test_ranks_agree_on_the_speed_of_their_link(ranks: Ranks) -> None:
    first, second = ranks.run(_measured)
    assert first == second and 1e5 < first[0] < 1e12 and 0.0 < first[1] < 10.0
