"""A module that replays: its static inputs, what calls it serves, and what was recorded for them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.graphs.addresses import Addresses, weight_copies
from ottava.graphs.options import Options
from ottava.graphs.recorded_pass import BARE_APPLY, TENSOR, Pass, Replayed
from ottava.notices import warn_once
from ottava.quant.delayed import replayed_forward
from ottava.quant.state import CURRENT, autocast

FIRST = "is_first_microbatch"


class GraphedModule:
    """A module, its static inputs, and what was recorded for them."""

    def __init__(
        self, module: nn.Module, args: Any, kwargs: dict, context: autocast, options: Options, hooks: dict[str, dict]
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
        self.variants = {first: Pass(self, first) for first in ((True, False) if options.caching else (None,))}

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
        apply = Replayed.apply if torch_private.transforms_active() else BARE_APPLY
        outputs = apply(one, *given, *self.parameters)
        if one.forward_states:
            replayed_forward(one.forward_states)
        if one.returns_a_tensor:
            return outputs[0]
        tensors = iter(outputs)
        return torch_private.tree_unflatten(
            [next(tensors) if leaf is TENSOR else leaf for leaf in one.result], one.spec
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
        if wanted is None and given is not None and self.options.enabled is False and not CURRENT.calibrating:
            warn_once(
                f"ottava: a {type(self.module).__name__} that was graphed with enabled=False is called inside autocast, and runs as it was "
                "recorded: without FP8. Give make_graphed_callables enabled=True and the recipe."
            )
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
