"""Arguments that several modules take and check the same way."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ottava.notices import warn_once

RECOMPUTE_CHOICES = ("none", "selective")


def pick(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of a constructor's arguments that a part inside takes by the same names."""
    return {name: given[name] for name in names}


def part_name(name: str | None, part: str) -> str | None:
    """The name of a part inside of a module called `name`, if that has one."""
    return None if name is None else f"{name}.{part}"


def check_recompute(recompute: str) -> bool:
    """True for "selective"."""
    if recompute not in RECOMPUTE_CHOICES:
        raise ValueError(f"recompute must be one of {RECOMPUTE_CHOICES}, got {recompute!r}.")
    return recompute == "selective"


def normalize_split(split: dict[str, int] | tuple[str, ...] | list[str] | None, rows: int) -> dict[str, int] | None:
    """`parameters_split` as {name: rows}: given so, or as names that share the rows evenly."""
    if split is None:
        return None
    if not isinstance(split, dict):
        names = list(split)
        if not names or rows % len(names):
            raise ValueError(
                f"parameters_split={tuple(split)!r} must divide {rows} output features evenly; give a dict of sizes instead."
            )
        split = dict.fromkeys(names, rows // len(names))
    if sum(split.values()) != rows:
        raise ValueError(
            f"parameters_split={split!r} must add up to {rows} output features, adds up to {sum(split.values())}."
        )
    return split


def split_names(split: dict[str, int] | None, kind: str) -> dict[str, int] | None:
    """Names of the parameters that a `parameters_split` asks for: "query" or "query_" is `query_weight`."""
    return None if split is None else {f"{part.removesuffix('_')}_{kind}": rows for part, rows in split.items()}


def refuse_delayed_wgrad(delay_wgrad_compute: bool) -> None:
    """TransformerEngine's split backward (`backward_dw`) is for pipeline schedules, which Ottava does not have yet."""
    if delay_wgrad_compute:
        raise ValueError("delay_wgrad_compute=True is not offered: weight gradients are computed in the backward pass.")


def tell_of_rng_tracker(module: str, rng_tracker_name: str | None) -> None:
    """Says that TransformerEngine's choice of a random stream for initial weights chooses nothing."""
    if rng_tracker_name is not None:
        warn_once(
            f"ottava: {module}: rng_tracker_name={rng_tracker_name!r} has no effect: initial weights follow from the seed and a module's "
            "place in the model, on any number of ranks."
        )


@dataclass
class ParallelOptions:
    """Tensor-parallel arguments of a module, checked."""

    group: Any
    size: int
    """Ranks that the parameters were cut for when the module was constructed. 1: they are whole, until a mesh cuts them."""
    sequence_parallel: bool
    mode: str | None
    get_rng_state_tracker: Any

    def __post_init__(self) -> None:
        if self.mode not in (None, "column", "row"):
            raise ValueError(f"parallel_mode must be None, 'column' or 'row', got {self.mode!r}.")
        if self.group is not None:
            self.size = self.group.size()
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"tp_size must be a number of ranks, 1 or more, got {self.size!r}.")
        if self.sequence_parallel and self.size > 1 and self.mode is None:
            raise ValueError("sequence_parallel=True needs parallel_mode 'column' or 'row'.")

    def __deepcopy__(self, memo: Any) -> ParallelOptions:
        return copy.copy(self)  # the group is a handle of this process: a copy talks to the same ranks


@dataclass(frozen=True)
class OverlapOptions:
    """Which collective may hide under which GEMM: TransformerEngine's userbuffers switches, or one method for all of them.

    They change the schedule, never a value. `ottava.overlap.schedule` says what each of them hides; one that cannot act says so once.
    """

    overlap_all_gather: bool = False
    """Of a column's input under its product, of a row's gradient under dgrad."""
    overlap_reduce_scatter: bool = False
    """Of a row's output under its product."""
    overlap_reduce_scatter_dgrad: bool = False
    """Of a column's input gradient under dgrad."""
    bulk_dgrad: bool = False
    """The gather of a column's input for wgrad, under dgrad."""
    bulk_wgrad: bool = False
    """The sum of a column's input gradient, under wgrad."""
    name: str | None = None
    symmetric_all_reduce: str | None = None
    method: str | None = None
    """ "none", "bulk", "ring", "pipeline" or "auto" for the whole module, as a plan gives it; None: the switches above."""
    transport: str = "auto"
    minimum_tokens: int | None = None
    """Tokens below which no product is cut into chunks; None: an estimate decides."""


NO_OVERLAP = OverlapOptions()


def check_norm(normalization: str) -> str:
    """`normalization` if it names a norm."""
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {normalization!r}.")
    return normalization
