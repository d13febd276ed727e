"""Delayed scaling: the amax history and scale of every quantized tensor of a module, and the two places that update them.

The forward state is updated when the outermost `autocast` exits, the backward state when a backward pass ends. Both updates reduce
the recorded amax over ranks in one batch. `record_amax_` is the only thing that writes in between: it raises row 0.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.notices import leads, warn_once
from ottava.quant.scaling import delayed_scale, delayed_update, roll_history
from ottava.quant.state import CURRENT, autocast
from ottava.recipe import DelayedScaling

HISTORY_ROWS = 1024  # DelayedScaling's default window; a shorter window uses the first rows
BUFFERS = ("fwd_scale", "fwd_amax_history", "bwd_scale", "bwd_amax_history", "previous_fwd_scale")
FORWARD_COLUMNS, BACKWARD_COLUMNS = 3, 2  # a stage: (input, weight, output), (grad output, grad input)

_BY_ID: weakref.WeakValueDictionary[int, DelayedState] = weakref.WeakValueDictionary()
_PENDING: dict[int, list[DelayedState]] = defaultdict(list)  # backward pass -> states it has recorded into


class Groups(tuple):
    """Process groups that a state is shared over. Handles of this process: a copy has the same ones, a pickle has none.

    >>> copy.deepcopy(Groups((group,)))[0] is group, pickle.loads(pickle.dumps(Groups((group,))))
    (True, ())
    """

    partial = False
    """Whether ranks that run the module too may be missing: a tensor-parallel group alone does not know of data-parallel ranks."""

    def __deepcopy__(self, memo: Any) -> Groups:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Groups, ()


class RecordedUpdate(NamedTuple):
    """The update of several states as one launch (`ottava.graphs`), good while they have these recipes."""

    states: list[DelayedState]
    recipes: list[DelayedScaling | None]
    replay: Callable[[], Any]

    def serves(self, states: list[DelayedState]) -> bool:
        """Whether these are the states, with the recipes that were recorded."""
        return states == self.states and [state.recipe for state in states] == self.recipes


class ScalingView:
    """What TransformerEngine calls `fp8_meta["scaling_fwd"]`: the live scale and amax history."""

    def __init__(self, scale: Tensor, amax_history: Tensor) -> None:
        self.scale = scale
        self.amax_history = amax_history

    @property
    def scale_inv(self) -> Tensor:
        """1 / scale."""
        return torch.ones_like(self.scale) / self.scale


class DelayedState(nn.Module):
    """Registered buffers of fixed shape for `stages` quantized GEMMs.

    fwd_scale [3 * stages], fwd_amax_history [rows, 3 * stages]; bwd_* the same with 2 columns a stage. They are always in the state dict,
    so that a fresh model says what it wants to load. A state dict without them loads all the same: the state then starts fresh.
    """

    fwd_scale: Tensor
    fwd_amax_history: Tensor
    bwd_scale: Tensor
    bwd_amax_history: Tensor
    previous_fwd_scale: Tensor
    recorded: bool = False
    """Whether a forward pass has recorded into it since the last update."""
    own_groups = Groups()
    """Ranks that run the module, as it was told itself: of `weight_mesh`, of the mesh of `tp_mesh`, or of a tensor-parallel group."""

    def __init__(self, stages: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.stages = stages
        forward, backward = FORWARD_COLUMNS * stages, BACKWARD_COLUMNS * stages
        # float32 by name: who loads a model in bf16 has set torch's default dtype to that.
        kind: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.register_buffer("fwd_scale", torch.ones(forward, **kind))
        self.register_buffer("fwd_amax_history", torch.zeros(HISTORY_ROWS, forward, **kind))
        self.register_buffer("bwd_scale", torch.ones(backward, **kind))
        self.register_buffer("bwd_amax_history", torch.zeros(HISTORY_ROWS, backward, **kind))
        # The scale that the last recorded forward used, for a recomputation that runs after the update.
        self.register_buffer("previous_fwd_scale", torch.ones(forward, **kind), persistent=False)
        self.used = False
        self.recipe: DelayedScaling | None = None
        self.group: Any = None
        """What the last `autocast` was given as amax_reduction_group."""
        self.data_groups: tuple[Any, ...] = ()
        """All ranks that run the module, as what wrapped the model knows them: amax is reduced over these, one after the other."""
        self.recorded_updates: dict[bool, RecordedUpdate] = {}
        """Of forward (True) and backward, where this state is the first of several that are updated by one launch."""
        self.id = _next_id()
        _BY_ID[self.id] = self

    def __getstate__(self) -> dict[str, Any]:
        # Process groups are handles of this process. The next forward sets `group` again; who copies a model wraps it anew.
        return {**self.__dict__, "group": None, "data_groups": (), "recorded": False, "recorded_updates": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.recorded_updates = {}
        self.id = _next_id()  # a copy is another state
        _BY_ID[self.id] = self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves with the module, but stays float32: `.bfloat16()` and `.half()` are about weights, not statistics."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move, recurse)

    def reset_parameters(self) -> None:
        """`reset`, by the name that FSDP calls on every module whose tensors it has moved off the meta device."""
        self.reset()

    def forget_this_step(self) -> None:
        """Drops what the forward pass has recorded since the last update."""
        self.recorded = False
        self.fwd_amax_history[0].zero_()

    def is_fresh(self) -> bool:
        """Whether nothing was ever recorded here."""
        histories = self.fwd_amax_history, self.bwd_amax_history
        scales = self.fwd_scale, self.bwd_scale
        if self.fwd_scale.is_meta:  # without memory there is nothing that was used
            return True
        return not (any(bool(h.any()) for h in histories) or any(bool((s != 1).any()) for s in scales))

    def reset(self) -> None:
        """Back to the start: scales 1, histories 0."""
        for scale in (self.fwd_scale, self.bwd_scale, self.previous_fwd_scale):
            scale.fill_(1.0)
        for history in (self.fwd_amax_history, self.bwd_amax_history):
            history.zero_()

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return f"columns={FORWARD_COLUMNS * self.stages}+{BACKWARD_COLUMNS * self.stages}, used={self.used}"

    def view(self, which: str) -> ScalingView:
        """ "scaling_fwd" or "scaling_bwd": scale and the rows of the history that the recipe uses."""
        window = self.recipe.amax_history_len if self.recipe is not None else None
        if which == "scaling_fwd":
            return ScalingView(self.fwd_scale, self.fwd_amax_history[:window])
        return ScalingView(self.bwd_scale, self.bwd_amax_history[:window])

    def mark_for_update(self, recipe: DelayedScaling, group: Any, compiling: bool) -> None:
        """Called by a forward that records: the state will be updated when the outermost `autocast` exits.

        compiling: a compiler traces now.
        """
        rows = self._buffers["fwd_amax_history"].shape[0]  # type: ignore[union-attr]
        if self.recipe is not recipe or rows < recipe.amax_history_len:
            self._fit(recipe.amax_history_len)
        # Only what changes: a module's `__setattr__` takes longer than a launch.
        if self.recipe is not recipe:
            self.recipe = recipe
        if self.group is not group:
            self.group = group
        if not self.used:
            self.used = True
        if not compiling:
            self.__dict__["recorded"] = True  # changes in every forward; what compilers cannot trace
        elif not self.recorded:
            self.recorded = True
        if CURRENT.depth == 0 and not compiling:  # a reentrant checkpoint: no `autocast` will exit
            torch_private.at_end_of_backward(lambda: update_forward([self]))
        else:
            CURRENT.touched.append(self)

    def _fit(self, window: int) -> None:
        """Makes room for a longer window; rows that a shorter one left behind are forgotten."""
        if self.recipe is not None and self.recipe.amax_history_len < window:
            self.fwd_amax_history[self.recipe.amax_history_len : window].zero_()
            self.bwd_amax_history[self.recipe.amax_history_len : window].zero_()
        rows = self._buffers["fwd_amax_history"].shape[0]  # type: ignore[union-attr]
        if window <= rows:
            return
        if torch.compiler.is_compiling():
            raise ValueError(
                f"amax_history_len={window} is longer than the {rows} rows that were allocated: run one step without torch.compile first."
            )
        for name in ("fwd_amax_history", "bwd_amax_history"):
            history = getattr(self, name)
            setattr(self, name, torch.cat([history, history.new_zeros(window - rows, history.shape[1])]))

    def scale_of_first_forward(self) -> Tensor:
        """The forward scale that a recomputation must use: that of before the update, if there has been one since."""
        return self.fwd_scale if self.recorded else self.previous_fwd_scale

    # ---------------------------------------------------------------------------------------------------- saving, loading

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        present = [name for name in BUFFERS if prefix + name in state_dict]
        if not present:
            return
        for name in present:
            loaded, own = state_dict[prefix + name], getattr(self, name)
            if loaded.dim() == own.dim() == 2 and loaded.shape[0] != own.shape[0] and loaded.shape[1] == own.shape[1]:
                setattr(self, name, own.new_zeros(loaded.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.used = not self.is_fresh()


_LAST_ID = [0]


def _next_id() -> int:
    _LAST_ID[0] += 1
    return _LAST_ID[0]


# ------------------------------------------------------------------------------------------------------------------ update


def update_forward(states: list[DelayedState]) -> None:
    """Reduces what the forward pass recorded and computes the next scales."""
    for state in states:
        state.__dict__["recorded"] = False  # past a module's `__setattr__`, which takes longer than a launch
    _update(_unique(states), forward=True)


def schedule_backward_update(owner: int) -> None:
    """Queues the update of the state with this id at the end of the backward pass that runs now."""
    state = _BY_ID.get(owner)
    if state is not None:
        replayed_backward([state])


def replayed_backward(states: list[DelayedState]) -> None:
    """The backward pass that runs now has raised row 0 of these states: they are updated at its end, once."""
    if _COLLECTED:
        _COLLECTED[-1].extend(states)
        return
    task = torch_private.backward_id()
    if task == -1:  # called outside of a backward pass, as by a test of the op alone
        return
    if task not in _PENDING:
        torch_private.at_end_of_backward(lambda: _update(_unique(_PENDING.pop(task, [])), forward=False))
    _PENDING[task].extend(states)


_COLLECTED: list[list[DelayedState]] = []  # not of a thread: CUDA's backward passes run in threads of autograd


@contextmanager
def collecting_forward() -> Iterator[list[DelayedState]]:
    """Forwards in here record, and leave their states in the list instead of to the `autocast` around: `replayed_forward` takes it."""
    outside, CURRENT.touched = CURRENT.touched, []
    try:
        yield CURRENT.touched
    finally:
        CURRENT.touched = outside


@contextmanager
def collecting_backward() -> Iterator[list[DelayedState]]:
    """The same for backward passes: `schedule_backward_update` takes the ids of the states."""
    _COLLECTED.append([])
    try:
        yield _COLLECTED[-1]
    finally:
        _COLLECTED.pop()


def replayed_forward(states: list[DelayedState]) -> None:
    """A replay has raised row 0 of these states: they are updated as after a forward, once, when the outermost `autocast` exits."""
    for state in states:
        flags = state.__dict__  # past a module's `__setattr__`, which takes longer than a launch
        flags["used"] = flags["recorded"] = True
    CURRENT.touched.extend(states)
    if CURRENT.depth == 0:
        with autocast(recipe=states[0].recipe, amax_reduction_group=states[0].group):
            pass  # the outermost one


def _unique(states: list[DelayedState]) -> list[DelayedState]:
    return list({id(s): s for s in states}.values())


def _update(states: list[DelayedState], forward: bool) -> None:
    if torch.is_grad_enabled():  # not in a backward pass
        with torch.no_grad():
            _update(states, forward)
    else:
        _reduce_amax([s for s in states if s.recipe is not None and s.recipe.reduce_amax], forward)
        at, own = 0, []
        while at < len(states):
            recorded = states[at].recorded_updates.get(forward)
            if recorded is not None and recorded.serves(states[at : at + len(recorded.states)]):
                recorded.replay()
                at += len(recorded.states)
            else:
                own.append(states[at])
                at += 1
        _step(own, forward)


def updates_without_the_host(states: list[DelayedState]) -> bool:
    """Whether the update of these states can be recorded: a user's own functions may do anything."""
    recipes = [state.recipe for state in states]
    return bool(states) and not any(
        r is None or callable(r.amax_compute_algo) or r.scaling_factor_compute_algo is not None for r in recipes
    )


def step_states(states: list[DelayedState], forward: bool) -> tuple[()]:
    """What is recorded of an update: the next scales, from what was recorded and reduced over ranks."""
    with torch.no_grad():
        _step(states, forward)
    return ()


def _reduce_amax(states: list[DelayedState], forward: bool) -> None:
    """MAX over each group, one collective a group for all its states."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for state in states:
        groups = tuple(group for group in _groups_of(state) if torch.distributed.get_world_size(group) > 1)
        if groups:
            by_groups[groups].append((state.fwd_amax_history if forward else state.bwd_amax_history)[0])
    for groups, rows in by_groups.items():
        flat = torch.cat(rows)
        for group in groups:  # a MAX over rows and then over columns of a mesh is the MAX over the mesh
            torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
        for row, reduced in zip(rows, flat.split([r.numel() for r in rows]), strict=True):
            row.copy_(reduced)


def _groups_of(state: DelayedState) -> tuple[Any, ...]:
    """Who shares the state: as `autocast` says, as the wrapper says, as the module says; else, guessed, all ranks."""
    if state.group is not None:
        return (state.group,)
    if state.data_groups:
        return state.data_groups
    ranks, own = torch.distributed.get_world_size(), state.own_groups
    told = leads() and not torch.compiler.is_compiling()
    if own:
        if told and own.partial and own[0].size() < ranks:
            warn_once(
                f"ottava: DelayedScaling shares its statistics over the {own[0].size()} tensor-parallel ranks of a module alone: nothing "
                f"says which others of the {ranks} ranks run it. Pass amax_reduction_group to autocast for the same scales on all of them."
            )
        return tuple(own)
    if told and ranks > 1:
        warn_once(
            f"ottava: DelayedScaling shares its statistics over all {ranks} ranks, a guess: neither autocast (amax_reduction_group) nor "
            "the modules say which ranks run them. Right for data parallelism; with pipeline stages or experts, pass amax_reduction_group."
        )
    return (torch.distributed.group.WORLD,)


def _step(states: list[DelayedState], forward: bool) -> None:
    """The next scales of each: in one launch for neighbours of one recipe on one device (one by one where a compiler traces: not every
    version of it takes ops that write into lists)."""
    compiling = torch.compiler.is_compiling()
    first = 0
    while first < len(states):
        end = first + 1
        while not compiling and end < len(states) and _are_alike(states[first], states[end]):
            end += 1
        _step_alike(states[first:end], forward)
        first = end


def _are_alike(one: DelayedState, other: DelayedState) -> bool:
    here, there = one._buffers["fwd_scale"], other._buffers["fwd_scale"]
    return one.recipe is other.recipe and here.device == there.device  # type: ignore[union-attr]


def _step_alike(states: list[DelayedState], forward: bool) -> None:
    recipe = states[0].recipe
    assert recipe is not None
    live: list[Any] = [state._buffers for state in states]  # past `__getattr__`, which is Python
    histories = [one["fwd_amax_history" if forward else "bwd_amax_history"] for one in live]
    scales = [one["fwd_scale" if forward else "bwd_scale"] for one in live]
    previous = [one["previous_fwd_scale"] for one in live] if forward else []
    fp8_max = recipe.fp8_format.value.max_fwd if forward else recipe.fp8_format.value.max_bwd
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        for number, (history, scale) in enumerate(zip(histories, scales, strict=True)):
            _custom_step(recipe, history, scale, previous[number] if forward else None, fp8_max)
        return
    settings = (recipe.amax_history_len, fp8_max, recipe.margin, recipe.amax_compute_algo == "most_recent")
    if len(states) == 1:
        kept = previous[0] if forward else None
        torch.ops.ottava.delayed_update_(histories[0], scales[0], kept, *settings)
    else:
        torch.ops.ottava.delayed_updates_(histories, scales, previous, *settings)


def _custom_step(
    recipe: DelayedScaling, history: Tensor, scale: Tensor, previous: Tensor | None, fp8_max: float
) -> None:
    """The user's own functions in place of the built-in rules."""
    if previous is not None:
        previous.copy_(scale)
    used = history[: recipe.amax_history_len]
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(used)
    else:
        amax = used[0] if recipe.amax_compute_algo == "most_recent" else used.amax(dim=0)
    if recipe.scaling_factor_compute_algo is not None:
        limit = torch.full_like(scale, fp8_max)
        fresh = recipe.scaling_factor_compute_algo(amax, scale.clone(), limit, recipe)
    else:
        fresh = delayed_scale(amax, scale, fp8_max, recipe.margin)
    scale.copy_(fresh)
    history.copy_(roll_history(history, recipe.amax_history_len))


__all__ = ["DelayedState", "ScalingView", "delayed_update", "schedule_backward_update", "update_forward"]
