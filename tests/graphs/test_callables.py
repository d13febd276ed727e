"""Graphed modules give the bits of the modules. On a CPU a replay is the same work again, on the same static tensors (`Rerun`)."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava import recipe
from ottava.graphs import Rerun
from ottava.graphs.callables import graph_modules
from ottava.graphs.options import Options
from ottava.quant.delayed import DelayedState

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
HIDDEN = 128


def _make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return ottava.Linear(HIDDEN, HIDDEN, device="cpu")
    if kind == "mlp":
        return ottava.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", device="cpu")
    return ottava.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")


def _inputs(steps: int, microbatches: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(32, 4, HIDDEN, generator=generator) * (s + 1) for _ in range(microbatches)] for s in range(steps)
    ]


def _train(module: torch.nn.Module, chosen: Any, caching: bool) -> list[torch.Tensor]:
    """Everything that comes out of four steps of two microbatches."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for parts in _inputs(4, 2):
        kwargs = [{"is_first_microbatch": i == 0} if caching else {} for i in range(2)]
        leaves = [x.clone().requires_grad_() for x in parts]
        for x, options in zip(leaves, kwargs):
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                y = module(x, **options)
            seen.append(y.detach().clone())
            y.square().sum().backward()
        seen += [x.grad.clone() for x in leaves]
        seen += [p.grad.clone() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [b.clone() for b in module.buffers()]
    return seen + [p.detach().clone() for p in module.parameters()]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "mlp", "layer"])
def test_training_with_graphs_gives_the_same_bits(kind: str, name: str, caching: bool) -> None:
    chosen = RECIPES[name]
    module = _make(kind)
    plain = copy.deepcopy(module)
    sample = torch.randn(32, 4, HIDDEN, requires_grad=True)
    options = Options(enabled=chosen is not None, recipe=chosen, caching=caching)
    graphed = graph_modules(module, (sample,), None, options, Rerun())
    assert graphed is module
    assert _equal(_train(graphed, chosen, caching), _train(plain, chosen, caching))


def test_recording_leaves_no_trace() -> None:
    module = _make("mlp")
    before = [t.clone() for t in (*module.parameters(), *module.buffers())]
    sample = torch.randn(32, 4, HIDDEN, requires_grad=True)
    random = torch.get_rng_state()
    graph_modules(module, (sample,), None, Options(enabled=True, recipe=RECIPES["delayed"]), Rerun())
    assert _equal(before, [*module.parameters(), *module.buffers()])
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in module.parameters()) and sample.grad is None


def test_delayed_scales_change_once_an_autocast_however_many_replays_are_inside() -> None:
    chosen = RECIPES["delayed"]
    graphed, plain = _make("linear"), _make("linear")
    graph_modules(graphed, (torch.randn(8, HIDDEN),), None, Options(enabled=True, recipe=chosen), Rerun())
    for module in (graphed, plain):
        with ottava.autocast(recipe=chosen):
            module(torch.ones(8, HIDDEN))
            module(torch.full((8, HIDDEN), 3.0))
            assert module.delayed.fwd_scale.eq(1).all()
    assert _equal(list(graphed.buffers()), list(plain.buffers()))
    assert not graphed.delayed.fwd_scale[:2].eq(1).any()


def test_the_updates_of_a_layer_are_one_launch_each_way() -> None:
    layers = [_make("layer"), _make("layer")]
    sample = torch.randn(32, 4, HIDDEN, requires_grad=True)
    chosen = RECIPES["delayed"]
    graph_modules(tuple(layers), ((sample,), (sample,)), None, Options(enabled=True, recipe=chosen), Rerun())
    launched = []
    for number, layer in enumerate(layers):
        states = [m for m in layer.modules() if isinstance(m, DelayedState)]
        found = [(way, recorded) for m in states for way, recorded in m.recorded_updates.items()]
        assert sorted(way for way, _ in found) == [False, True]
        for state in states:
            for way, recorded in list(state.recorded_updates.items()):
                assert set(map(id, recorded.states)) == set(map(id, states))
                note = (number, way)
                replay = recorded.replay
                state.recorded_updates[way] = recorded._replace(
                    replay=lambda note=note, replay=replay: (launched.append(note), replay())
                )
    with ottava.autocast(recipe=chosen):
        y = layers[1](layers[0](sample))
    y.sum().backward()
    assert launched == [(0, True), (1, True), (1, False), (0, False)]


def test_an_update_by_another_recipe_is_not_the_recorded_one() -> None:
    first, other = RECIPES["delayed"], recipe.DelayedScaling(margin=2, amax_history_len=4)
    graphed, plain = _make("linear"), _make("linear")
    graph_modules(graphed, (torch.randn(8, HIDDEN),), None, Options(enabled=True, recipe=first), Rerun())
    for module in (graphed, plain):
        with torch.enable_grad(), ottava.autocast(recipe=other):
            type(module).forward(module, torch.full((8, HIDDEN), 3.0))
    assert _equal(list(graphed.buffers()), list(plain.buffers()))


def test_without_autocast_around_a_replay_updates_by_itself() -> None:
    chosen = RECIPES["delayed"]
    graphed, plain = _make("linear"), _make("linear")
    graph_modules(graphed, (torch.randn(8, HIDDEN),), None, Options(enabled=True, recipe=chosen), Rerun())
    x = torch.full((8, HIDDEN), 3.0)
    with ottava.autocast(recipe=chosen):
        expected = plain(x)
    assert torch.equal(graphed(x), expected) and _equal(list(graphed.buffers()), list(plain.buffers()))


def test_two_modules_are_graphed_together_and_pass_gradients_on() -> None:
    chosen = RECIPES["current"]
    made = [(_make("linear"), _make("mlp")) for _ in range(2)]
    sample = torch.randn(8, HIDDEN, requires_grad=True)
    graph_modules(made[0], ((sample,), (sample,)), None, Options(enabled=(True, False), recipe=chosen), Rerun())
    found = []
    for first, second in made:
        x = torch.ones(8, HIDDEN, requires_grad=True)
        with ottava.autocast(recipe=chosen):
            h = first(x)
        y = second(h)
        y.sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for m in (first, second) for p in m.parameters())])
    assert _equal(*found)


def test_is_first_microbatch_none_is_what_a_call_without_it_is() -> None:
    module, plain = _make("linear"), _make("linear")
    graph_modules(module, (torch.randn(8, HIDDEN),), None, Options(), Rerun())
    x = torch.randn(8, HIDDEN)
    assert torch.equal(module(x, is_first_microbatch=None), plain(x))


def test_hooks_at_capture_time_run_then_and_never_again() -> None:
    seen: list[str] = []
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [{kind: {0: lambda m, kind=kind: seen.append(kind)} for kind in kinds}]
    module = _make("linear")
    options = Options(warm_ups=1, before_warm_up=lambda: seen.append("begin"), after_warm_up=lambda: seen.append("end"))
    graph_modules(module, (torch.randn(8, HIDDEN, requires_grad=True),), None, options, Rerun(), hooks)
    assert seen == ["begin", *kinds, "end", *kinds]
    module(torch.randn(8, HIDDEN)).sum().backward()
    assert len(seen) == 10


def test_gradients_that_go_into_main_grad_are_added_by_replays_alone() -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        module = ottava.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, device="cpu")
        module.weight.main_grad = torch.ones(HIDDEN, HIDDEN)
        modules.append(module)
    graph_modules(modules[0], (torch.randn(8, HIDDEN),), None, Options(), Rerun())
    assert modules[0].weight.main_grad.eq(1).all()
    x = torch.randn(8, HIDDEN)
    for module in modules:
        for _ in range(2):
            module(x).sum().backward()
    assert torch.equal(modules[0].weight.main_grad, modules[1].weight.main_grad)
    assert modules[0].weight.grad_added_to_main_grad


def test_gradients_accumulate_and_outlive_the_next_replay() -> None:
    module = _make("linear")
    graph_modules(module, (torch.randn(8, HIDDEN, requires_grad=True),), None, Options(), Rerun())
    x = torch.ones(8, HIDDEN, requires_grad=True)
    module(x).sum().backward()
    gradient, of_input = module.weight.grad.clone(), x.grad.clone()
    module(torch.full((8, HIDDEN), 5.0)).sum().backward()
    assert torch.equal(module.weight.grad, 6 * gradient) and torch.equal(x.grad, of_input)


def test_gradients_are_copied_once() -> None:
    """Autograd keeps the copies that it is given, instead of copying them again."""
    module = _make("mlp")
    graph_modules(module, (torch.randn(8, HIDDEN, requires_grad=True),), None, Options(), Rerun())
    module(torch.randn(8, HIDDEN)).sum().backward()
    vectors = [p.grad for p in module.parameters() if p.dim() == 1]
    assert len(vectors) == 4 and len({g.untyped_storage().data_ptr() for g in vectors}) == 1


class _Sum(torch.nn.Module):
    """Takes tensors in every way in which modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Any, pair: Any = None, *, scale: float = 1.0, more: Any = None) -> Any:
        x = x[0] if isinstance(x, list) else x
        total = x * self.weight * scale
        total = total if pair is None else total + pair[0] - pair[1]
        return total if more is None else (total + more, "and", {"more": more * 2})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((0,), {}),
        ((0,), {"more": 1, "scale": 2.0}),
        ((0, (1, 2)), {"more": 3}),
        (([0],), {}),
        (([0],), {"pair": (1, 2), "scale": 0.5}),
    ],
)
def test_calls_are_served_whatever_holds_their_tensors(args: Any, kwargs: Any) -> None:
    def filled(tree: Any) -> Any:
        return torch.utils._pytree.tree_map(
            lambda leaf: torch.randn(4, HIDDEN, requires_grad=True) if type(leaf) is int else leaf, tree
        )

    module, plain = _Sum(), _Sum()
    graph_modules(module, filled(args), filled(kwargs), Options(allow_unused_input=True), Rerun())
    for _ in range(2):
        given, named = filled(args), filled(kwargs)
        named = dict(reversed(named.items()))
        results = [m(*given, **named) for m in (module, plain)]
        leaves = [torch.utils._pytree.tree_leaves(result) for result in results]
        assert torch.utils._pytree.tree_structure(results[0]) == torch.utils._pytree.tree_structure(results[1])
        assert all(a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(*leaves, strict=True))
        for found in leaves:
            sum(leaf.sum() for leaf in found if not isinstance(leaf, str)).backward()
        assert torch.equal(module.weight.grad, plain.weight.grad)


def test_the_python_of_a_replay_does_not_grow_with_the_parameters() -> None:
    """Of twelve layers as of one: what is done by parameter or by state is done by torch, or when the graph is recorded."""
    found = {}
    for name in ("none", "delayed"):
        for layers in (1, 12):
            module = torch.nn.Sequential(*(_make("linear") for _ in range(layers)))
            x = torch.randn(8, HIDDEN, requires_grad=True)
            chosen = RECIPES[name]
            graph_modules(module, (x,), None, Options(enabled=chosen is not None, recipe=chosen), _Nothing())
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                module(x).sum().backward()
            found[name, layers] = _calls(lambda module=module, x=x, chosen=chosen: _step(module, x, chosen))
    assert found["none", 12] == found["none", 1] and found["delayed", 12] == found["delayed", 1]
    assert found["none", 1] < 65 and found["delayed", 1] < 110


def _step(module: torch.nn.Module, x: torch.Tensor, chosen: Any) -> None:
    with ottava.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x)
    y.backward(torch.ones_like(y))


class _Nothing(Rerun):
    """A replay that launches nothing: what is left is the host's."""

    def record(self, run: Any) -> Any:
        kept = tuple(run())
        return lambda: kept


def _calls(function: Any) -> int:
    """Python functions that are called in this thread."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_evaluation_and_no_grad_run_the_module_itself() -> None:
    module, plain = _make("linear"), _make("linear")
    graph_modules(module, (torch.randn(8, HIDDEN),), None, Options(), Rerun())
    other = torch.randn(3, HIDDEN)
    with torch.no_grad():
        assert torch.equal(module(other), plain(other))
    assert torch.equal(module.eval()(other), plain(other))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m(torch.randn(9, HIDDEN)), r"graphed for \(\(8, 128\).*called with \(\(9, 128\)"),
        (lambda m: m(torch.randn(8, HIDDEN), is_first_microbatch=True), "cache_quantized_params=True"),
        (lambda m: _inside(m, RECIPES["block"]), "graphed with .* inside autocast"),
        (lambda m: m([torch.randn(8, HIDDEN)]), "graphed for .* but is called with"),
        (lambda m: m(torch.randn(8, HIDDEN).double()), "graphed for .*float32.*called with .*float64"),
        (lambda m: m(torch.randn(8, HIDDEN), None), "graphed for other arguments"),
        (lambda m: m(None), "graphed for .* but is called with None"),
        (lambda m: _moved(m), "lie elsewhere"),
    ],
)
def test_calls_that_a_graph_cannot_serve_are_named(call: Any, said: str) -> None:
    module = _make("linear")
    graph_modules(module, (torch.randn(8, HIDDEN),), None, Options(enabled=True, recipe=RECIPES["current"]), Rerun())
    with pytest.raises(ValueError, match=said):
        call(module)


def _inside(module: torch.nn.Module, chosen: Any) -> None:
    with ottava.autocast(recipe=chosen):
        module(torch.randn(8, HIDDEN))


def _moved(module: Any) -> None:
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    module(torch.randn(8, HIDDEN))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"_order": [1, -1]}, "pipeline"),
        ({"enabled": True, "fp8_enabled": True}, "older name"),
    ],
)
def test_what_is_not_offered_raises(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=said):
        ottava.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(1, 2),), **options)


def test_a_graph_without_fp8_inside_of_autocast_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sample, chosen = torch.randn(32, 4, HIDDEN, requires_grad=True), RECIPES["current"]
    linear, both = _make("linear"), (_make("linear"), _make("mlp"))
    graph_modules(both, ((sample,), (sample,)), None, Options(enabled=(True, False), recipe=chosen), Rerun())
    with ottava.autocast(recipe=chosen):
        both[1](both[0](sample))  # one by one, as asked for
    graph_modules(linear, (sample,), None, Options(recipe=chosen), Rerun())
    linear(sample)
    assert "enabled=False" not in caplog.text
    with ottava.autocast(recipe=chosen):
        linear(sample)
    assert "a Linear that was graphed with enabled=False is called inside autocast" in caplog.text


def test_others_may_call_a_module_attention_dropout() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout, self.linear = torch.nn.Dropout(0.0), _make("linear")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.attention_dropout(x))

    sample = torch.randn(32, 4, HIDDEN, requires_grad=True)
    graphed = graph_modules(Block(), (sample,), None, Options(), Rerun())
    assert torch.equal(graphed(sample), graphed.linear(sample))


@pytest.mark.parametrize("name, said", [("ddp", "wrapped by DistributedDataParallel"), ("fsdp1", "sharded by FSDP1")])
def test_wrappers_that_communicate_are_not_recorded(name: str, said: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        linear, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
        wrapped: torch.nn.Module = DistributedDataParallel(linear)
        if name == "fsdp1":
            wrapped = torch.nn.Sequential(FullyShardedDataParallel(linear, device_id=cpu))
        with pytest.raises(ValueError, match=said):
            graph_modules(wrapped, (torch.ones(1, 2),), None, Options(), Rerun())
    finally:
        dist.destroy_process_group()


def test_casts_that_torch_keeps_are_not_recorded() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="cache_enabled=False"):
        graph_modules(_make("linear"), (torch.randn(8, HIDDEN),), None, Options(), Rerun())


def test_without_a_gpu_it_says_so() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device"):
            ottava.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


def test_stored_weights_stay_where_they_are_when_an_optimizer_writes_them() -> None:
    for chosen in (recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()):
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe=chosen):
            module = ottava.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", device="cpu")
        plain = copy.deepcopy(module)
        sample = torch.randn(32, 4, HIDDEN, requires_grad=True)
        graph_modules(module, (sample,), None, Options(enabled=True, recipe=chosen), Rerun())
        assert _equal(_optimized(module, chosen), _optimized(plain, chosen))


def _optimized(module: torch.nn.Module, chosen: Any) -> list[torch.Tensor]:
    optimizer = ottava.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
    seen = []
    for (x,) in _inputs(3, 1):
        with ottava.autocast(recipe=chosen):
            y = module(x)
        y.square().sum().backward()
        seen.append(y.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen
