"""A recomputed forward is the first one again: same bits, same delayed-scaling history, same random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ottava
from ottava import recipe

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


def make(dropout: float = 0.0, tracker=None):
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        ottava.TransformerLayer(
            64, 128, 4, hidden_dropout=dropout, attention_dropout=dropout, params_dtype=torch.bfloat16, device="cpu",
            get_rng_state_tracker=tracker,
        )
        for _ in range(2)
    )  # fmt: skip


def train(run, chosen, microbatches: int = 1, dropout: float = 0.0, tracker=None):
    """Three steps; `microbatches` forwards are in flight before their backwards run. Returns everything that could differ."""
    layers = make(dropout, tracker)
    seen = []
    for step in range(3):
        outputs = []
        for micro in range(microbatches):
            torch.manual_seed(100 * step + micro)
            x = torch.randn(16, 2, 64, dtype=torch.bfloat16) * (micro + 1)
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                for layer in layers:
                    x = run(layer, x)
            outputs.append(x)
        for y in outputs:
            y.float().pow(2).sum().backward()
        seen += [y.detach() for y in outputs] + [p.grad.clone() for p in layers.parameters()]
        seen += [b.clone() for b in layers.buffers()]
        layers.zero_grad()
    return seen


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", list(RECIPES))
def test_checkpoint_changes_no_bit(name, microbatches):
    plain = train(lambda layer, x: layer(x), RECIPES[name], microbatches)
    assert same(plain, train(lambda layer, x: ottava.checkpoint(layer, x), RECIPES[name], microbatches))


def test_checkpoint_inside_checkpoint():
    chosen = RECIPES["delayed"]
    nested = train(lambda layer, x: ottava.checkpoint(lambda h: ottava.checkpoint(layer, h), x), chosen, 2)
    assert same(train(lambda layer, x: layer(x), chosen, 2), nested)


@pytest.mark.parametrize("name", list(RECIPES))
def test_torchs_own_checkpoint_changes_no_bit(name):
    plain = train(lambda layer, x: layer(x), RECIPES[name])
    assert same(plain, train(lambda layer, x: torch_checkpoint(layer, x, use_reentrant=False), RECIPES[name]))


def test_dropout_draws_the_same_masks_from_every_stream():
    def run(call):
        tracker = ottava.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 77)

        def get():
            return tracker

        return train(lambda layer, x: call(layer, x, get), RECIPES["current"], dropout=0.2, tracker=get)

    plain = run(lambda layer, x, get: layer(x))
    assert same(plain, run(lambda layer, x, get: ottava.checkpoint(layer, x, get_rng_state_tracker=get)))


def test_tracker_streams_are_independent_and_restorable():
    tracker = ottava.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    tracker.add("other", 2)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork("other"):
        other = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)  # the default stream did not move
    with tracker.fork():
        second = torch.rand(4)
    tracker.set_states(saved)
    with tracker.fork():
        again = torch.rand(4)
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, other)


def test_mistakes_with_streams_are_named():
    tracker = ottava.CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="seed 1 is taken"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="stream 'a' already"):
        tracker.add("a", 2)
    with pytest.raises(ValueError, match="no stream 'model-parallel-rng' \\(known: a\\)"), tracker.fork():
        pass
