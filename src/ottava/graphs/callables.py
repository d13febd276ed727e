"""`make_graphed_callables`: modules whose forward and backward are a graph each, with the recipe, FP8 weights and delayed scaling inside.

[Note: what a graph holds] Of a forward: casts, which raise the live amax history, and products. Of a backward: the same. Not the
update of delayed scaling, which a forward leaves to the outermost `autocast` and a backward to its end: it runs then, after a replay as
after an eager pass, once, and is a small graph of its own. A copy of a weight that is kept from the first microbatch on
(cache_quantized_params) is made by a graph for first microbatches and read by another one for later ones; they share their memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ottava.graphs.graphed_module import GraphedModule
from ottava.graphs.options import Options
from ottava.graphs.recordable import check_module
from ottava.graphs.recorded_pass import Pass
from ottava.graphs.recorder import CudaRecorder, Recorder
from ottava.quant.delayed import BUFFERS, DelayedState, RecordedUpdate, step_states, updates_without_the_host
from ottava.recipe import Recipe


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: Any = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: Any = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[dict[str, dict] | None] | None = None,
) -> Any:
    """Makes the forward of each module, and its backward, one launch. Arguments are TransformerEngine's; returns the modules.

    modules, sample_args, sample_kwargs: a module, a tuple of its arguments and a dictionary; or tuples of these, in the order in which
    modules run. Tensors have to have the same shapes and dtypes at every call, other values have to be equal. enabled (a tuple: by
    module), calibrating, recipe, amax_reduction_group: as for `autocast`; a call belongs inside of the same `autocast`.
    cache_quantized_params: calls take is_first_microbatch, True or False. pool: of `torch.cuda.graph_pool_handle()`.
    capture_time_hooks: by module, {"forward_pre_hooks": {0: hook}, ...}; called with the module before and after each warm-up and
    recording, and never replayed. The names that begin with fp8_ are older ones of the same arguments.

    Outputs are overwritten by the next call, and backward has to run before it. Without gradients, and in the other of training and
    evaluation mode, modules run as before. State of delayed scaling, gradients and random numbers are as if nothing had run.

        >>> layer = ottava.TransformerLayer(2048, 8192, 16, params_dtype=torch.bfloat16)
        >>> x = torch.randn(8192, 1, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        >>> layer = ottava.make_graphed_callables(layer, (x,), enabled=True, recipe=recipe.DelayedScaling())
        >>> with ottava.autocast(recipe=recipe.DelayedScaling()):
        ...     y = layer(x)
    """
    if _order is not None or _num_layers_per_chunk is not None or _reuse_graph_input_output_buffers:
        raise ValueError(
            "make_graphed_callables: _order, _num_layers_per_chunk and _reuse_graph_input_output_buffers belong to pipeline schedules, "
            "which are not offered: pass the modules of one stage in the order in which they run."
        )
    if not torch.cuda.is_available():
        raise ValueError("make_graphed_callables needs a CUDA device, and there is none: call the modules as they are.")
    options = Options(
        enabled=_older("enabled", enabled, "fp8_enabled", fp8_enabled, False),
        calibrating=_older("calibrating", calibrating, "fp8_calibrating", fp8_calibrating, False),
        recipe=_older("recipe", recipe, "fp8_recipe", fp8_recipe, None),
        group=_older("amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group, None),
        caching=_older(
            "cache_quantized_params", cache_quantized_params, "fp8_weight_caching", fp8_weight_caching, False
        ),
        warm_ups=num_warmup_iters,
        allow_unused_input=allow_unused_input,
        retain_graph=retain_graph_in_backward,
        clone_gradients=clone_param_grads_on_return,
        before_warm_up=pre_warmup_hook,
        after_warm_up=post_warmup_hook,
    )
    return graph_modules(modules, sample_args, sample_kwargs, options, CudaRecorder(pool), capture_time_hooks)


def _older(name: str, value: Any, old_name: str, old: Any, default: Any) -> Any:
    if value is not None and old is not None:
        raise ValueError(f"make_graphed_callables: {old_name} is the older name of {name}: pass one of them.")
    value = old if value is None else value
    return default if value is None else value


def graph_modules(
    modules: Any, sample_args: Any, sample_kwargs: Any, options: Options, recorder: Recorder, hooks: Any = None
) -> Any:
    """`make_graphed_callables` with any recorder."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")) and torch.is_autocast_cache_enabled():
        raise ValueError(
            "make_graphed_callables inside of torch.autocast, which keeps casts of parameters: a graph would read those of now for ever. "
            "Call it outside, or with torch.autocast(..., cache_enabled=False)."
        )
    several = isinstance(modules, tuple)
    chosen: tuple[nn.Module, ...] = modules if several else (modules,)
    arguments = sample_args if several else (sample_args,)
    named = (({},) * len(chosen) if several else {}) if sample_kwargs is None else sample_kwargs
    named = named if several else (named,)
    hooks = (None,) * len(chosen) if hooks is None else hooks
    for name, given in (("sample_args", arguments), ("sample_kwargs", named), ("capture_time_hooks", hooks)):
        if len(given) != len(chosen):
            raise ValueError(f"make_graphed_callables: {len(given)} {name} for {len(chosen)} modules.")
    for module, given in zip(chosen, hooks):
        check_module(module, given)
    if len({module.training for module in chosen}) > 1:
        raise ValueError(
            "make_graphed_callables: some modules are in training mode and some are not: call train() or eval()."
        )
    graphed = [
        GraphedModule(module, args, kwargs, options.context(i, len(chosen)), options, given or {})
        for i, (module, args, kwargs, given) in enumerate(zip(chosen, arguments, named, hooks))
    ]
    with _leaving_no_trace(chosen):
        _warm_up(graphed, options, recorder)
        for first in graphed[0].variants:
            for one in graphed:
                one.variants[first].record_forward(recorder)
            for one in reversed(graphed):
                one.variants[first].record_backward(recorder)
        apart = recorder.apart()
        for one in graphed:
            _record_updates(next(iter(one.variants.values())), apart)
    for one in graphed:
        one.take_over()
    return chosen if several else chosen[0]


def _warm_up(graphed: list[GraphedModule], options: Options, recorder: Recorder) -> None:
    if options.before_warm_up is not None:
        options.before_warm_up()
    for _ in range(options.warm_ups):
        for first in graphed[0].variants:
            passes = [one.variants[first] for one in graphed]
            for one in passes:
                recorder.warm_up(one.hooked_forward)
            for one in reversed(passes):
                recorder.warm_up(one.hooked_backward)
    if options.after_warm_up is not None:
        options.after_warm_up()


def _record_updates(one: Pass, recorder: Recorder) -> None:
    """Makes the updates that follow a replay one launch each: of a layer they are several, and take the host longer than its graph."""
    for states, forward in ((one.forward_states, True), (one.backward_states, False)):
        if updates_without_the_host(states):
            step = functools.partial(step_states, states, forward)
            recorder.warm_up(step)
            recipes = [state.recipe for state in states]
            states[0].recorded_updates[forward] = RecordedUpdate(states, recipes, recorder.record(step))


@contextmanager
def _leaving_no_trace(modules: Sequence[nn.Module]) -> Iterator[None]:
    """State of delayed scaling, `main_grad` and random numbers are afterwards as they were."""
    states = {id(m): m for module in modules for m in module.modules() if isinstance(m, DelayedState)}.values()
    tensors = [getattr(state, name) for state in states for name in BUFFERS]
    sums = [getattr(p, "main_grad", None) for module in modules for p in module.parameters()]
    tensors += [t for t in sums if t is not None]
    kept = [tensor.clone() for tensor in tensors]
    flags = [(state, state.used, state.recorded) for state in states]
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        for state, used, recorded in flags:
            state.used, state.recorded = used, recorded
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1])
