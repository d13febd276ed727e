"""`Schedule`: which method hides which collective of a stage. Plain data, equal on all ranks.

    collective                                  under                 methods
    gather          x of a column in forward    its own product       ring, pipeline
                    dY of a row in backward     dgrad                 ring, pipeline
    scatter         y of a row in forward       its own product       pipeline
    scatter_dgrad   dX of a column              dgrad, or wgrad       pipeline, bulk
    gather_wgrad    x of a column, or the       dgrad                 bulk
                    columnwise dY of a row

"none" waits for a collective where it stands; "auto" leaves the method to `ottava.overlap.cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ottava.notices import did_you_mean

METHODS = ("none", "bulk", "ring", "pipeline", "auto")
"""What a plan may ask for."""
TRANSPORTS = ("auto", "point_to_point", "symmetric_memory")
SPLITS = 4
"""Pieces that a pipeline cuts the tokens of other ranks into, all together; at least one a rank."""

_CHOICES = {
    "gather": ("none", "ring", "pipeline", "auto"),
    "scatter": ("none", "pipeline", "auto"),
    "scatter_dgrad": ("none", "bulk", "pipeline", "auto"),
    "gather_wgrad": ("none", "bulk"),
    "transport": TRANSPORTS,
}


@dataclass(frozen=True)
class Schedule:
    """The methods of one stage, and what carries them.

    >>> Schedule.of("ring").gather
    'ring'
    """

    gather: str = "none"
    scatter: str = "none"
    scatter_dgrad: str = "none"
    gather_wgrad: str = "none"
    transport: str = "auto"
    """What moves the bytes: "point_to_point" over the process group, "symmetric_memory" (CUDA), or "auto": the best there is."""
    splits: int = SPLITS
    minimum_tokens: int | None = None
    """Tokens of all ranks below which nothing is cut into chunks. None: the cost model decides; 0: always cut."""
    requested: tuple[str, ...] = ()
    """Names of what a user asked for by hand: a warning says it when it cannot act. Empty: "auto" and "none" ask for nothing."""

    def __post_init__(self) -> None:
        for field, known in _CHOICES.items():
            check_choice("Schedule", field, getattr(self, field), known)
        if not isinstance(self.splits, int) or self.splits < 1:
            raise ValueError(f"Schedule: splits must be a number of pieces, 1 or more, got {self.splits!r}.")

    @property
    def active(self) -> bool:
        """Whether anything may be hidden."""
        return any(getattr(self, field) != "none" for field in ("gather", "scatter", "scatter_dgrad", "gather_wgrad"))

    @staticmethod
    def of(method: str, transport: str = "auto", minimum_tokens: int | None = None, splits: int = SPLITS) -> Schedule:
        """What a plan's `overlap` means.

        "ring" is TransformerEngine's default: all-gathers by ring exchange, sums after forward products in a pipeline, the rest in bulk.
        """
        check_choice("Schedule.of", "method", method, METHODS)
        gather, scatter, scatter_dgrad, gather_wgrad = _MEANINGS[method]
        asked = () if method in ("none", "auto") else (f'overlap="{method}"',)
        return Schedule(gather, scatter, scatter_dgrad, gather_wgrad, transport, splits, minimum_tokens, asked)


def default_method(size: int, spreads_tokens: bool) -> str:
    """The method of a mesh for which nobody has measured any: what `ottava plan` writes. size: tensor-parallel ranks.

    "bulk" where tokens are spread: it cuts no product, so it can lose nothing. The others gain more where chunks of products keep their
    rate, which `ottava bench overlap` shows.

    >>> default_method(8, spreads_tokens=True), default_method(8, spreads_tokens=False)
    ('bulk', 'none')
    """
    return "bulk" if size > 1 and spreads_tokens else "none"


_MEANINGS = {
    "none": ("none", "none", "none", "none"),
    "bulk": ("none", "none", "bulk", "bulk"),
    "ring": ("ring", "pipeline", "bulk", "bulk"),
    "pipeline": ("pipeline", "pipeline", "pipeline", "bulk"),
    "auto": ("auto", "auto", "auto", "bulk"),
}


def check_choice(what: str, field: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `known`."""
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{what}: {field} must be one of {names}, got {value!r}.{did_you_mean(value, known)}")
