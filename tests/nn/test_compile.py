"""`torch.compile(fullgraph=True)` and `torch.export`: one graph for every recipe, and the bits of eager mode.

`autocast` may be outside of the compiled function or inside of it. Delayed scaling records and updates its state either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from quant_cases import DETERMINISTIC, RECIPES, all_same, casting, delayed_state, gradients, relative, same

MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda: ottava.Linear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: ottava.LayerNormMLP(32, 64, activation="swiglu", device="cpu"),
    "TransformerLayer": lambda: ottava.TransformerLayer(
        32,
        64,
        2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        device="cpu",
    ),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_call(module: torch.nn.Module, scheme: str, inside: bool, backend: str) -> Callable[[Tensor], Tensor]:
    if not inside:
        compiled = torch.compile(module, fullgraph=True, backend=backend)

        def outer(x: Tensor) -> Tensor:
            with casting(scheme):
                return compiled(x)

        return outer

    def inner(x: Tensor) -> Tensor:
        with casting(scheme):
            return module(x)

    return torch.compile(inner, fullgraph=True, backend=backend)


def three_steps(call: Callable[[Tensor], Tensor], module: torch.nn.Module) -> Iterator[list[Tensor | None]]:
    """Output and gradients of each of three steps with a weight update in between."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 2, 32, generator=generator).requires_grad_()
        optimizer.zero_grad()
        y = call(x)
        y.backward(torch.randn(y.shape, generator=generator))
        yield [y, x.grad, *(None if g is None else g.clone() for g in gradients(module))]
        optimizer.step()


def eager_call(module: torch.nn.Module, scheme: str) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with casting(scheme):
            return module(x)

    return call


def check(name: str, scheme: str, inside: bool, backend: str, compare: Callable[[Any, Any], bool]) -> None:
    eager, traced = build(name), build(name)
    call = compiled_call(traced, scheme, inside, backend)
    for want, got in zip(three_steps(eager_call(eager, scheme), eager), three_steps(call, traced), strict=True):
        assert compare(want, got)
    one, two = delayed_state(eager), delayed_state(traced)
    assert one.keys() == two.keys() and compare([*one.values()], [*two.values()])
    if scheme == "delayed":
        assert any((value != 0).any() for key, value in two.items() if "bwd_amax" in key)


@pytest.mark.parametrize("inside", [False, True], ids=["autocast-outside", "autocast-inside"])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
@pytest.mark.parametrize("name", list(MODULES))
def test_one_graph_with_the_bits_of_eager_mode(name: str, scheme: str, inside: bool) -> None:
    check(name, scheme, inside, "aot_eager", all_same)


@pytest.mark.parametrize("inside", [False, True], ids=["autocast-outside", "autocast-inside"])
@pytest.mark.parametrize("name", list(MODULES))
def test_nvfp4_is_one_graph_too(name: str, inside: bool) -> None:
    """Stochastic rounding draws random numbers, so only the first output, which no gradient has touched, has to be equal."""
    eager, traced = build(name), build(name)
    call = compiled_call(traced, "nvfp4", inside, "aot_eager")
    want = next(three_steps(eager_call(eager, "nvfp4"), eager))
    got = next(three_steps(call, traced))
    assert same(want[0], got[0]) and relative(got[1], want[1]) < 0.5


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Inductor fuses float32 operations, so the last bits of the plain ones around ours may differ, and flip an FP8 rounding."""
    return all(x is y is None or relative(x, y) < 2e-2 for x, y in zip(a, b, strict=True) if x is None or y.any())


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme, inside",
    [
        pytest.param("delayed", True, id="delayed-autocast-inside"),
        pytest.param("block", False, id="block-autocast-outside", marks=pytest.mark.extra),
        pytest.param("delayed", False, id="delayed-autocast-outside", marks=pytest.mark.extra),
        pytest.param("block", True, id="block-autocast-inside", marks=pytest.mark.extra),
    ],
)
def test_inductor(scheme: str, inside: bool) -> None:
    check("TransformerLayer", scheme, inside, "inductor", close)


def test_switching_recipes_compiles_again_and_is_right() -> None:
    module, eager = build("Linear"), build("Linear")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    for scheme in ("block", "none", "current", "block"):
        with casting(scheme):
            assert torch.equal(compiled(x), eager(x)), scheme


def test_evaluation_of_a_compiled_module_records_nothing() -> None:
    module = build("Linear")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    with casting("delayed"):
        compiled(x).sum().backward()
    before = delayed_state(module)
    with torch.no_grad(), casting("delayed"):
        compiled(100 * x)
    assert all(same(value, before[key]) for key, value in delayed_state(module).items())


@pytest.mark.parametrize("dynamic", [None, True])
def test_number_of_tokens_may_change(dynamic: bool | None) -> None:
    module, eager = build("LayerNormMLP"), build("LayerNormMLP")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (16, 7, 33):
        x = torch.randn(rows, 32)
        with casting("block"):
            assert torch.equal(compiled(x), eager(x))


def test_weights_in_fp8_storage_compile_with_graph_breaks() -> None:
    """Dynamo does not see a tensor subclass's own attributes, so the weight is read outside of the graph."""
    with ottava.quantized_model_init(recipe=RECIPES["block"]):
        module = build("Linear")
    compiled = torch.compile(module, backend="aot_eager")
    x = torch.randn(16, 32)
    with casting("block"):
        want = module(x)
        want.sum().backward()
        grad, module.weight.grad = module.weight.grad, None
        got = compiled(x)
        got.sum().backward()
    assert torch.equal(got, want) and torch.equal(module.weight.grad, grad)


# ------------------------------------------------------------------------------------------------------------------- export


class Casting(torch.nn.Module):
    """What is exported: a module and the recipe it runs with."""

    def __init__(self, module: torch.nn.Module, scheme: str) -> None:
        super().__init__()
        self.module, self.scheme = module, scheme

    def forward(self, x: Tensor) -> Tensor:
        with casting(self.scheme):
            return self.module(x)


@pytest.mark.parametrize("scheme", list(RECIPES))
@pytest.mark.parametrize("name", list(MODULES))
def test_forward_exports(name: str, scheme: str) -> None:
    model = Casting(build(name), scheme).eval()
    x = torch.randn(16, 2, 32)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert same(program.module()(x), model(x))


@pytest.mark.parametrize("scheme", ["current", "block"])
def test_forward_exports_with_autocast_around_it(scheme: str) -> None:
    module = build("TransformerLayer").eval()
    x = torch.randn(16, 2, 32)
    with torch.no_grad(), casting(scheme):
        want = module(x)
        program = torch.export.export(module, (x,))
    assert same(program.module()(x), want)  # the recipe is part of the graph


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", list(MODULES))
def test_what_was_exported_refuses_to_go_back(name: str, strict: bool, tmp_path: Path) -> None:
    module, x = build(name).eval(), torch.randn(16, 2, 32)
    with casting("current"):
        program = torch.export.export(module, (x,), strict=strict)
        want = module(x)
    torch.export.save(program, tmp_path / "program.pt2")
    for exported in (program, torch.export.load(tmp_path / "program.pt2")):
        y = exported.module()(x)
        assert same(y, want)
        with pytest.raises(
            RuntimeError, match="torch.export keeps the forward of Ottava's modules, not their backward"
        ):
            y.sum().backward()
    frozen = build(name).requires_grad_(False)
    with casting("current"):
        frozen_program = torch.export.export(frozen, (x,), strict=strict)
    with pytest.raises(RuntimeError, match="torch.export keeps the forward"):  # it would not reach what lies before
        frozen_program.module()(x.clone().requires_grad_()).sum().backward()
    assert same(torch.compile(program.module(), backend="aot_eager")(x), want)
    assert same(program.run_decompositions().module()(x), want)


def test_export_of_calibrated_delayed_scaling_uses_its_scales() -> None:
    module = build("Linear")
    x = torch.randn(16, 32) * 50
    with casting("delayed"):
        module(x).sum().backward()
    model = Casting(module, "delayed").eval()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert same(program.module()(x), model(x))
    assert module.delayed.fwd_scale[0] != 1.0
