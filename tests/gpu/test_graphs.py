"""CUDA graphs: the bits of the same work without them, and next to no time of the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ottava
from ottava import recipe
from ottava.train.loop import Loop
from ottava.train.world import Place, World
from train.runs import lines, tiny

RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
HIDDEN = 256
KIND: dict[str, Any] = {"device": "cuda", "params_dtype": torch.bfloat16}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits every time, so that a difference is one of the graphs.

    Warnings only: cuBLAS wants to have been told before its first call in the process, and gives the same bits here all the same.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def _make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return ottava.Linear(HIDDEN, HIDDEN, **KIND)
    if kind == "mlp":
        return ottava.LayerNormMLP(HIDDEN, 3 * HIDDEN, activation="swiglu", **KIND)
    return ottava.TransformerLayer(HIDDEN, 3 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, **KIND)


def _inputs(steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = (128, 3, HIDDEN)  # [s, b, h]: 384 rows, three tiles
    return [
        [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * (1.0 + s + m) for m in range(2)]
        for s in range(steps)
    ]


def _train(module: torch.nn.Module, chosen: Any, caching: bool) -> dict[str, torch.Tensor]:
    """Everything that comes out of five steps of two microbatches, by name."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    seen: dict[str, torch.Tensor] = {}
    for step, parts in enumerate(_inputs(5)):
        for number, part in enumerate(parts):
            x = part.clone().requires_grad_()
            options = {"is_first_microbatch": number == 0} if caching else {}
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                y = module(x, **options)
            (y.float().square().mean() * (1 + number)).backward()
            seen[f"{step}.{number} output"] = y.detach().clone()
            seen[f"{step}.{number} input gradient"] = x.grad.clone()
        seen |= {f"{step} gradient of {name}": p.grad.clone() for name, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"{step} {name}": b.clone() for name, b in module.named_buffers()}
    return seen | {name: p.detach().clone() for name, p in module.named_parameters()}


def _differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "mlp", "layer"])
@pytest.mark.usefixtures("deterministic")
def test_graphed_modules_train_to_the_same_bits(kind: str, name: str, caching: bool) -> None:
    chosen = RECIPES[name]
    module = _make(kind)
    plain, again = copy.deepcopy(module), copy.deepcopy(module)
    expected = _train(plain, chosen, caching)
    if repeats := _differences(_train(again, chosen, caching), expected):
        pytest.fail(f"without graphs two runs differ already, first in {repeats[0]}: nothing can be compared")
    sample = torch.randn(128, 3, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = ottava.make_graphed_callables(
        module, (sample,), enabled=chosen is not None, recipe=chosen, cache_quantized_params=caching
    )
    assert _differences(_train(graphed, chosen, caching), expected) == []


@pytest.mark.usefixtures("deterministic")
def test_several_modules_and_stored_weights() -> None:
    chosen = RECIPES["current"]
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe=chosen):
        made = ottava.LayerNormLinear(HIDDEN, HIDDEN, **KIND), ottava.LayerNormMLP(HIDDEN, 3 * HIDDEN, **KIND)
    plain = copy.deepcopy(made)
    sample = torch.randn(128, 3, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ottava.make_graphed_callables(made, ((sample,), (sample,)), enabled=True, recipe=chosen)
    found = []
    for first, second in (made, plain):
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = ottava.optimizers.FusedAdam(parameters, lr=1e-2, master_weights=True)
        seen = []
        for x, _ in _inputs(4):
            with ottava.autocast(recipe=chosen):
                y = second(first(x))
            y.float().square().mean().backward()
            seen += [y.detach().clone(), *(p.grad.clone() for p in parameters)]
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "chosen", [recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)]
)
def test_emulated_recipes_can_be_recorded(chosen: Any) -> None:
    module = _make("linear")
    plain = copy.deepcopy(module)
    sample = torch.randn(128, 3, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ottava.make_graphed_callables(module, (sample,), enabled=True, recipe=chosen)
    assert _differences(_train(module, chosen, False), _train(plain, chosen, False)) == []


@pytest.mark.usefixtures("deterministic")
def test_dropout_draws_the_same_numbers() -> None:
    layer = ottava.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.1, attention_dropout=0.0, **KIND)
    plain = copy.deepcopy(layer)
    sample = torch.randn(128, 3, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ottava.make_graphed_callables(layer, (sample,), enabled=True, recipe=RECIPES["current"])
    found = []
    for module in (layer, plain):
        torch.manual_seed(7)
        outputs = []
        for x, _ in _inputs(3):
            with ottava.autocast(recipe=RECIPES["current"]):
                y = module(x)
            y.float().sum().backward()
            outputs.append(y.detach().clone())
        found.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


# ------------------------------------------------------------------------------------------------------------- the trainer


CASES: dict[str, dict[str, Any]] = {
    "none": {"precision": {"recipe": "none"}},
    "delayed": {"precision": {"recipe": "DelayedScaling"}},
    "current": {"precision": {"recipe": "Float8CurrentScaling"}},
    "block": {"precision": {"recipe": "Float8BlockScaling"}},
    "no wrapper": {"precision": {"recipe": "DelayedScaling"}, "parallel": {"strategy": "none"}},
}


def _run(config: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources:
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=600.0))
        loop = Loop(config, world, resources)
        assert loop.finish(loop.run()) == 0
        state = {name: value.detach().clone() for name, value in loop.model.module.state_dict().items()}
        replays = {} if loop.graphs is None else dict(loop.graphs._replays)
    return [line["loss"] for line in lines(config)], state, replays


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", CASES)
def test_a_graphed_run_has_the_losses_of_the_run_without(case: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"hidden_size": 256, "ffn_hidden_size": 512, "layers": 2, "heads": 4, "pad_vocab_to": 128},
        "data": {"length": 128},
        "checkpoint": {"every": 0},
        "metrics": {"fp8_every": 0},
        "health": {"watchdog_s": 0.0},
        **CASES[case],
    }
    train = {"steps": 6, "global_batch": 4, "micro_batch": 2, "evaluate_every": 4}
    losses, state, none = _run(tiny(tmp_path, "plain", train=train, **sections))
    again, _, _ = _run(tiny(tmp_path, "again", train=train, **sections))
    assert again == losses, "without graphs two runs differ already: nothing can be compared"
    graphed, graphed_state, replays = _run(tiny(tmp_path, "graphed", train={**train, "cuda_graph": True}, **sections))
    assert not none and len(replays) == 2  # of first microbatches and of later ones
    assert graphed == losses
    assert [name for name in state if not torch.equal(state[name], graphed_state[name])] == []


def test_a_graphed_run_with_packed_documents_looks_at_fp8_health(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        model={"hidden_size": 256, "ffn_hidden_size": 512, "layers": 2, "heads": 4},
        data={"length": 128, "document_mask": True},
        train={"steps": 8, "global_batch": 4, "micro_batch": 2, "evaluate_every": 4, "cuda_graph": True},
        precision={"recipe": "Float8CurrentScaling"},
        metrics={"fp8_every": 5},
        checkpoint={"every": 0},
        health={"watchdog_s": 0.0},
    )
    losses, _, replays = _run(config)
    assert len(replays) == 2 and losses[-1] < losses[0]
