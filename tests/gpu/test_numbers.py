"""Numbers that are wrong, on a GPU: counted by the kernels, without a wait; replayed bit for bit."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ottava
from ottava import recipe as recipes
from ottava.chaos.numbers import at_output, flip_bit, poison
from ottava.guard.digest import digest
from ottava.guard.replay import Record
from ottava.guard.witness import Slots
from ottava.kernels import activation, tally, tile
from ottava.kernels.cast import _quantize
from ottava.kernels.registry import FUNCTIONS
from ottava.train.arguments import parse
from ottava.train.loop import Loop
from ottava.train.world import Place, World

CUDA = torch.device("cuda")
SCHEMES = ["e4m3:tensor", "e5m2:tensor", "e4m3:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x32"]
RECIPES = [
    recipes.Float8CurrentScaling(),
    recipes.DelayedScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
]


def _counted(work) -> int:
    tally.reset(CUDA)
    tally.slot = 9
    try:
        work()
    finally:
        tally.slot = tally.ELSEWHERE
    counts = tally.counts(CUDA, 16).tolist()
    assert sum(counts) == counts[9]
    return counts[9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 512), (200, 144)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_count_what_the_reference_counts_and_give_its_bytes(scheme, shape, dtype):
    x = torch.randn(shape, device=CUDA, dtype=dtype)
    args = (scheme, None, None, True, True)
    for bad in (0, 3):
        if bad:
            x[3, 5], x[0, 0], x[-1, -1] = math.inf, math.nan, -math.inf
        assert _counted(lambda: FUNCTIONS["cuda"].quantize(x, *args)) == bad
        assert _counted(lambda: _quantize(x, *args)) == bad
        made, reference = FUNCTIONS["cuda"].quantize(x, *args), _quantize(x, *args)
        assert all(torch.equal(a, b) for a, b in zip(made[:4], reference[:4]))


@pytest.mark.parametrize("scheme", ["e4m3:tensor", "e5m2:tensor", "e4m3:1x128:pow2", "e4m3:1x32"])
def test_gated_gradients_are_counted_in_both_halves(scheme):
    h, dy = torch.randn(128, 512, device=CUDA).bfloat16(), torch.randn(128, 256, device=CUDA).bfloat16()
    dy[5, 7] = math.inf
    producer = tile.ActivationBackward(dy, h, activation.get("swiglu"))
    assert _counted(lambda: tile.quantize(producer, scheme, None, None, True, True)) == 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_operands_are_named_and_nobody_waits(recipe):
    mlp = ottava.LayerNormMLP(256, 512, device="cuda", params_dtype=torch.bfloat16)
    slots = Slots(mlp)
    x = torch.randn(128, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def step(poisoned: bool) -> torch.Tensor:
        tally.reset(CUDA)
        with ottava.autocast(recipe=recipe):
            y = mlp(x)
        g = torch.ones_like(y)
        if poisoned:
            g[3, 4] = math.inf
        y.backward(g)
        return tally.counts(CUDA, slots.count).double()

    for _ in range(2):
        step(False)  # compiles
    waits = not isinstance(recipe, recipes.NVFP4BlockScaling)  # its emulation makes tables on the host
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if waits else "default")
    try:
        fine = step(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slots.first(fine.int().tolist()) is None
    found = slots.first(step(True).int().tolist())
    assert found is not None and found.operand == "fc2.gradient" and found.direction == "backward"


def test_a_digest_changes_with_every_bit():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        x = torch.randint(0, 250, (3, 1100), device=CUDA).to(dtype)
        before = int(digest(x))
        assert before == int(digest(x.clone())) == int(digest(x.cpu()))
        for index in (0, 1023, 1024, 3299):
            for bit in (0, 3, 8 * x.element_size() - 1):
                flip_bit(x, index, bit)
                assert int(digest(x)) != before
                flip_bit(x, index, bit)
        assert int(digest(x)) == before


def _loop(path: Path, resources: ExitStack, *options: str, **train: object) -> Loop:
    common = [
        f"--train.run={path}",
        f"--data.cache={path}",
        "--train.sample-tokens=0",
        "--metrics.fp8-every=0",
        *options,
    ]
    config, _ = parse(["examples/train_160m.toml", *common])
    config = replace(config, train=replace(config.train, steps=10**6, evaluate_every=0, **train))
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    resources.callback(lambda: store)
    world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=600.0))
    return Loop(config, world, resources)


@pytest.mark.parametrize("options", [(), ("--train.deterministic",)], ids=["forward", "deterministic"])
def test_a_microbatch_gives_the_same_bits_twice_and_a_flipped_bit_is_found(tmp_path, monkeypatch, options):
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # torch asks for it where algorithms have to be deterministic
    with ExitStack() as resources:
        torch.use_deterministic_algorithms(bool(options))  # as `train` does
        resources.callback(lambda: torch.use_deterministic_algorithms(False))
        loop = _loop(tmp_path, resources, "--health.replay-every=1", *options, global_batch=16, micro_batch=8)
        for _ in range(4):
            loop.clock.restart()
            assert loop._step() is not None
        assert not (tmp_path / "events.jsonl").exists()
        with at_output(loop.model.module, "layers.1.layernorm_mlp", lambda t: flip_bit(t, 77, 3), times=1):
            loop.clock.restart()
            assert loop._step() is None
    (told, *_) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert "layers.1.layernorm_mlp" in told and "transient" in told


def test_a_step_waits_for_the_device_nowhere(tmp_path):
    """But for events: also when the state is looked up anew, and when FP8 health is looked at."""
    with ExitStack() as resources, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop = _loop(tmp_path, resources, "--metrics.fp8-every=2", global_batch=16, micro_batch=16)
        for step in range(6):
            if step == 3:
                torch.cuda.set_sync_debug_mode("warn")
                resources.callback(lambda: torch.cuda.set_sync_debug_mode("default"))
                found.clear()  # also of the warning that this mode is a prototype
            if step == 4:
                loop.guard.state.forget()
            loop.clock.restart()
            assert loop._step() is not None
        torch.cuda.set_sync_debug_mode("default")
        waits = [f"{w.filename}:{w.lineno}: {w.message}" for w in found if "synchroniz" in str(w.message)]
    assert waits == []


def test_an_infinite_weight_is_named(tmp_path):
    with ExitStack() as resources:
        loop = _loop(tmp_path, resources, global_batch=16, micro_batch=8)
        for _ in range(2):
            loop.clock.restart()
            loop._step()
        weight = dict(loop.model.module.named_parameters())["layers.2.layernorm_mlp.fc2_weight"]
        poison(weight, math.inf, 1000)
        with pytest.raises(RuntimeError, match="no checkpoint to go back to"):
            for _ in range(17):
                loop.clock.restart()
                loop._step()
    # An optimizer's step may have come in between, and makes NaN of an infinity.
    told = (tmp_path / "events.jsonl").read_text()
    assert re.search(r"Weight \(fc2_weight\) of layers.2.layernorm_mlp is not finite \((inf|nan) at 1000\)", told)


def test_records_of_two_runs_of_a_layer_are_equal():
    layer = ottava.TransformerLayer(
        256, 512, 4, device="cuda", params_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0
    )
    x = torch.randn(64, 2, 256, device=CUDA, dtype=torch.bfloat16)
    records = []
    for _ in range(2):
        with Record(layer, backward=False).watching() as record, ottava.autocast(recipe=recipes.Float8CurrentScaling()):
            layer(x)
        records.append(record)
    assert records[0].difference(records[1]) is None and len(records[0].numbers()) > 10
