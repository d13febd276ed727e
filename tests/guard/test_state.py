"""Digests, plausible numbers, and who is told to be wrong."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from ottava.chaos.numbers import flip_bit
from ottava.guard.digest import ROW, digest, digest_rows, read
from ottava.guard.finding import Finding, first
from ottava.guard.replay import Record
from ottava.guard.replicas import Sealed, compare, evidence
from ottava.guard.state import Entry, Limits, Scales, StateWatch
from ottava.quant.delayed import DelayedState


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_changes_a_digest(dtype):
    x = torch.randint(0, 200, (3, ROW + 7)).to(dtype)
    before, draw = int(digest(x)), random.Random(0)
    for _ in range(100):
        index, bit = draw.randrange(x.numel()), draw.randrange(8 * x.element_size())
        flip_bit(x, index, bit)
        assert int(digest(x)) != before
        flip_bit(x, index, bit)
    assert int(digest(x)) == before == int(digest(x.t().contiguous().t()))


def test_a_digest_does_not_depend_on_where_the_bytes_lie():
    x = torch.randn(4100).bfloat16()
    shifted = torch.cat([x.new_zeros(1), x])[1:]  # 2 bytes after a border of 8
    assert shifted.data_ptr() % 8 and int(digest(shifted)) == int(digest(x))


def test_digests_tell_zeros_apart_and_rows_that_change_places():
    x = torch.randn(4, ROW, dtype=torch.float64)
    empty, zero = torch.empty(0), torch.zeros(1)
    numbers = read([digest(t) for t in (x, x[[1, 0, 2, 3]], empty, zero, -zero, torch.zeros(2))])
    assert len(set(numbers)) == 6


def test_digests_of_all_rows_at_once_are_those_of_each():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        rows = torch.randint(0, 200, (5, ROW)).to(dtype)
        assert digest_rows(rows).tolist() == [int(digest(row)) for row in rows]
    assert digest_rows(torch.empty(0, ROW)).tolist() == []


def test_a_digest_does_not_depend_on_how_many_factors_are_kept(monkeypatch):
    x = torch.randn(10, ROW, dtype=torch.float64)
    before = int(digest(x))
    monkeypatch.setattr("ottava.guard.digest.MOST_KEPT", 4)
    monkeypatch.setattr("ottava.guard.digest._FACTORS", {})
    assert int(digest(x)) == before and int(digest(x[:3])) == int(digest(x[:3].clone()))


def test_moments_are_looked_at_from_the_step_after_the_one_that_makes_them():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    watch, cpu = StateWatch(model, optimizer), torch.device("cpu")
    assert float(watch.glance(cpu)) == 0  # before the first step there are none
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"][0, 0] = 1e28
    assert float(watch.glance(cpu)) == 1


def test_numbers_that_no_training_gives_are_found():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    watch, cpu = StateWatch(model, optimizer), torch.device("cpu")
    assert float(watch.glance(cpu)) == 0 and watch.findings() == []
    state = optimizer.state[model.weight]
    for tensor, value, operand, kind in (
        (model.weight.data, 3e36, "weight (weight)", "implausible"),
        (model.bias.data, math.nan, "weight (bias)", "non-finite"),
        (state["exp_avg"], 1e28, "moment (exp_avg of weight)", "implausible"),
        (state["exp_avg_sq"], -math.inf, "moment (exp_avg_sq of weight)", "non-finite"),
    ):
        old = tensor.view(-1)[1].clone()
        tensor.view(-1)[1] = value
        assert float(watch.glance(cpu)) == 1
        (found,) = watch.findings()
        assert (found.operand, found.kind) == (operand, kind) and found.value == f"{value:g} at 1" and found.state
        tensor.view(-1)[1] = old
    assert float(watch.glance(cpu)) == 0


def test_delayed_scales_have_to_fit_their_history():
    state = DelayedState(2)
    state.used = True
    state.fwd_amax_history[5] = 3.0
    state.fwd_scale.fill_(448.0 / 3.0)
    assert Scales.of([state]).fits.all()
    state.fwd_amax_history[7, 1] = math.inf  # of a step that was bad itself
    assert Scales.of([state]).fits.all()
    for scale in (1e30, 1e-30, math.nan, math.inf):
        state.fwd_scale[4] = scale
        assert (~Scales.of([state]).fits).nonzero().tolist() == [[4]]


def test_a_large_state_is_looked_at_in_turns(monkeypatch):
    from ottava.guard import state as module

    monkeypatch.setattr(module, "LEAST", 4)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(32)))
    watch = StateWatch(model, torch.optim.AdamW(model.parameters()))
    model[17].weight.data[0, 0] = math.inf
    assert sum(float(watch.glance(torch.device("cpu"))) for _ in range(16)) == 1


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(f"model.{name}", name, "weight", "weight", "all", tensor)


def _everyone(tables):
    """`gather`, for ranks that are played one after the other."""
    return lambda mine: tables


def test_the_rank_that_differs_from_the_most_is_wrong():
    ranks = [[_entry("a", torch.ones(3)), _entry("b", torch.zeros(3))] for _ in range(3)]
    ranks[2][1].tensor[1] = 1e-7
    sealed = [Sealed(entries) for entries in ranks]
    (dispute,) = compare(sealed[0], _everyone([s.table() for s in sealed])).values()
    assert dispute.wrong == [2] and dispute.entry.layer == "b"
    two = compare(sealed[0], _everyone([sealed[0].table(), sealed[2].table()]))
    assert [d.wrong for d in two.values()] == [[]]  # no majority


def test_of_two_that_differ_the_one_that_is_farther_from_the_truth_is_wrong():
    truth = torch.randn(3 * ROW)
    held = [truth + 1e-6, truth + 1e-6]  # gradients are summed: none has the right numbers any more
    held[1][2 * ROW + 5] += 1e-3
    entries = [[_entry("w", t)] for t in held]
    sealed = [Sealed(e) for e in entries]
    disputes = compare(sealed[0], _everyone([s.table() for s in sealed]))
    answers = []  # what rank 1 says to each question
    evidence(
        compare(sealed[1], _everyone([s.table() for s in sealed])), lambda mine: answers.append(mine) or [mine, mine]
    )
    asked = iter([answers[0], held[1].view(-1, ROW)[2:3].double()])
    found = evidence(disputes, lambda mine: [mine, next(asked)])
    (seen,) = found.values()
    assert seen.places.tolist() == [2 * ROW + 5] and seen.farthest(truth) == 1


def test_records_name_the_first_tensor_that_differs():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(2, 3)

    def record(change: bool = False) -> Record:
        with Record(model).watching() as found:
            hidden = model[0](x)
            if change:
                flip_bit(hidden, 2, 0)
            model[1](hidden).sum().backward()
        return found

    once = record()
    assert once.difference(record()) is None
    odd = once.difference(record(change=True))
    assert odd is not None and (odd.layer, odd.operand, odd.direction) == ("1", "input", "forward")


def test_state_comes_before_passes_and_early_before_late():
    late, early = (Finding("replay", "x", "output", 0, direction="forward", order=order) for order in (7, 3))
    weight = Finding("memory", "x", "weight", 1)
    assert first([late, early]) == early and first([late, weight, early]) == weight and first([]) is None
    assert Finding.from_json({**weight.as_json(), "later": 1}) == weight


def test_limits_of_nothing_are_kept():
    assert float(Limits([_entry("bytes", torch.zeros(2, dtype=torch.uint8))]).out_of_bounds()) == 0
