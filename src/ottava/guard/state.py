"""The numbers that a run keeps between steps, and whether they can be true: weights, moments of the optimizer, scales.

A flipped exponent bit makes 3e36 of 0.009, and nothing fails: FP8 saturates, Adam divides, the loss is a number. No training gives such
numbers, so they are looked for: a part of the state each step, on its device, with nobody waiting ([Note: a part a step]).

[Note: a part a step] To read all weights and moments takes a few per cent of a step on a GPU. Each step looks at a sixteenth of them, or
at a few million numbers if that is more, and so at everything within sixteen steps; small models are looked at as a whole each time.
What a checkpoint would save is looked at as a whole before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.checkpoint.boxes import part_of
from ottava.checkpoint.flat import flatten
from ottava.checkpoint.placement import modules_of, placed_parameters
from ottava.checkpoint.run_state import model_state
from ottava.guard.finding import Finding
from ottava.quant.delayed import DelayedState
from ottava.quant.weight import Weight

TURNS = 16
LEAST = 2**24
"""Numbers a step, at least: [Note: a part a step]."""
REFRESH = 512
"""Steps after which the tensors are looked up anew: some 50 us of the host for each. Who moves them says so (`StateWatch.forget`)."""

LIMITS = {
    "weight": 2.0**20,
    "moment": 2.0**20,
    "squared moment": 2.0**40,
    "scale": 2.0**70,  # of a weight: 448 / amax
}
"""Largest magnitude that is plausible. (Gradients are clipped, and moments are means of them.)"""
SATURATES = 2.0**16 * 57344.0
"""A delayed scale times the largest amax that it was made from: far more than any format holds."""
VANISHES = 2.0**-60
LARGEST_AMAX = 2.0**80


class Entry(NamedTuple):
    """One tensor of a run's state: the part of it that this rank holds."""

    name: str
    layer: str
    operand: str
    """weight, moment or scale, with the tensor's own name."""
    kind: str
    """Key of LIMITS; "step" for counts, "delayed" for the state of delayed scaling, which has rules of its own."""
    box: str
    """Which part of the whole tensor it is: ranks with the same name and box hold the same numbers."""
    tensor: Tensor
    shared: bool = True
    """Whether other ranks' copies of it can be compared with it."""

    @property
    def sealed(self) -> bool:
        """Whether nothing but the optimizer changes it."""
        return self.name.startswith(("model.", "optimizer."))

    @property
    def looked_at(self) -> bool:
        """Whether its magnitude has a limit. (Bytes of FP8 have no order here.)"""
        return (
            self.kind in LIMITS
            and self.tensor.is_floating_point()
            and self.tensor.element_size() > 1
            and self.tensor.numel() > 0
        )


def entries(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Entry]:
    """All tensors of the state. All ranks have to call it together. optimizer: with None, weights and scales alone.

    >>> [e.name for e in entries(model, optimizer)][:2]
    ['model.embedding.weight', 'model.layers.0.self_attention.layernorm_qkv.layer_norm_weight']
    """
    state = model_state(model, optimizer)
    state.pop("rng", None)
    found: list[Entry] = []
    for name, leaf in flatten(state).tensors.items():
        part = part_of(name, leaf)
        layer, operand, kind = _described(name)
        for offset, view in part.views:
            found.append(
                Entry(name, layer, operand, kind, f"{offset}{tuple(view.shape)}/{part.shape}", view, part.writes)
            )
    return found + list(_copies(model))


def _copies(model: nn.Module) -> Iterator[Entry]:
    """Scales of the FP8 copies that FSDP2 gathers."""
    for placed in placed_parameters(model):
        weight = placed.local
        if not isinstance(weight, Weight) or weight.stored_quantized or not weight.memory.quantized:
            continue
        memory, (layer, _, name) = weight.memory, placed.name.rpartition(".")
        scales: list[tuple[str, str, Tensor | None]] = []
        if memory.scheme.of_tensor is not None:
            scales += [("scale", "scale", memory.group.scale), ("scale_inv", "weight", memory.group.scale_inv)]
        blocks = filter(memory.has_blocks, memory.directions)
        scales += [(f"{d}_scale_inv", "weight", memory.held_scales(d)) for d in blocks]
        for key, kind, scale in scales:
            if scale is not None and scale.numel() and scale.is_floating_point():
                yield Entry(f"copy.{placed.name}.{key}", layer, f"scale ({name}.{key})", kind, "", scale, False)


def _described(name: str) -> tuple[str, str, str]:
    """(layer, operand, key of LIMITS) of an entry of the state."""
    section, _, rest = name.partition(".")
    if section == "delayed":
        layer, _, buffer = rest.rpartition(".")
        return layer.removesuffix(".delayed"), f"scale ({buffer})", "delayed"
    if section == "optimizer":
        path, _, key = rest.removeprefix("state.").rpartition(".")
        layer, _, parameter = path.rpartition(".")
        if key == "step":
            return layer, f"step of the optimizer ({parameter})", "step"
        if key == "master_param":
            return layer, f"weight (master of {parameter})", "weight"
        return layer, f"moment ({key} of {parameter})", "squared moment" if "sq" in key else "moment"
    path, _, attribute = rest.rpartition(".")
    if attribute.endswith(("_scale_inv", "_amax")):
        layer, _, parameter = path.rpartition(".")
        return layer, f"scale ({parameter}.{attribute})", "weight"
    return path, f"weight ({attribute})", "weight"


class Limits:
    """The tensors of some entries, and how large each may be. Limits lie on the devices: to look costs a few launches.

    >>> float(Limits(entries(model, optimizer)).out_of_bounds())
    0.0
    """

    def __init__(self, chosen: list[Entry]) -> None:
        groups: dict[Any, list[Entry]] = {}
        for entry in chosen:
            if entry.looked_at:
                groups.setdefault((entry.tensor.device, entry.tensor.dtype), []).append(entry)
        # All limits are powers of two, which float32 has; tensors of other types are compared as float32 or wider.
        self._groups = [
            ([e.tensor for e in same], _sent([LIMITS[e.kind] for e in same], device))
            for (device, _), same in groups.items()
        ]

    def within(self) -> list[Tensor]:
        """Whether each is finite and plausible: bool [n] of every group. Nobody waits."""
        return [
            torch.stack(torch_private.largest_magnitudes(tensors)) <= limits  # a NaN is not below anything
            for tensors, limits in self._groups
        ]

    def out_of_bounds(self) -> Tensor:
        """How many have a number that is not finite or not plausible: float64 []. Nobody waits."""
        found = self.within()
        return how_many_fail(found, found[0].device if found else torch.device("cpu"))


def _sent(values: list[float], device: torch.device) -> Tensor:
    """float32 on `device`. From pinned memory: a copy from other memory waits until a GPU has done all that was launched."""
    numbers = torch.tensor(values, dtype=torch.float32)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def how_many_fail(passed: list[Tensor], device: torch.device) -> Tensor:
    """Of bool vectors: float64 [] on `device`."""
    if not passed:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = [flags.to(device, non_blocking=True) for flags in passed]
    return (~(torch.cat(together) if len(together) > 1 else together[0])).sum(dtype=torch.float64)


class Scales(NamedTuple):
    """The scales of delayed scaling, all at once, and whether each fits the amax that it was made from."""

    values: Tensor
    fits: Tensor

    @classmethod
    def of(cls, states: list[DelayedState]) -> Scales:
        """In the order of `names_of_scales`. Nobody waits."""
        values = torch.cat([scale for state in states for scale in (state.fwd_scale, state.bwd_scale)])
        history = torch.cat([h for s in states for h in (s.fwd_amax_history, s.bwd_amax_history)], dim=1)
        largest = history.nan_to_num(0.0, 0.0, 0.0).amax(0)  # an infinite one is that of a step which was bad itself
        reach = (
            values * largest
        )  # NaN or infinite if the scale is, also where nothing was seen yet: 0 times infinity is NaN
        return cls(values, (reach < SATURATES) & (largest < LARGEST_AMAX) & ((reach > VANISHES) | (largest == 0)))


def names_of_scales(states: Iterable[tuple[str, DelayedState]]) -> list[tuple[str, str, int]]:
    """(layer, buffer, column) of each."""
    return [
        (layer, buffer, column)
        for layer, state in states
        for buffer in ("fwd_scale", "bwd_scale")
        for column in range(getattr(state, buffer).numel())
    ]


class StateWatch:
    """Looks at a run's state, a part each step. All ranks do the same.

    >>> watch = StateWatch(model, optimizer)
    >>> bad = watch.glance()          # float64 [] on the device, to be read with the loss
    >>> watch.findings()              # everything, named; waits
    []
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._delayed = [
            (name.removesuffix(".delayed"), m) for name, m in modules_of(model) if isinstance(m, DelayedState)
        ]
        self._turn = 0
        self._parts: list[Limits] = []
        self._moments = False  # whether the optimizer's are among the parts: it makes them in its first step
        self._scales: Scales | None = None

    def forget(self) -> None:
        """Tensors may lie elsewhere now."""
        self._parts, self._turn, self._scales = [], 0, None

    def begin(self) -> None:
        """Before the passes of a step, which use the delayed scales and then make new ones: are they plausible? Nobody waits."""
        states = [state for _, state in self._delayed if state.used]
        self._scales = Scales.of(states) if states else None

    def all(self) -> list[Entry]:
        """Everything that this rank holds, looked up anew."""
        return entries(self._model, self._optimizer if self._optimizer.state else None)

    def glance(self, device: torch.device) -> Tensor:
        """How many tensors of this step's part are wrong, float64 [] on `device`. Nobody waits."""
        moments = bool(self._optimizer.state)
        if self._turn % REFRESH == 0 or not self._parts or moments != self._moments:
            self._parts, self._moments = [Limits(share) for share in _shares(self.all())], moments
        chosen = self._parts[self._turn % len(self._parts)]
        self._turn += 1
        return how_many_fail([*chosen.within(), *([] if self._scales is None else [self._scales.fits])], device)

    def findings(self) -> list[Finding]:
        """Every tensor that is wrong, with a number of it; scales as they were when the step began. Waits for the device."""
        found = []
        for entry in self.all():
            if float(Limits([entry]).out_of_bounds()):
                found.append(_finding(entry))
        if self._scales is not None:
            names = names_of_scales((layer, state) for layer, state in self._delayed if state.used)
            for (layer, buffer, column), value, fits in zip(
                names, self._scales.values.tolist(), self._scales.fits.tolist()
            ):
                if not fits:
                    found.append(
                        Finding("implausible", layer, f"scale ({buffer})", value=f"{value:g} in column {column}")
                    )
        return found


def _finding(entry: Entry) -> Finding:
    flat = entry.tensor.detach().reshape(-1).double()
    beyond = ~(flat.abs() <= LIMITS[entry.kind])
    worst = int(torch.where(beyond, flat.abs().nan_to_num(math.inf, math.inf), -1.0).argmax())
    value, count = float(flat[worst]), int(beyond.sum())
    kind = "implausible" if math.isfinite(value) else "non-finite"
    more = "" if count == 1 else f", {count} numbers"
    return Finding(kind, entry.layer, entry.operand, value=f"{value:g} at {worst}{more}")


def _shares(found: list[Entry]) -> list[list[Entry]]:
    """What is looked at in each turn: [Note: a part a step]."""
    looked_at = [entry for entry in found if entry.looked_at]
    most = max(sum(entry.tensor.numel() for entry in looked_at) / TURNS, LEAST)
    shares: list[list[Entry]] = [[]]
    size = 0
    for entry in looked_at:
        if size + entry.tensor.numel() > most and shares[-1]:
            shares.append([])
            size = 0
        shares[-1].append(entry)
        size += entry.tensor.numel()
    return shares
