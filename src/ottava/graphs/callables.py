"""`make_graphed_callables`: modules whose forward and backward are a graph each, with the recipe, FP8 weights and delayed scaling inside.

[Note: what a graph holds] Of a forward: casts, products, and `record_amax_` into the live amax history. Of a backward: the same. Not the
update of delayed scaling, which a forward leaves to the outermost `autocast` and a backward to its end: it runs then, after a replay as
after an eager pass, once, and is a small graph of its own. A copy of a weight that is kept from the first microbatch on
(cache_quantized_params) is made by a graph for first microbatches and read by another one for later ones; they share their memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.graphs.addresses import Addresses, weight_copies
from ottava.graphs.gradient_copies import GradientCopies
from ottava.graphs.recorder import CudaRecorder, Recorder, Replay
from ottava.notices import warn_once
from ottava.quant.delayed import (
    BUFFERS,
    DelayedState,
    RecordedUpdate,
    collecting_backward,
    collecting_forward,
    replayed_backward,
    replayed_forward,
    step_states,
    updates_without_the_host,
)
from ottava.quant.state import CURRENT, autocast
from ottava.recipe import Recipe

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
FIRST = "is_first_microbatch"


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
    options = _Options(
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


class _Options:
    """What `make_graphed_callables` was asked for. See there."""

    def __init__(
        self,
        enabled: Any = False,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        group: Any = None,
        caching: bool = False,
        warm_ups: int = 3,
        allow_unused_input: bool = False,
        retain_graph: bool = False,
        clone_gradients: bool = True,
        before_warm_up: Callable[[], Any] | None = None,
        after_warm_up: Callable[[], Any] | None = None,
    ) -> None:
        if warm_ups < 1:
            raise ValueError(
                f"make_graphed_callables: num_warmup_iters must be at least 1, got {warm_ups}: kernels are compiled then."
            )
        self.enabled, self.calibrating, self.recipe, self.group = enabled, calibrating, recipe, group
        self.caching, self.warm_ups = caching, warm_ups
        self.allow_unused_input, self.retain_graph = allow_unused_input, retain_graph
        self.clone_gradients = clone_gradients
        self.before_warm_up, self.after_warm_up = before_warm_up, after_warm_up

    def context(self, index: int, count: int) -> autocast:
        """What module `index` of `count` runs under."""
        enabled = self.enabled if isinstance(self.enabled, tuple) else (self.enabled,) * count
        if len(enabled) != count or not all(isinstance(on, bool) for on in enabled):
            raise ValueError(
                f"make_graphed_callables: enabled must be a bool, or one a module ({count}); got {self.enabled!r}."
            )
        return autocast(enabled[index], self.calibrating, self.recipe, self.group)


def graph_modules(
    modules: Any, sample_args: Any, sample_kwargs: Any, options: _Options, recorder: Recorder, hooks: Any = None
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
        _check_module(module, given)
    if len({module.training for module in chosen}) > 1:
        raise ValueError(
            "make_graphed_callables: some modules are in training mode and some are not: call train() or eval()."
        )
    graphed = [
        _GraphedModule(module, args, kwargs, options.context(i, len(chosen)), options, given or {})
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


def _warm_up(graphed: list[_GraphedModule], options: _Options, recorder: Recorder) -> None:
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


def _record_updates(one: _Pass, recorder: Recorder) -> None:
    """Makes the updates that follow a replay one launch each: of a layer they are several, and take the host longer than its graph."""
    for states, forward in ((one.forward_states, True), (one.backward_states, False)):
        if updates_without_the_host(states):
            step = functools.partial(step_states, states, forward)
            recorder.warm_up(step)
            recipes = [state.recipe for state in states]
            states[0].recorded_updates[forward] = RecordedUpdate(states, recipes, recorder.record(step))


def _check_module(module: Any, hooks: dict[str, dict] | None) -> None:
    """Names what cannot be recorded."""
    from torch.distributed.fsdp import FSDPModule  # takes half a second, which `import ottava` does not have

    if not isinstance(module, nn.Module):
        raise ValueError(f"make_graphed_callables takes modules, got {type(module).__name__}: wrap it in one.")
    who = f"make_graphed_callables: {type(module).__name__}"
    if unknown := set(hooks or {}) - set(HOOKS):
        raise ValueError(
            f"make_graphed_callables: capture_time_hooks has {sorted(unknown)}; known: {', '.join(HOOKS)}."
        )
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(own):
        raise ValueError(f"{who} has hooks, which a graph would run once and never again: register them afterwards.")
    for child in module.modules():
        if isinstance(child, FSDPModule):
            raise ValueError(
                f"{who} is sharded by FSDP2, which gathers weights into memory that is not always the same."
            )
        drops = max(getattr(child, "attention_dropout", 0.0) or 0.0, getattr(child, "hidden_dropout", 0.0) or 0.0)
        if child.training and drops > 0.0 and getattr(child, "get_rng_state_tracker", None) is not None:
            raise ValueError(
                f"{who} draws dropout from the streams of get_rng_state_tracker, whose states the host swaps in a forward: set dropout to "
                "0, or use torch's default stream."
            )


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


# ------------------------------------------------------------------------------------------------------------ one module


class _GraphedModule:
    """A module, its static inputs, and what was recorded for them."""

    def __init__(
        self, module: nn.Module, args: Any, kwargs: dict, context: autocast, options: _Options, hooks: dict[str, dict]
    ) -> None:
        self.module, self.context, self.options, self.hooks = module, context, options, hooks
        self.eager, self.training = module.forward, module.training
        kwargs = {name: value for name, value in kwargs.items() if not (options.caching and name == FIRST)}
        self.names = tuple(kwargs)
        leaves, self.spec = torch_private.tree_flatten((tuple(args), kwargs))
        values = (*args, *kwargs.values())
        # The number of positional arguments, if no argument is a tuple or the like: the values of a call are the leaves then.
        self.flat = len(args) if len(values) == len(leaves) and all(map(operator.is_, values, leaves)) else None
        self.leaves = [_static(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.kinds = [_kind(leaf) for leaf in self.leaves]
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.targets = [(x.detach(), x.data_ptr()) for x in self.inputs]
        self.differentiated = [x.requires_grad for x in self.inputs]
        self.parameters = [p for p in module.parameters() if p.requires_grad] if module.training else []
        self.variants = {first: _Pass(self, first) for first in ((True, False) if options.caching else (None,))}

    def take_over(self) -> None:
        """From now on the module's forward is a replay."""
        self.lies_at, self.copies = Addresses(self.module), weight_copies(self.module)
        self.module.forward = self.forward  # type: ignore[method-assign]

    def call(self, first: bool | None) -> Any:
        """An eager forward on the static inputs."""
        args, kwargs = torch_private.tree_unflatten(self.leaves, self.spec)
        return self.eager(*args, **kwargs, **({} if first is None else {FIRST: first}))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does instead of its own forward."""
        module = self.module
        eager = module.training != self.training or torch.is_grad_enabled() != self.training
        if eager or torch_private.inside_backward() or torch.compiler.is_compiling():
            if not (module.training or self.training):
                warn_once(
                    f"ottava: a {type(module).__name__} that was graphed for evaluation runs without its graph where gradients are on: use "
                    "torch.no_grad()."
                )
            return self.eager(*args, **kwargs)
        one = self.variants[self._first(kwargs)]
        given = self._given(args, kwargs)
        self._check_context()
        if not self.lies_at.hold():
            raise ValueError(
                f"Parameters or buffers of this {type(module).__name__} lie elsewhere than when its graph was recorded (moved, loaded with "
                "assign=True, quantized by another recipe): call make_graphed_callables again, on a module that was not graphed."
            )
        apply = _Replayed.apply if torch_private.transforms_active() else _BARE_APPLY
        outputs = apply(one, *given, *self.parameters)
        if one.forward_states:
            replayed_forward(one.forward_states)
        if one.returns_a_tensor:
            return outputs[0]
        tensors = iter(outputs)
        return torch_private.tree_unflatten(
            [next(tensors) if leaf is _TENSOR else leaf for leaf in one.result], one.spec
        )

    def _first(self, kwargs: dict[str, Any]) -> bool | None:
        """Takes is_first_microbatch out of the arguments, where it chooses the graph."""
        if not self.options.caching:
            if kwargs.get(FIRST, 0) is None and FIRST not in self.names:  # as if it had not been given
                del kwargs[FIRST]
            return None
        first = kwargs.pop(FIRST, None)
        if first not in (True, False):
            raise ValueError(f"Graphed with cache_quantized_params=True: pass {FIRST}=True or False, got {first!r}.")
        return bool(first)

    def _given(self, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, if it is one that the graph can serve."""
        tensors = []
        for leaf, kind in zip(self._leaves_of(args, kwargs), self.kinds, strict=True):
            if not isinstance(leaf, Tensor):
                fits = leaf is kind or _kind(leaf) == kind
            else:
                tensors.append(leaf)
                fits = type(kind) is _Kind and leaf.shape == kind.shape and leaf.dtype == kind.dtype
                fits = fits and leaf.device == kind.device
            if not fits:
                wanted, given = (tuple(k) if isinstance(k, _Kind) else k for k in (kind, _kind(leaf)))
                raise ValueError(
                    f"This {type(self.module).__name__} was graphed for {wanted}, but is called with {given}: a graph "
                    "serves one shape and dtype, and the other values that it was recorded with."
                )
        return tensors

    def _leaves_of(self, args: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
        """The values of a call in the order of `self.leaves`."""
        if tuple(kwargs) != self.names and kwargs.keys() == set(self.names):
            kwargs = {name: kwargs[name] for name in self.names}  # were given in another order
        if len(args) == self.flat and tuple(kwargs) == self.names:
            return (*args, *kwargs.values())
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        if spec != self.spec:
            hint = f" (for {FIRST}, graph with cache_quantized_params=True)" if FIRST in kwargs else ""
            raise ValueError(
                f"This {type(self.module).__name__} was graphed for other arguments than the {len(args)} and {sorted(kwargs)} of this "
                f"call: pass them as sample_args and sample_kwargs have them{hint}."
            )
        return leaves

    def _check_context(self) -> None:
        wanted, given = self.context.recipe, CURRENT.recipe
        if given is not wanted and wanted is not None and CURRENT.depth and given != wanted:
            raise ValueError(
                f"This {type(self.module).__name__} was graphed with {wanted}, but is called inside autocast with {given}."
            )


def _static(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Kind(NamedTuple):
    """What the tensors of all calls have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _kind(leaf: Any) -> Any:
    """What a graph is recorded for."""
    return _Kind(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


_TENSOR = object()


class _Pass:
    """Forward and backward of a module with one value of is_first_microbatch. Both take and give static tensors."""

    forward_replay: Replay
    backward_replay: Replay

    def __init__(self, owner: _GraphedModule, first: bool | None) -> None:
        self.owner, self.first = owner, first
        self.live: list[Tensor] = []
        """Outputs of the last forward that have a gradient, with what autograd keeps for backward."""
        self.incoming: list[Tensor] = []
        """Static gradients of these."""
        self.forward_states: list[DelayedState] = []
        self.backward_states: list[DelayedState] = []
        self.result: list[Any] = []
        """Leaves of what the module returns: `_TENSOR`, or a value that is no tensor."""
        self.spec: Any = None
        self.returns_a_tensor = False
        """And nothing around it."""
        self.differentiable: list[bool] = []
        self.copies: dict[tuple[bool, ...], GradientCopies] = {}
        """Of what backward gives, by which of the inputs that have a gradient are leaves."""
        self.added: list[nn.Parameter] = []
        """Parameters whose gradients the graph adds into `main_grad`."""

    @property
    def surface(self) -> list[Tensor]:
        """What backward gives gradients of."""
        return [*(x for x in self.owner.inputs if x.requires_grad), *self.owner.parameters]

    def forward(self) -> list[Tensor]:
        """The work of the forward graph."""
        with torch.set_grad_enabled(self.owner.training), self.owner.context, collecting_forward() as states:
            result = self.owner.call(self.first)
        self.forward_states = list({id(state): state for state in states}.values())
        leaves, self.spec = torch_private.tree_flatten(result)
        self.result = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.returns_a_tensor = isinstance(result, Tensor)
        self.differentiable = [t.requires_grad for t in tensors]
        self.live = [t for t in tensors if t.requires_grad]
        return [t.detach() for t in tensors]

    def backward(self) -> Sequence[Tensor | None]:
        """The work of the backward graph: gradients of `surface`."""
        if not self.live or not self.surface:
            return [None] * len(self.surface)
        if not self.incoming:
            self.incoming = [torch.zeros_like(t) for t in self.live]
        live, self.live = self.live, []
        with collecting_backward() as states:
            found = torch.autograd.grad(
                live, self.surface, self.incoming, retain_graph=self.owner.options.retain_graph, allow_unused=True
            )
        self.backward_states = list({id(state): state for state in states}.values())
        return found

    def hooked_forward(self) -> None:
        """A warm-up."""
        self._call_hooks("forward_pre_hooks")
        self.forward()
        self._call_hooks("forward_hooks")

    def hooked_backward(self) -> None:
        """A warm-up. Names an input whose gradient does not come."""
        self._call_hooks("backward_pre_hooks")
        found = self.backward()
        self._call_hooks("backward_hooks")
        inputs = sum(x.requires_grad for x in self.owner.inputs)
        if self.owner.training and not self.owner.options.allow_unused_input and any(g is None for g in found[:inputs]):
            raise ValueError(
                f"An input of {type(self.owner.module).__name__} requires a gradient and gets none: pass allow_unused_input=True, or a "
                "sample that does not require one."
            )

    def record_forward(self, recorder: Recorder) -> None:
        self._call_hooks("forward_pre_hooks")
        self.forward_replay = recorder.record(self.forward)
        self._call_hooks("forward_hooks")

    def record_backward(self, recorder: Recorder) -> None:
        self._call_hooks("backward_pre_hooks")
        self.backward_replay = recorder.record(self.backward)
        self._call_hooks("backward_hooks")

    def _call_hooks(self, kind: str) -> None:
        for hook in self.owner.hooks.get(kind, {}).values():
            if hook(self.owner.module) is not None:
                raise ValueError(f"make_graphed_callables: a hook of capture_time_hooks ({kind}) must return None.")

    def returned(self, found: Sequence[Tensor | None], leaves: tuple[bool, ...]) -> list[Tensor | None]:
        """Gradients of `surface` as autograd may keep them: copies, where they would become somebody's `grad` and be overwritten by
        the next replay.

        found: the tensors that every replay fills. leaves: of the inputs that have a gradient, whether they are leaves.
        """
        copies = self.copies.get(leaves)
        if copies is None:
            owner, inputs = self.owner, len(leaves)
            kept = [*leaves, *([owner.options.clone_gradients] * len(owner.parameters))]
            copies = self.copies[leaves] = GradientCopies(found, kept, apart=inputs)
            self.added = [p for p, g in zip(owner.parameters, found[inputs:], strict=True) if g is None]
        for parameter in self.added:
            if getattr(parameter, "main_grad", None) is not None:
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # by the graph
        return copies()


class _Replayed(torch.autograd.Function):
    """Two replays as one differentiable function of the inputs and the parameters."""

    @staticmethod
    def forward(ctx: Any, one: _Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        owner = one.owner
        leaves = []
        # Shorter than `tensors`: the parameters follow, and stay where they are.
        for (target, address), wanted, given in zip(owner.targets, owner.differentiated, tensors):
            if given.data_ptr() != address:
                target.copy_(given)
            if wanted:
                leaves.append(given.is_leaf)
        ctx.one, ctx.leaves = one, tuple(leaves)
        outputs = tuple(t.detach() for t in one.forward_replay() if t is not None)
        if not all(one.differentiable):
            ctx.mark_non_differentiable(*(t for t, yes in zip(outputs, one.differentiable, strict=True) if not yes))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        one = ctx.one
        if one.incoming:
            coming = (g for g, yes in zip(grads, one.differentiable, strict=True) if yes)
            for static, gradient in zip(one.incoming, coming, strict=True):
                static.copy_(gradient)
        given = one.returned(one.backward_replay(), ctx.leaves)
        if one.backward_states:
            replayed_backward(one.backward_states)
        wanted = iter(given)
        inputs = [next(wanted) if differentiated else None for differentiated in one.owner.differentiated]
        return None, *inputs, *wanted


_BARE_APPLY = torch_private.bare_apply(_Replayed)
