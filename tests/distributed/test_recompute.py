"""A recomputed forward is the first one again: same bits, same delayed-scaling history, same random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ottava
from distributed.ranks import Ranks
from ottava import recipe
from ottava.distributed import apply_recompute, model_parallel_seed, recompute
from ottava.distributed.shares import Share

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


# ------------------------------------------------------------------------------------------------------------ apply_recompute


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0, tracker: Any = None) -> None:
        super().__init__()
        self.layers = make(dropout, tracker)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def one_step(
    model: nn.Module, chosen: recipe.Recipe | None = None, x: Tensor | None = None
) -> tuple[list[Tensor], int]:
    """(output, gradients and buffers; bytes that autograd kept) of a forward and a backward pass."""
    kept: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(5)
    x = torch.randn(16, 2, 64, dtype=torch.bfloat16) if x is None else x
    with (
        ottava.autocast(enabled=chosen is not None, recipe=chosen),
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
    ):
        y = model(x.requires_grad_())
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    y.float().square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())], sum(kept.values())


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_mode_changes_memory_and_no_bit(name: str) -> None:
    model, expected = Stack(), Stack()
    names = list(model.state_dict())
    results = {}
    for mode in ("none", "selective", "full", "selective", "none"):
        ours = copy.deepcopy(apply_recompute(model, mode))  # and a copy recomputes itself, not its original
        assert list(model.state_dict()) == names
        result, kept = one_step(ours, RECIPES[name])
        assert same(result, one_step(copy.deepcopy(expected), RECIPES[name])[0])
        assert results.setdefault(mode, kept) == kept, "a later call replaces an earlier one"
        assert all(p.grad is None for p in model.parameters())
    if name != "none":
        assert results["full"] < results["selective"] < results["none"]
    assert results["full"] < 0.2 * results["none"]


def test_what_the_constructor_switched_on_stays_on() -> None:
    layer = ottava.TransformerLayer(64, 128, 4, device="cpu", recompute="selective")
    for mode in ("selective", "full", "none"):
        apply_recompute(layer, mode)
        assert layer.layernorm_mlp.recompute and layer.self_attention.proj.recompute
    assert not apply_recompute(ottava.Linear(16, 16, device="cpu"), "none").recompute


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_blocks_draw_the_same_dropout_masks(mode: str) -> None:
    def run(chosen: str) -> list[Tensor]:
        tracker = model_parallel_seed(11, tp_rank=0)
        model = apply_recompute(Stack(dropout=0.2, tracker=lambda: tracker), chosen)
        return [t for _ in range(2) for t in one_step(model, RECIPES["delayed"])[0]]

    assert same(run("none"), run(mode))


def test_chosen_blocks_alone_are_recomputed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    calls = [0, 0, 0]

    def counting(index: int) -> Any:
        def hook(*_: Any) -> None:
            calls[index] += 1

        return hook

    for index, block in enumerate(model):
        next(m for m in block.modules() if isinstance(m, nn.Linear)).register_forward_hook(counting(index))
    apply_recompute(model, "full", blocks=[model[1]])
    model(torch.randn(2, 8)).sum().backward()
    assert calls == [1, 2, 1]
    calls[:] = [0, 0, 0]
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert calls == [1, 1, 1]


def test_mistakes_with_recompute_are_named() -> None:
    with pytest.raises(ValueError, match="mode must be one of .*got 'some'"):
        apply_recompute(Stack(), "some")
    with pytest.raises(ValueError, match=r"found no blocks in Linear.*Pass blocks=\["):
        apply_recompute(nn.Linear(2, 2), "full")
    with pytest.raises(ValueError, match="Only mode 'full'"):
        apply_recompute(Stack(), "selective", distribute_saved_activations=True)
    model = Stack()
    model.layers[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="TransformerLayer has a forward of its own instance"):
        apply_recompute(model, "full")


# ------------------------------------------------------------------------------------------------------------------ in ranks


class Counted(Share):
    kept: list[tuple[int, int]] = []
    gathers = 0

    def __init__(self, tensor: Tensor, group: Any) -> None:
        super().__init__(tensor, group)
        Counted.kept.append((self.nbytes, self.part.numel()))

    def gather(self) -> Tensor:
        Counted.gathers += 1
        return super().gather()


def distributed(how: str) -> tuple[bool, list[tuple[int, int]], int]:
    """(equal to no recomputation, (bytes, bytes kept) of each distributed input, gathers)."""
    recompute.Share, Counted.kept, Counted.gathers = Counted, [], 0  # type: ignore[misc]
    group = dist.group.WORLD
    options: dict[str, Any] = {"distribute_saved_activations": True, "tp_group": group}
    tracker = ottava.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        if how == "plain":
            return ottava.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker, **options)
        return ottava.checkpoint(lambda h: ottava.checkpoint(layer, h, **options), x, **options)

    def get() -> Any:
        return tracker

    if how == "blocks":
        torch.manual_seed(5)
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16).transpose(0, 1)  # [s, b, h] with other strides
        expected, got = ([], [])
        for results, model in ((expected, Stack()), (got, apply_recompute(Stack(), "full", **options))):
            with ottava.autocast(recipe=RECIPES["delayed"]):
                y = model(x)
            y.float().square().sum().backward()
            results += [y.detach(), *(p.grad for p in model.parameters()), *model.buffers()]
    else:
        start = tracker.get_states()
        dropout, given = (0.2, get) if how == "plain" else (0.0, None)
        expected = train(lambda layer, x: layer(x), RECIPES["delayed"], 2, dropout, given)
        tracker.set_states(start)
        got = train(run, RECIPES["delayed"], 2, dropout, given)
    recompute.Share = Share  # type: ignore[misc]
    return same(expected, got), Counted.kept, Counted.gathers


@pytest.mark.parametrize(("how", "inputs"), [("plain", 12), ("nested", 12), ("blocks", 2)])
def test_distributed_inputs_change_no_bit(four_ranks: Ranks, how: str, inputs: int) -> None:
    size = 16 * 2 * 64 * 2
    for equal, kept, gathers in four_ranks.run(distributed, how):
        assert equal
        assert kept == [(size, size // 4)] * inputs and gathers == inputs


def sharded(name: str, mode: str) -> bool:
    """fully_shard after `apply_recompute` gives the gradients of fully_shard alone."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    results = []
    for chosen in ("none", mode):
        model = apply_recompute(Stack(), chosen)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(dist.get_rank())
        x = torch.randn(16, 2, 64, dtype=torch.bfloat16)
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = model(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad.full_tensor() for p in model.parameters()), *model.buffers()])
    return same(*results)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_inside_fsdp2(four_ranks: Ranks, mode: str) -> None:
    assert all(four_ranks.run(sharded, "delayed", mode)) and all(four_ranks.run(sharded, "current", mode))


def refused() -> list[str]:
    said = []
    layer = make()[0]
    x = torch.randn(16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as error:
        ottava.checkpoint(layer, x, distribute_saved_activations=True)
    said.append(str(error.value))
    layer.layernorm_mlp.parallel.sequence_parallel = True
    with pytest.raises(ValueError) as error:
        ottava.checkpoint(layer, x, distribute_saved_activations=True, tp_group=dist.group.WORLD)
    return [*said, str(error.value)]


def test_inputs_that_may_differ_are_not_distributed(four_ranks: Ranks) -> None:
    for no_group, sequence_parallel in four_ranks.run(refused):
        assert "needs tp_group" in no_group
        assert "LayerNormMLP is sequence parallel" in sequence_parallel


# ------------------------------------------------------------------------------------------------------------------- seeding


def test_default_streams_are_equal_over_tp_and_tracked_ones_differ() -> None:
    def draws(dp_rank: int, tp_rank: int) -> tuple[float, float]:
        tracker = model_parallel_seed(1234, tp_rank, dp_rank)
        with tracker.fork():
            inside = torch.rand(1).item()
        return torch.rand(1).item(), inside

    seen = {(dp, tp): draws(dp, tp) for dp in range(2) for tp in range(4)}
    assert len({default for default, _ in seen.values()}) == 2
    assert all(seen[dp, tp][0] == seen[dp, 0][0] for dp, tp in seen)
    assert len({inside for _, inside in seen.values()}) == 8
    assert draws(1, 3) == seen[1, 3]
