"""Corner cases that a review found: each a behaviour that was wrong once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import recipe
from ottava.quant.state import CURRENT
from quant_cases import RECIPES, casting

DELAYED = recipe.DelayedScaling(amax_history_len=4)
CURRENT_SCALING = recipe.Float8CurrentScaling()


def linear() -> ottava.Linear:
    torch.manual_seed(0)
    return ottava.Linear(64, 64, device="cpu")


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast(recipe=DELAYED):
            return self.inner(x)


def test_export_with_gradients_enabled_and_delayed_scaling() -> None:
    x = torch.randn(16, 64)
    module = linear()
    with ottava.autocast(recipe=DELAYED):
        program = torch.export.export(module, (x,))
    with torch.no_grad(), ottava.autocast(recipe=DELAYED):
        assert torch.equal(program.module()(x), module(x))
    wrapped = Wrapped()
    program = torch.export.export(wrapped, (x,))
    with torch.no_grad():
        expected = wrapped(x)
    assert torch.equal(program.module()(x), expected)
    assert not wrapped.inner.delayed.fwd_amax_history.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_stay_float32_when_a_module_is_cast(dtype: torch.dtype) -> None:
    module = linear().to(dtype)
    with ottava.autocast(recipe=DELAYED):
        module(torch.randn(16, 64, dtype=dtype)).sum().backward()
    assert module.weight.dtype == dtype
    assert all(buffer.dtype == torch.float32 for buffer in module.delayed.buffers())


def test_compiled_selective_recompute_with_delayed_scaling() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = ottava.LayerNormMLP(64, 128, recompute="selective", device="cpu")
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        for _ in range(2):
            module.zero_grad()
            with ottava.autocast(recipe=DELAYED):
                y = call(torch.linspace(-1, 1, 16 * 64).view(16, 64))
            y.square().sum().backward()
        return [y, *(p.grad for p in module.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "nvfp4"])
def test_reentrant_checkpoint_changes_no_bit(name: str) -> None:
    def run(reentrant: bool) -> list[torch.Tensor]:
        module = linear()
        seen = []
        for step in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with casting(name):
                y = checkpoint(module, x, use_reentrant=True) if reentrant else module(x)
            y.square().sum().backward()
            seen += [y.detach(), x.grad, module.weight.grad.clone(), *(b.clone() for b in module.buffers())]
        return seen

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_an_evaluation_between_forward_and_recomputation_changes_nothing() -> None:
    def run(evaluate: bool) -> torch.Tensor:
        module = linear()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with ottava.autocast(recipe=DELAYED):
            y = checkpoint(module, x, use_reentrant=False)
        if evaluate:
            with torch.no_grad(), ottava.autocast(recipe=CURRENT_SCALING):
                module(x)
        y.square().sum().backward()
        return module.weight.grad

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_a_slice_cannot_be_written_into(name: str) -> None:
    q = ottava.quantize(torch.ones(256, 256), RECIPES[name], role="weight")
    for part in (q[:128], q[:128].detach()):
        with pytest.raises(ValueError, match="slice of a QuantizedTensor"):
            part.copy_(torch.full((128, 256), 100.0))
    assert torch.equal(q.dequantize(), torch.ones(256, 256))
    assert torch.equal(q[:128].clone().copy_(torch.full((128, 256), 2.0)).dequantize(), torch.full((128, 256), 2.0))


def test_differentiating_twice_is_refused() -> None:
    x = torch.randn(16, 64, requires_grad=True)
    modules = (ottava.LayerNormLinear(64, 64, device="cpu"), ottava.LayerNorm(64, device="cpu"))
    for module in modules:
        with pytest.raises(ValueError, match="differentiated twice"):
            torch.autograd.grad(module(x).square().sum(), x, create_graph=True)


def test_the_same_context_may_be_entered_twice() -> None:
    cast, init = ottava.autocast(recipe=CURRENT_SCALING), ottava.quantized_model_init(recipe=CURRENT_SCALING)
    with cast, cast, init, init:
        pass
    assert CURRENT.recipe is None and CURRENT.depth == 0 and CURRENT.init is None


def test_a_longer_window_does_not_bring_old_rows_back() -> None:
    module = linear()
    for window, size in ((8, 100.0), (3, 1.0), (3, 1.0), (3, 1.0), (8, 1.0)):
        with ottava.autocast(recipe=recipe.DelayedScaling(amax_history_len=window)):
            module(torch.full((4, 64), size))
    assert module.delayed.fwd_scale[0] == 448.0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="must be a torch.Tensor, got list"):
        ottava.quantize([1.0, 2.0], CURRENT_SCALING)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The input of Linear must be a torch.Tensor, got NoneType"):
        linear()(None)  # type: ignore[arg-type]
    for scale in (torch.ones(3), -2.0, float("inf")):
        with pytest.raises(ValueError, match="one finite number above 0"):
            ottava.quantize(torch.ones(4, 4), DELAYED, scale=scale)
    with pytest.raises(ValueError, match="params_dtype must be"):
        ottava.Linear(16, 16, params_dtype=torch.float64)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Linear cannot be replicated by torch.nn.DataParallel: use DistributedDataParallel"
    ):
        linear()._replicate_for_data_parallel()  # as `torch.nn.parallel.replicate` calls it
