"""Forward and backward of one module, recorded, and the two replays as one differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.graphs.gradient_copies import GradientCopies
from ottava.graphs.recorder import Recorder, Replay
from ottava.quant.delayed import DelayedState, collecting_backward, collecting_forward, replayed_backward

if TYPE_CHECKING:
    from ottava.graphs.graphed_module import GraphedModule

TENSOR = object()
"""Stands for a tensor in what a module returns."""


class Pass:
    """Forward and backward of a module with one value of is_first_microbatch. Both take and give static tensors."""

    forward_replay: Replay
    backward_replay: Replay

    def __init__(self, owner: GraphedModule, first: bool | None) -> None:
        self.owner, self.first = owner, first
        self.live: list[Tensor] = []
        """Outputs of the last forward that have a gradient, with what autograd keeps for backward."""
        self.incoming: list[Tensor] = []
        """Static gradients of these."""
        self.forward_states: list[DelayedState] = []
        self.backward_states: list[DelayedState] = []
        self.result: list[Any] = []
        """Leaves of what the module returns: `TENSOR`, or a value that is no tensor."""
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
        self.result = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
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


class Replayed(torch.autograd.Function):
    """Two replays as one differentiable function of the inputs and the parameters."""

    @staticmethod
    def forward(ctx: Any, one: Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
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


BARE_APPLY = torch_private.bare_apply(Replayed)
