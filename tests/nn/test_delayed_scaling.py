"""Delayed scaling in modules: when state is recorded and updated, and that nothing records twice."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import recipe
from ottava.quant.state import CURRENT
from quant_cases import all_same, delayed_state, gradients, same

WINDOW = 4
DELAYED = recipe.DelayedScaling(amax_history_len=WINDOW)
INPUT, WEIGHT, GRAD = 0, 1, 0  # columns of a Linear's forward and backward state


def linear(width: int = 32, **options: Any) -> ottava.Linear:
    torch.manual_seed(0)
    return ottava.Linear(width, width, device="cpu", **options)


def mlp(**options: Any) -> ottava.LayerNormMLP:
    torch.manual_seed(0)
    return ottava.LayerNormMLP(32, 64, activation="swiglu", device="cpu", **options)


def step(
    module: torch.nn.Module, x: Tensor, dy: Tensor | None = None, chosen: recipe.Recipe = DELAYED, **options: Any
) -> Tensor:
    with ottava.autocast(recipe=chosen):
        y = module(x, **options)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    one, two = delayed_state(a), delayed_state(b)
    return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)


def newest(module: ottava.Linear, column: int = INPUT, which: str = "scaling_fwd") -> float:
    """The amax that the last update put at the end of the window."""
    return module.fp8_meta[which].amax_history[-1, column].item()


# ------------------------------------------------------------------------------------------------------- when it is recorded


def test_first_step_casts_with_scale_1_and_the_second_with_the_amax_of_the_first() -> None:
    module, x = linear(), torch.randn(16, 32) * 3
    step(module, x)
    amax, weight_amax = x.abs().max(), module.weight.detach().abs().max()
    scale = module.fp8_meta["scaling_fwd"].scale
    assert torch.equal(
        scale, torch.stack([torch.tensor(448.0) / amax, torch.tensor(448.0) / weight_amax, torch.tensor(1.0)])
    )
    assert module.fp8_meta["scaling_bwd"].scale.tolist() == [57344.0, 1.0]  # the gradient was all ones
    with ottava.autocast(recipe=DELAYED):
        y = module(x)
    a = ottava.quantize(x, DELAYED, scale=scale[0]).dequantize()
    w = ottava.quantize(module.weight, DELAYED, "weight", scale=scale[1]).dequantize()
    torch.testing.assert_close(y, a @ w.t() + module.bias)


def test_forward_state_changes_when_the_outermost_autocast_exits() -> None:
    module, x = linear(), torch.randn(16, 32)
    with ottava.autocast(recipe=DELAYED):
        with ottava.autocast(recipe=DELAYED):
            module(x)
            module(3 * x)
        assert module.delayed.fwd_scale.tolist() == [1.0, 1.0, 1.0]
        assert module.delayed.fwd_amax_history[0, INPUT] == (3 * x).abs().max()
    assert newest(module) == (3 * x).abs().max()  # one update for both calls
    assert not module.delayed.fwd_amax_history[0].any()


def test_backward_state_changes_once_at_the_end_of_a_backward_pass() -> None:
    module, x = linear(), torch.randn(16, 32)
    with ottava.autocast(recipe=DELAYED):
        y = module(x) + module(x)  # the same weight twice in one graph
    y.backward(torch.full_like(y, 2.0))
    history = module.fp8_meta["scaling_bwd"].amax_history
    assert history[:, GRAD].tolist() == [0.0, 0.0, 0.0, 2.0]
    assert module.delayed.bwd_scale[GRAD] == 28672.0


def test_backward_inside_the_autocast_block_gives_the_same_state() -> None:
    inside, outside = linear(), linear()
    for i in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i))
        with ottava.autocast(recipe=DELAYED):
            y = inside(x)
            y.backward(torch.ones_like(y))
        step(outside, x)
    assert same_state(inside, outside) and all_same(gradients(inside), gradients(outside))


def test_two_backward_passes_before_an_optimizer_step_are_two_updates() -> None:
    module, x = linear(), torch.randn(16, 32)
    for factor in (2.0, 3.0):
        with ottava.autocast(recipe=DELAYED):
            y = module(x)
        y.backward(torch.full_like(y, factor))
    assert module.fp8_meta["scaling_bwd"].amax_history[:, GRAD].tolist() == [0.0, 0.0, 2.0, 3.0]


def test_a_graph_kept_for_a_second_backward_records_again() -> None:
    module, x = linear(), torch.randn(16, 32)
    with ottava.autocast(recipe=DELAYED):
        y = module(x)
    y.backward(torch.full_like(y, 2.0), retain_graph=True)
    y.backward(torch.full_like(y, 5.0))
    assert module.fp8_meta["scaling_bwd"].amax_history[:, GRAD].tolist() == [0.0, 0.0, 2.0, 5.0]
    assert newest(module) == x.abs().max()


def test_evaluation_records_nothing() -> None:
    module, x = linear(), torch.randn(16, 32)
    step(module, x)
    before = delayed_state(module)
    with torch.no_grad(), ottava.autocast(recipe=DELAYED):
        module(100 * x)
    with torch.inference_mode(), ottava.autocast(recipe=DELAYED):
        module(100 * x)
    assert all(same(value, before[key]) for key, value in delayed_state(module).items())
    fresh = linear()
    with torch.no_grad(), ottava.autocast(recipe=DELAYED):
        fresh(x)
    assert fresh.delayed.is_fresh()


def test_disabled_autocast_inside_an_enabled_one_records_nothing() -> None:
    module, other, x = linear(), linear(), torch.randn(16, 32)
    with ottava.autocast(recipe=DELAYED):
        with ottava.autocast(enabled=False):
            y = other(x)
        module(x)
    assert torch.equal(y, other(x))
    assert newest(module) == x.abs().max() and not other.delayed.used


def test_calibrating_collects_statistics_in_high_precision() -> None:
    module, x = linear(), torch.randn(16, 32)
    with ottava.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        y = module(x)
    assert torch.equal(y, linear()(x))
    scale = module.fp8_meta["scaling_fwd"].scale
    assert torch.equal(scale[INPUT], torch.tensor(448.0) / x.abs().max())
    assert torch.equal(scale[WEIGHT], torch.tensor(448.0) / module.weight.detach().abs().max())


def test_calibrating_a_layernorm_mlp_collects_what_the_products_take() -> None:
    module, x = mlp(), torch.randn(16, 32)
    with ottava.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        module(x)
    state = module.fp8_meta["scaling_fwd"]
    normed = torch.nn.functional.layer_norm(x, (32,))
    torch.testing.assert_close(state.amax_history[-1, 0], normed.abs().max(), rtol=1e-4, atol=0)
    assert state.scale[3] != 1.0 and state.scale[4] != 1.0


def test_two_models_do_not_know_of_each_other() -> None:
    a, b, alone = linear(), linear(), linear()
    x = torch.randn(16, 32)
    other = recipe.DelayedScaling(amax_history_len=2, margin=2)
    for i in range(3):
        with ottava.autocast(recipe=DELAYED):
            y = a(x * (i + 1))
            with ottava.autocast(recipe=other):
                z = b(100 * x)
        (y.sum() + z.sum()).backward()
        step(alone, x * (i + 1), torch.ones(16, 32))
    assert same_state(a, alone) and a.fp8_meta["recipe"] == DELAYED and b.fp8_meta["recipe"] == other
    assert b.fp8_meta["scaling_fwd"].amax_history.shape == (2, 3)


# ------------------------------------------------------------------------------------------------- microbatches, recompute


def test_gradient_accumulation_records_the_weight_once() -> None:
    """is_first_microbatch=True quantizes and records the weight; False reuses the copy, even if the weight has changed since."""
    module = linear()
    first, second = torch.randn(16, 32), torch.randn(16, 32) * 2
    weight_amax = module.weight.detach().abs().max()
    with ottava.autocast(recipe=DELAYED):
        a = module(first, is_first_microbatch=True)
        with torch.no_grad():
            module.weight.mul_(10.0)
        b = module(second, is_first_microbatch=False)
    (a.sum() + b.sum()).backward()
    history = module.fp8_meta["scaling_fwd"].amax_history
    assert history[-1, WEIGHT] == weight_amax
    assert history[-1, INPUT] == torch.maximum(first.abs().max(), second.abs().max())
    step(module, first, is_first_microbatch=True)
    assert newest(module, WEIGHT) == module.weight.detach().abs().max()


def test_gradient_accumulation_equals_separate_calls_while_the_weight_stands() -> None:
    one, two = linear(), linear()
    xs = [torch.randn(16, 32) for _ in range(2)]
    for _ in range(2):
        for i, x in enumerate(xs):
            with ottava.autocast(recipe=DELAYED):
                y = one(x, is_first_microbatch=i == 0)
            y.sum().backward()
            with ottava.autocast(recipe=recipe.DelayedScaling(amax_history_len=WINDOW)):
                z = two(x)
            z.sum().backward()
            if i == 0:
                assert torch.equal(y, z)
    # Inputs and gradients are recorded as ever; only the weight's column is recorded half as often.
    assert torch.equal(one.delayed.fwd_amax_history[:, INPUT], two.delayed.fwd_amax_history[:, INPUT])
    assert torch.equal(one.delayed.bwd_amax_history, two.delayed.bwd_amax_history)
    assert int((one.delayed.fwd_amax_history[:, WEIGHT] > 0).sum()) == 2
    assert int((two.delayed.fwd_amax_history[:, WEIGHT] > 0).sum()) == 3  # 4 updates, and one row waits


def test_using_the_copy_before_it_was_made_is_an_error() -> None:
    with (
        ottava.autocast(recipe=DELAYED),
        pytest.raises(ValueError, match="is_first_microbatch=False, but no earlier call had is_first_microbatch=True"),
    ):
        linear()(torch.randn(16, 32), is_first_microbatch=False)


def test_a_copy_made_in_evaluation_serves_training_too() -> None:
    """no_grad makes no columnwise copy; a later microbatch with gradients must not use half a weight."""
    module, x = linear(), torch.randn(16, 32, requires_grad=True)
    with torch.no_grad(), ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        module(x, is_first_microbatch=True)
    with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        y = module(x, is_first_microbatch=False)
    y.sum().backward()
    plain, x2 = linear(), x.detach().clone().requires_grad_()
    with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        plain(x2).sum().backward()
    assert torch.equal(x.grad, x2.grad)


def checkpointed(module: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with ottava.autocast(recipe=DELAYED):
            return module(x)

    return lambda x: checkpoint(call, x, use_reentrant=False)


def three_steps(call: Callable[[Tensor], Tensor], module: torch.nn.Module) -> list[Tensor | None]:
    """Outputs and gradients of three steps with an update in between."""
    torch.manual_seed(5)
    kept: list[Tensor | None] = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(16, 32, requires_grad=True)
        optimizer.zero_grad()
        y = call(x)
        y.backward(torch.randn(16, 32))
        kept += [y, x.grad, *(g.clone() for g in gradients(module) if g is not None)]
        optimizer.step()
    return kept


@pytest.mark.parametrize("make", [linear, mlp])
def test_checkpoint_changes_no_bit_and_records_once(make: Callable[[], torch.nn.Module]) -> None:
    plain, again = make(), make()

    def call(x: Tensor) -> Tensor:
        with ottava.autocast(recipe=DELAYED):
            return plain(x)

    assert all_same(three_steps(call, plain), three_steps(checkpointed(again), again))
    assert same_state(plain, again)


def test_checkpoint_with_backward_inside_the_autocast_block() -> None:
    plain, again = mlp(), mlp()
    for seed in range(3):
        torch.manual_seed(seed)
        x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
        x2 = x.detach().clone().requires_grad_()
        with ottava.autocast(recipe=DELAYED):
            y = plain(x)
            y.backward(dy)
        with ottava.autocast(recipe=DELAYED):
            z = checkpoint(again, x2, use_reentrant=False)
            z.backward(dy)
        assert torch.equal(y, z) and torch.equal(x.grad, x2.grad)
    assert same_state(plain, again) and all_same(gradients(plain), gradients(again))


def test_checkpoint_of_one_part_of_a_model() -> None:
    def build() -> list[ottava.Linear]:
        return [linear(), linear()]

    plain, again = build(), build()
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(16, 32)
        with ottava.autocast(recipe=DELAYED):
            y = plain[1](plain[0](x))
        y.sum().backward()
        with ottava.autocast(recipe=DELAYED):
            z = checkpointed(again[1])(again[0](x))
        z.sum().backward()
        assert torch.equal(y, z)
    assert all(same_state(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("make", [linear, mlp])
def test_selective_recompute_changes_no_bit_and_records_once(make: Callable[..., torch.nn.Module]) -> None:
    plain, again = make(), make(recompute="selective")

    def calling(module: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with ottava.autocast(recipe=DELAYED):
                return module(x)

        return call

    assert all_same(three_steps(calling(plain), plain), three_steps(calling(again), again))
    assert same_state(plain, again)


def test_selective_recompute_with_two_microbatches_in_flight() -> None:
    """Both forwards run, with an update in between, before both backwards: each must use the scales of its own forward."""
    plain, again = mlp(), mlp(recompute="selective")
    xs = [torch.randn(16, 32) * s for s in (1.0, 7.0)]
    for module in (plain, again):
        ys = []
        for x in xs:
            with ottava.autocast(recipe=DELAYED):
                ys.append(module(x))
        for y in ys:
            y.sum().backward()
    assert all_same(gradients(plain), gradients(again)) and same_state(plain, again)


# ------------------------------------------------------------------------------------------------------------------- errors


def test_an_exception_inside_autocast_leaves_no_trace() -> None:
    """The failed step is as if it had not been: autocast is off, nothing is due, no amax of it is left for the next update."""
    module, untouched, x = linear(), linear(), torch.randn(16, 32)
    step(module, x)
    step(untouched, x)
    with pytest.raises(ValueError, match="last dimension"), ottava.autocast(recipe=DELAYED):
        module(1000 * x)
        module(torch.randn(16, 31))
    assert CURRENT.recipe is None and CURRENT.depth == 0 and not CURRENT.touched
    step(module, x)
    step(untouched, x)
    assert same_state(module, untouched)


def test_an_exception_in_backward_leaves_the_next_one_working() -> None:
    module, x = linear(), torch.randn(16, 32)
    with ottava.autocast(recipe=DELAYED):
        y = module(x)

    def fail(grad: Tensor) -> None:
        raise RuntimeError("from a hook")

    handle = module.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="from a hook"):
        y.sum().backward()
    handle.remove()
    step(module, x, torch.full((16, 32), 3.0))
    assert newest(module, GRAD, "scaling_bwd") == 3.0


def test_nan_and_infinity_in_the_input() -> None:
    module, x = linear(), torch.randn(16, 32)
    step(module, x)
    scale = module.delayed.fwd_scale.clone()
    bad = x.clone()
    bad[0, 0] = float("nan")
    y = step(module, bad)
    assert y[0].isnan().all() and y[1:].isfinite().all()
    assert newest(module) == bad[1:].abs().max().maximum(bad[0, 1:].abs().max())
    bad[0, 0] = float("inf")
    kept = module.delayed.fwd_scale.clone()
    step(module, bad)
    assert torch.equal(module.delayed.fwd_scale[INPUT], kept[INPUT]) and newest(module) == float("inf")
    assert scale[WEIGHT] == module.delayed.fwd_scale[WEIGHT]


# ------------------------------------------------------------------------------------------------------------------ options


def test_margin_and_most_recent() -> None:
    chosen = recipe.DelayedScaling(amax_history_len=WINDOW, margin=2, amax_compute_algo="most_recent")
    module = linear()
    for factor in (8.0, 2.0):
        step(module, torch.full((16, 32), factor), chosen=chosen)
    assert module.delayed.fwd_scale[INPUT] == 448.0 / 4 / 2.0


def test_max_remembers_the_window_and_forgets_what_left_it() -> None:
    module, scales = linear(), []
    for factor in (8.0, 1.0, 1.0, 1.0, 1.0):
        step(module, torch.full((16, 32), factor))
        scales.append(module.delayed.fwd_scale[INPUT].item())
    # A window of 4 holds the step under way and 3 earlier ones; what drops out at an update still counts for it.
    assert scales == [56.0, 56.0, 56.0, 56.0, 448.0]


def test_functions_of_ones_own() -> None:
    seen = []

    def amax(history: Tensor) -> Tensor:
        assert history.shape[0] == WINDOW
        return history.amax(0) * 2

    def scale(amax: Tensor, old: Tensor, fp8_max: Tensor, chosen: recipe.DelayedScaling) -> Tensor:
        seen.append((old.clone(), fp8_max.clone(), chosen))
        return torch.where(amax > 0, fp8_max / amax, old)

    chosen = recipe.DelayedScaling(amax_history_len=WINDOW, amax_compute_algo=amax, scaling_factor_compute_algo=scale)
    module = linear()
    step(module, torch.full((16, 32), 2.0), chosen=chosen)
    assert module.delayed.fwd_scale[INPUT] == 112.0 and module.delayed.bwd_scale[GRAD] == 28672.0
    assert [s[1][0].item() for s in seen] == [448.0, 57344.0] and all(s[2] is chosen for s in seen)
    assert newest(module) == 2.0


def test_own_amax_with_the_built_in_scale() -> None:
    chosen = recipe.DelayedScaling(amax_history_len=WINDOW, amax_compute_algo=lambda history: history.mean(0) * WINDOW)
    module = linear()
    for factor in (1.0, 3.0):
        step(module, torch.full((16, 32), factor), chosen=chosen)
    assert module.delayed.fwd_scale[INPUT] == 112.0  # 448 / (1 + 3)


def test_window_longer_than_the_allocated_rows() -> None:
    chosen = recipe.DelayedScaling(amax_history_len=1500)
    module, x = linear(), torch.randn(16, 32)
    step(module, x, chosen=chosen)
    step(module, x, chosen=chosen)
    assert module.delayed.fwd_amax_history.shape == (1500, 3) and module.delayed.bwd_amax_history.shape == (1500, 2)
    assert newest(module) == x.abs().max() and module.delayed.fwd_amax_history[-2, INPUT] == x.abs().max()
    again = linear()
    again.load_state_dict(module.state_dict())  # longer than its own
    assert same_state(module, again)


def test_two_stages_have_their_own_columns() -> None:
    module, x = mlp(), torch.randn(16, 32)
    y = step(module, x)
    assert y.shape == x.shape
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    assert forward.scale.shape == (6,) and backward.scale.shape == (4,)
    assert forward.amax_history[-1, 1] == module.fc1_weight.detach().abs().max()
    assert forward.amax_history[-1, 4] == module.fc2_weight.detach().abs().max()
    assert forward.scale[2] == forward.scale[5] == 1.0  # outputs are not quantized
    assert torch.equal(forward.scale_inv, 1 / forward.scale)


# ------------------------------------------------------------------------------------------------------------------- saving


def test_a_fresh_module_says_what_state_it_wants_to_load() -> None:
    module = linear()
    names = {f"delayed.{d}_{w}" for d in ("fwd", "bwd") for w in ("scale", "amax_history")}
    assert set(module.state_dict()) == {"weight", "bias"} | names


def test_a_saved_and_loaded_module_goes_on_as_if_nothing_had_happened() -> None:
    module, x = mlp(), torch.randn(16, 32)
    for factor in (1.0, 5.0, 2.0):
        step(module, factor * x)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = mlp()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert same_state(module, again)
    for model in (module, again):
        model.zero_grad()
    assert torch.equal(step(module, x), step(again, x))
    assert same_state(module, again) and all_same(gradients(module), gradients(again))


def test_a_state_dict_without_the_buffers_loads_and_starts_afresh() -> None:
    module = linear()
    plain = dict(module.state_dict())
    result = module.load_state_dict(plain, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert module.delayed.fwd_scale.tolist() == [1.0] * 3 and not module.delayed.used


def test_a_buffer_of_another_shape_is_refused() -> None:
    state = linear().state_dict()
    state["delayed.fwd_scale"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="size mismatch for delayed.fwd_scale"):
        linear().load_state_dict(state)


def test_deepcopy_has_a_state_of_its_own() -> None:
    module, x = linear(), torch.randn(16, 32)
    step(module, x)
    twin = copy.deepcopy(module)
    before = delayed_state(module)
    step(twin, 10 * x, torch.full((16, 32), 4.0))
    assert all(same(value, before[key]) for key, value in delayed_state(module).items())
    assert newest(twin) == (10 * x).abs().max()
    assert newest(twin, GRAD, "scaling_bwd") == 4.0


def test_reset_parameters_forgets_history() -> None:
    module = linear()
    step(module, torch.randn(16, 32))
    module.reset_parameters()
    assert module.delayed.fwd_scale.tolist() == [1.0] * 3 and not module.delayed.fwd_amax_history.any()


# ------------------------------------------------------------------------------------------------------------- several ranks


def _rank(rank: int, world: int, path: str) -> None:
    """One of two ranks. Each case checks what this rank must have after the step."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    try:
        only_me = [torch.distributed.new_group([r]) for r in range(world)][rank]
        mine, largest = float(rank + 1), float(world)

        def run(chosen: recipe.DelayedScaling, group: Any, grad: float) -> ottava.LayerNormMLP | ottava.Linear:
            module = linear()
            with ottava.autocast(recipe=chosen, amax_reduction_group=group):
                y = module(torch.full((16, 32), mine))
            y.backward(torch.full_like(y, grad))
            return module

        # All ranks, when no group is given: forward and backward state agree on the largest.
        module = run(DELAYED, None, mine)
        assert newest(module) == largest and module.delayed.fwd_scale[INPUT] == 448.0 / largest
        assert newest(module, GRAD, "scaling_bwd") == largest
        # A group of one's own: nothing is shared.
        module = run(DELAYED, only_me, mine)
        assert newest(module) == mine and newest(module, GRAD, "scaling_bwd") == mine
        copy.deepcopy(module)  # though a process group cannot be copied
        # reduce_amax=False: nothing is shared either.
        module = run(recipe.DelayedScaling(amax_history_len=WINDOW, reduce_amax=False), None, mine)
        assert newest(module) == mine and newest(module, GRAD, "scaling_bwd") == mine
        # A rank that records zero takes the other's, and rolls with it.
        module = run(DELAYED, torch.distributed.group.WORLD, float(rank))
        assert newest(module, GRAD, "scaling_bwd") == 1.0 and module.delayed.bwd_scale[GRAD] == 57344.0
        # The scales of a model of several modules are equal on all ranks after three steps.
        model = torch.nn.Sequential(linear(), mlp(), linear())
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            with ottava.autocast(recipe=DELAYED):
                y = model(torch.randn(16, 32))
            y.sum().backward()
        for name, value in delayed_state(model).items():
            other = value.clone()
            torch.distributed.broadcast(other, src=0)
            assert same(value, other), name
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_amax_is_reduced_over_the_group() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(2, os.path.join(folder, "store")), nprocs=2)
