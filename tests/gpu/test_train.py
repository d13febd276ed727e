"""The trainer on a GPU: its MFU against FLOPs and seconds that are counted here."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ottava.train.arguments import parse
from ottava.train.loop import Loop
from ottava.train.metrics import read_metrics
from ottava.train.world import Place, World

BF16, FP8 = 989e12, 1979e12  # FLOP/s of an H200, dense
STEPS, WARMUP = 16, 6


@pytest.mark.skipif("H200" not in torch.cuda.get_device_name(), reason="the peaks above are an H200's")
@pytest.mark.parametrize("recipe", ["none", "Float8CurrentScaling"])
def test_mfu_is_flops_over_time_over_peak(recipe: str, tmp_path) -> None:
    options = [f"--precision.recipe={recipe}", f"--train.run={tmp_path}", f"--data.cache={tmp_path}"]
    config, _ = parse(["examples/train_160m.toml", *options, "--train.sample-tokens=0", "--metrics.fp8-every=0"])
    config = replace(config, train=replace(config.train, steps=10**6, global_batch=64, evaluate_every=0))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources:
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=600.0))
        loop = Loop(config, world, resources)
        seconds = [_timed(loop) for _ in range(STEPS)]
        shapes = {name: p.shape for name, p in loop.model.module.named_parameters() if p.dim() == 2}

    # A product with a weight costs 2 FLOPs a weight and token forward, 4 backward. A table is not multiplied with.
    head = 6 * shapes.pop("head.weight").numel()
    layers = 6 * sum(shape.numel() for name, shape in shapes.items() if name.startswith("layers."))
    # QK^T and AV: 2 FLOPs for each channel and pair of positions; half of the pairs are masked; backward costs twice forward.
    pairs = config.data.length / 2
    attention = 3 * config.model.layers * 2 * 2 * config.model.hidden_size * pairs
    best = layers / (BF16 if recipe == "none" else FP8) + (head + attention) / BF16  # seconds a token
    tokens = config.train.global_batch * config.data.length
    found = [line["mfu"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    # Step by step: somebody else on the GPU makes some steps longer, in both measures. The last one has no line yet.
    ratios = [mfu / (best * tokens / s) for mfu, s in zip(found, seconds)]
    assert statistics.median(ratios[WARMUP:]) == pytest.approx(1.0, rel=0.01)


def _timed(loop: Loop) -> float:
    """Seconds of a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    loop.clock.restart()
    loop._step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
def test_compiled_layers_of_one_rank_train_as_eager_ones_do(recipe: str, tmp_path) -> None:
    """Weights with masters and FP8 bytes, under train.compile: losses of four steps, and one graph with a residual and one without."""
    from torch._dynamo.utils import counters

    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        options = [
            f"--precision.recipe={recipe}",
            f"--train.run={tmp_path / str(compiled)}",
            f"--data.cache={tmp_path}",
        ]
        config, _ = parse(["examples/train_160m.toml", *options, "--train.sample-tokens=0", "--metrics.fp8-every=0"])
        train = replace(config.train, steps=10**6, global_batch=8, micro_batch=8, evaluate_every=0, compile=compiled)
        config = replace(config, train=train, model=replace(config.model, layers=4))
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        with ExitStack() as resources:
            world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=600.0))
            loop = Loop(config, world, resources)
            losses[compiled] = []
            for _ in range(4):
                loop.clock.restart()
                found = loop._step()
                assert found is not None
                losses[compiled].append(found.loss)
        if compiled:
            assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
    assert losses[True] == pytest.approx(losses[False], rel=2e-3), losses
