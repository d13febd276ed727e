"""Time that Python spends on one step of the modules, the GPU's work being negligible.

`python benchmarks/host_overhead.py [--profile RECIPE]` on a GPU: four small layers, milliseconds of forward and backward. A step of
four Llama-3-8B layers keeps an H200 busy for about 52 ms; the host must stay well below that, or the GPU waits.

`python benchmarks/host_overhead.py --suppress-launches [--profile RECIPE] [--json FILE]` where there is no GPU, but Triton can be
imported: the Python of the CUDA path runs on small CPU tensors, and neither kernels nor cuBLASLt are called. Prints, for each module
and recipe, Python calls (with calls of builtins after the plus sign) and microseconds of a forward and of a backward.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import torch_private
from ottava.bench.layer import RECIPES, Layers, Shape
from ottava.graphs import graphed_module
from ottava.graphs.addresses import Addresses
from ottava.graphs.gradient_copies import GradientCopies
from ottava.graphs.recorded_pass import Replayed
from ottava.kernels import registry
from ottava.quant import delayed

HIDDEN, FFN, TOKENS = (
    128,
    256,
    128,
)  # small: what torch itself computes on a CPU (allocations, attention) must not count


# ---------------------------------------------------------------------------------------------------- launches suppressed


class _Run:
    """`CompiledKernel.run` of Triton 3.6: Python that asks twice for scratch memory, around a builtin that takes any arguments."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    launch = staticmethod("".format)

    def __call__(self, *args: Any) -> None:
        def scratch() -> None:
            return None

        scratch(), scratch()
        self.launch(*args)


class _Compiled:
    """Stands in for a kernel that Triton has compiled: as much Python as Triton 3.6 runs for a launch, and no launch."""

    function = packed_metadata = None
    run = _Run()

    def launch_metadata(self, grid: Any, stream: Any, *args: Any) -> dict[str, Any]:
        """What hooks are told."""
        return {"stream": stream}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def runner(*args: Any) -> None:
            _current_device(), _current_device()
            metadata = self.launch_metadata(grid, 0, *args)
            self.run(*grid, 0, None, metadata, *args)
            from triton import knobs

            knobs.runtime.launch_enter_hook(metadata)  # the function in C calls the hooks
            knobs.runtime.launch_exit_hook(metadata)

        return runner


def _current_device() -> int:
    return 0


class _Zero:
    """`current_device()` and `current_stream(device)` as calls of builtins, as the real ones are."""

    device = staticmethod([].__len__)
    stream = staticmethod([].count)


def _scaled_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=rest[7])


def suppress_launches() -> None:
    """From now on ops run their CUDA versions on CPU tensors, up to the launch. Numbers are garbage, shapes are right."""
    from triton.runtime.jit import JITFunction

    JITFunction.__getitem__ = lambda self, grid: lambda *args, **options: _Compiled()
    torch._scaled_mm_v2 = _scaled_mm
    torch.cuda.current_device = _current_device
    torch_private.current_device, torch_private.current_stream = _Zero.device, _Zero.stream
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    library = torch.library.Library(registry.NAMESPACE, "IMPL")
    for name, function in vars(registry.FUNCTIONS["cuda"]).items():
        library.impl(name, registry.without_gradients(function), "CPU")
    registry.FUNCTIONS["cpu"] = registry.FUNCTIONS["cuda"]
    _KEPT.append(library)


_KEPT: list[Any] = []


def _modules() -> dict[str, nn.Module]:
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    layer = ottava.TransformerLayer(
        HIDDEN, FFN, 2, num_gqa_groups=1, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        activation="swiglu", bias=False, self_attn_mask_type="causal", **options,
    )  # fmt: skip
    return {
        "Linear": ottava.Linear(HIDDEN, FFN, **options),
        "LayerNormLinear": ottava.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", **options),
        "LayerNormMLP": ottava.LayerNormMLP(
            HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", bias=False, **options
        ),
        "TransformerLayer": layer,
    }


class _Count:
    """Calls of Python functions and of builtins, in one thread."""

    def __init__(self) -> None:
        self.python = self.builtin = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            self.builtin += 1

    def of(self, function: Callable, argument: Tensor) -> tuple[Any, tuple[int, int]]:
        """(what `function(argument)` returns, its calls)."""
        self.python = self.builtin = 0
        sys.setprofile(self)
        try:
            result = function(argument)
        finally:
            sys.setprofile(None)
        return result, (self.python, self.builtin - 1)  # not the second sys.setprofile


def _measure(module: nn.Module, chosen: Any) -> dict[str, Any]:
    """Calls and fewest microseconds of the module itself, inside of an `autocast` that stands already."""
    x = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    count, times = _Count(), {"forward": [], "backward": []}
    calls: dict[str, tuple[int, int]] = {}
    for i in range(120):
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            start = time.perf_counter()
            y = module(x)
            times["forward"].append(time.perf_counter() - start)
        dy = torch.ones_like(y)
        start = time.perf_counter()
        y.backward(dy)
        times["backward"].append(time.perf_counter() - start)
        if i == 10:
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                y, calls["forward"] = count.of(module, x)
            _, calls["backward"] = count.of(y.backward, dy)
    return {
        way: {"python": calls[way][0], "builtin": calls[way][1], "us": round(min(taken[20:]) * 1e6, 1)}
        for way, taken in times.items()
    }


def _host_alone(profile: str | None, file: str | None) -> None:
    suppress_launches()
    found: dict[str, Any] = {}
    for name, module in _modules().items():
        for chosen_name, chosen in RECIPES.items():
            made = found.setdefault(name, {})[chosen_name] = _measure(module, chosen)
            shown = ", ".join(f"{way} {n['python']}+{n['builtin']} calls {n['us']} us" for way, n in made.items())
            print(f"{name:17s} {chosen_name:21s} {shown}")
            if chosen_name == profile:
                _profiled(lambda module=module, chosen=chosen: _measure(module, chosen))
    if file is not None:
        Path(file).write_text(json.dumps(found, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------- on a GPU


def _profiled(function: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    with torch.autograd.set_multithreading_enabled(False):
        function()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


class _Parts:
    """Where the host's time of a graphed module goes, by function, while in a `with` block: a clock around each."""

    WATCHED = (
        (graphed_module.GraphedModule, "_given"),
        (Addresses, "hold"),
        (Replayed, "forward"),
        (Replayed, "backward"),
        (torch.cuda.CUDAGraph, "replay"),
        (GradientCopies, "__call__"),
        (graphed_module, "replayed_forward"),
        (delayed, "_update"),
    )

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = [{}]
        self.kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> _Parts:
        for owner, name in self.WATCHED:
            function = vars(owner)[name]
            self.kept.append((owner, name, function))
            bare = function.__func__ if isinstance(function, staticmethod) else function
            clocked = self._clocked(f"{owner.__name__.split('.')[-1]}.{name}", bare)
            setattr(owner, name, staticmethod(clocked) if isinstance(function, staticmethod) else clocked)
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self.kept:
            setattr(owner, name, function)

    def _clocked(self, label: str, function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                step = self.steps[-1]
                step[label] = step.get(label, 0.0) + time.perf_counter() - start

        return call

    def next_step(self) -> None:
        """What comes now belongs to another forward and backward."""
        self.steps.append({})

    def medians(self) -> dict[str, float]:
        """Microseconds a step."""
        labels = {label for step in self.steps for label in step}
        whole = self.steps[5:-1]
        return {label: round(statistics.median(s.get(label, 0.0) for s in whole) * 1e6, 1) for label in sorted(labels)}


def _timed(model: nn.Module, x: Tensor, dy: Tensor, chosen: Any, parts: _Parts | None = None) -> dict[str, float]:
    """Median milliseconds until the calls of a forward and of a backward return, and between two events around both on the GPU.

    Gradients are set to None in between, as by an optimizer's `zero_grad`: autograd would add to them with a launch each.
    """
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "gpu": []}
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(25):
        model.zero_grad()
        x.grad = None
        torch.cuda.synchronize()
        before.record()
        start = time.perf_counter()
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            y = model(x)
        middle = time.perf_counter()
        y.backward(dy)
        end = time.perf_counter()
        after.record()
        torch.cuda.synchronize()
        if parts is not None:
            parts.next_step()
        if i >= 5:
            taken["forward"].append((middle - start) * 1e3)
            taken["backward"].append((end - middle) * 1e3)
            taken["gpu"].append(before.elapsed_time(after))
    return {way: round(statistics.median(times), 2) for way, times in taken.items()}


def _on_gpu(profile: str | None) -> None:
    """First with next to nothing for the GPU to do, then at the size of the bar: the host in at most half of the GPU's time. Then the
    same in CUDA graphs."""
    shapes = {
        "small": Shape(hidden=512, ffn=1024, heads=4, kv_heads=2, sequence=128),
        "hidden 2048, 8192 tokens": Shape(hidden=2048, ffn=8192, heads=32, kv_heads=8, sequence=8192),
    }
    for label, shape in shapes.items():
        model = Layers(shape, "cuda")
        x = torch.randn(shape.sequence, 1, shape.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn_like(x)
        for name, chosen in RECIPES.items():
            found = _timed(model, x, dy, chosen)
            share = (found["forward"] + found["backward"]) / found["gpu"]
            print(f"{label}, {shape.layers} layers, {name}: {found} ms, host / gpu {share:.2f}")
            if profile == name and label == "small":
                _profiled(lambda: [_timed(model, x, dy, chosen)])  # noqa: B023
    for count in (shape.layers, 1):  # of the last shape; the bar: at most a twentieth of the GPU's time
        for name, chosen in RECIPES.items():
            model = Layers(replace(shape, layers=count), "cuda")
            ottava.make_graphed_callables(model, (x,), enabled=chosen is not None, recipe=chosen)
            found = _timed(model, x, dy, chosen)
            share = (found["forward"] + found["backward"]) / found["gpu"]
            print(f"{label}, {count} layers in CUDA graphs, {name}: {found} ms, host / gpu {share:.3f}")
            with _Parts() as parts:
                _timed(model, x, dy, chosen, parts)
            print(f"  of which, with a clock around each part: {parts.medians()} us")


def main() -> None:
    """Prints milliseconds a step on a GPU, or calls and microseconds a module without one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", metavar="RECIPE", choices=list(RECIPES), default=None)
    parser.add_argument("--suppress-launches", action="store_true", help="the host alone; needs no GPU")
    parser.add_argument("--json", metavar="FILE", default=None, help="of --suppress-launches")
    options = parser.parse_args()
    if options.suppress_launches:
        _host_alone(options.profile, options.json)
    else:
        _on_gpu(options.profile)


if __name__ == "__main__":
    main()
