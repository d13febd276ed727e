"""Recomputation: run a part of the model now, keep only its inputs, and run it again in backward.

`checkpoint` does it for one call, `apply_recompute` for the blocks of a model. The second run is bit for bit the first: torch's
random stream and every tracked one are put back, modules use the delayed scales they used the first time, and nothing is recorded
twice.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ottava import torch_private
from ottava.distributed.plan import RECOMPUTE as MODES
from ottava.distributed.shares import Share
from ottava.nn import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, TransformerLayer
from ottava.nn.random_replay import replayed
from ottava.quant.recompute import RECOMPUTE
from ottava.quant.state import CURRENT


def checkpoint(
    function: Callable,
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable | None = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose intermediate tensors are computed again in backward instead of kept.

    get_rng_state_tracker: a function that returns the tracker whose streams the recomputation replays. use_reentrant is accepted
    from scripts that pass it; torch's non-reentrant form, which is exact and needs no input with a gradient, serves both.

    distribute_saved_activations: of the first tensor among `args` (the hidden states) a rank keeps only its part of `tp_group`, in
    bytes, and all ranks gather it for the recomputation. It must be equal on all ranks of the group, as activations outside of
    sequence-parallel regions are; the result is the same to the bit. Other arguments are kept whole.

        >>> y = ottava.checkpoint(layer, x)
        >>> y = ottava.checkpoint(layer, x, distribute_saved_activations=True, tp_group=meshes.tp.get_group())
    """
    if use_reentrant not in (True, False):
        raise ValueError(f"use_reentrant must be True or False, got {use_reentrant!r}.")
    distributed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if distribute_saved_activations:
        distributed = _distributing(function, args, tp_group)
    tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None

    recipe_now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)

    def contexts() -> tuple[Any, Any]:
        streams = replayed(tracker) if tracker is not None else (contextlib.nullcontext(), contextlib.nullcontext())
        scales: list[Tensor] = []
        return _both(_stashing(scales), streams[0]), _both(_replaying(scales, recipe_now), streams[1])

    with distributed:
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=contexts,
            determinism_check=determinism_check,
            debug=debug,
            **kwargs,
        )


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _stashing(scales: list[Tensor]) -> Iterator[None]:
    """First pass: modules with delayed scaling append the scales they use."""
    outer, RECOMPUTE.stash = RECOMPUTE.stash, scales if torch.is_grad_enabled() else None
    try:
        yield
    finally:
        if outer is not None and RECOMPUTE.stash is not None:
            # A checkpoint inside another: the outer recomputation meets these modules too.
            outer.extend(RECOMPUTE.stash)
        RECOMPUTE.stash = outer


@contextlib.contextmanager
def _replaying(scales: list[Tensor], recipe_then: tuple[Any, bool, Any]) -> Iterator[None]:
    """Recomputation: modules run by the recipe of the first pass and take its scales back in the same order."""
    outer = (RECOMPUTE.replay, RECOMPUTE.stash)
    recipe_now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)
    RECOMPUTE.replay, RECOMPUTE.stash = iter(scales), None
    CURRENT.recipe, CURRENT.calibrating, CURRENT.group = recipe_then
    CURRENT.depth += 1
    try:
        yield
    finally:
        CURRENT.depth -= 1
        CURRENT.recipe, CURRENT.calibrating, CURRENT.group = recipe_now
        RECOMPUTE.replay, RECOMPUTE.stash = outer


# ---------------------------------------------------------------------------------------------------- distributed inputs


def _distributing(function: Callable, args: tuple[Any, ...], tp_group: Any) -> contextlib.AbstractContextManager[Any]:
    """In this context torch's checkpoint saves its inputs; the first tensor is saved as this rank's share."""
    _check_distributed(function, tp_group)
    hidden = next((a for a in args if isinstance(a, Tensor)), None)
    if tp_group is None or tp_group.size() == 1 or hidden is None or hidden.numel() < tp_group.size():
        return contextlib.nullcontext()
    if torch_private.saved_tensor_hooks_active():  # a checkpoint inside another, whose inputs the outer one recomputes
        return contextlib.nullcontext()
    place, shape = hidden.data_ptr(), hidden.shape

    def save(saved: Tensor) -> Tensor | Share:
        # What arrives is a detached alias of the argument.
        return Share(saved, tp_group) if saved.data_ptr() == place and saved.shape == shape else saved

    return torch.autograd.graph.saved_tensors_hooks(save, restored)


def restored(saved: Tensor | Share) -> Tensor:
    """The tensor that was saved, gathered if only a share of it was."""
    return saved.gather() if isinstance(saved, Share) else saved


def _check_distributed(function: Any, tp_group: Any) -> None:
    if tp_group is None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "distribute_saved_activations=True needs tp_group, the ranks on which the saved input is equal: pass the group of "
            "tensor parallelism."
        )
    if tp_group is None or tp_group.size() == 1 or not isinstance(function, nn.Module):
        return
    for part in function.modules():
        if getattr(getattr(part, "parallel", None), "sequence_parallel", False):
            raise ValueError(
                f"distribute_saved_activations=True, but {type(part).__name__} is sequence parallel: its input differs between "
                "the ranks of tp_group and is distributed already. Leave distribute_saved_activations False."
            )


# -------------------------------------------------------------------------------------------------- the blocks of a model


def apply_recompute(
    model: nn.Module,
    mode: str,
    blocks: Iterable[nn.Module] | None = None,
    *,
    get_rng_state_tracker: Callable | None = None,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
) -> nn.Module:
    """Sets what the model keeps for backward, in place, and returns the model. Values and gradients stay the same to the bit.

    mode:
        "full": of each block only the input is kept; its forward runs again in backward (`checkpoint`).
        "selective": norm and activation outputs and their FP8 copies are made again, and what attention keeps anyway is not kept
            twice: LayerNormLinear, LayerNormMLP, and the Linears of MultiheadAttention. Attention itself never keeps its scores.
        "none": as the model was built.
    blocks: by default the `TransformerLayer`s, or what `ModuleList`s and `Sequential`s hold where there are none. The keyword
    arguments are `checkpoint`'s, for "full"; a tracker that is not given is that of the block's own attention.

    Parameters keep their names: no module is wrapped. Call it before FSDP or DDP. A later call replaces an earlier one.

        >>> apply_recompute(model, "full")
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}.")
    if mode != "full" and (distribute_saved_activations or get_rng_state_tracker is not None):
        raise ValueError(f"Only mode 'full' keeps inputs to distribute and replays a tracker; mode is {mode!r}.")
    for module in model.modules():
        _undo(module)
    if mode == "none":
        return model
    chosen = list(blocks) if blocks is not None else layers_of(model)
    if not chosen:
        raise ValueError(
            f"apply_recompute(mode={mode!r}) found no blocks in {type(model).__name__}: it has no TransformerLayer, ModuleList or "
            "Sequential. Pass blocks=[...]."
        )
    for block in chosen:
        if mode == "selective":
            _select(block)
            continue
        if distribute_saved_activations:
            _check_distributed(block, tp_group)
        tracker = get_rng_state_tracker or _own_tracker(block)
        _recompute_whole(block, _Options(tracker, distribute_saved_activations, tp_group))
    return model


class _Options:
    """How a block is recomputed. Copies of the block share it: it may hold a process group, which cannot be copied."""

    def __init__(self, tracker: Callable | None, distribute: bool, tp_group: Any) -> None:
        self.for_checkpoint = {
            "get_rng_state_tracker": tracker,
            "distribute_saved_activations": distribute,
            "tp_group": tp_group,
        }

    def __deepcopy__(self, memo: dict) -> _Options:
        return self


def _recompute_whole(block: nn.Module, options: _Options) -> None:
    if "forward" in vars(block):
        raise ValueError(
            f"{type(block).__name__} has a forward of its own instance, which recomputation would hide: wrap that one in "
            "ottava.checkpoint instead."
        )
    block.__dict__["_recompute_options"] = options
    # A bound method, because copy.deepcopy binds it to the copy.
    block.forward = types.MethodType(_recomputed_forward, block)


def _recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `forward` of a block, whose class keeps the real one."""
    forward = functools.partial(type(self).forward, self, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, **vars(self)["_recompute_options"].for_checkpoint)


def is_recomputed(block: nn.Module) -> bool:
    """Whether `apply_recompute` made its forward run again in backward."""
    return "_recompute_options" in vars(block)


def _select(block: nn.Module) -> None:
    chosen: list[nn.Module] = [m for m in block.modules() if isinstance(m, LayerNormLinear | LayerNormMLP)]
    for attention in block.modules():
        if isinstance(attention, MultiheadAttention):
            # Their inputs, the context and the normed hidden states, are kept by attention and norm; elsewhere that is not known.
            chosen += [m for m in attention.modules() if isinstance(m, Linear)]
    for module in chosen:
        vars(module).setdefault("_recompute_given", module.recompute)
        module.recompute = True  # type: ignore[assignment]


def _undo(module: nn.Module) -> None:
    """Back to how the module was built."""
    if vars(module).pop("_recompute_options", None) is not None:
        del module.__dict__["forward"]
    given = vars(module).pop("_recompute_given", None)
    if given is not None:
        module.recompute = given


def _own_tracker(block: nn.Module) -> Callable | None:
    trackers = (getattr(m, "get_rng_state_tracker", None) for m in block.modules())
    return next((t for t in trackers if t is not None), None)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are recomputed, or gathered, one at a time: `TransformerLayer`s, or else what the outermost lists hold.

    >>> apply_recompute(model, "full", blocks=layers_of(model)[::2])
    """
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, TransformerLayer)]
    if layers:
        return layers
    held: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential) and not any(container in b.modules() for b in held):
            held += [child for child in container if any(True for _ in child.parameters())]
    return [m for m in held if not isinstance(m, nn.ModuleList | nn.ModuleDict)]  # lists have no forward
