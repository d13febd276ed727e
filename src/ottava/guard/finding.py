"""`Finding`: one thing that is wrong with the numbers of a run, as events and people are told of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

KINDS = {
    "non-finite": "is not finite",
    "implausible": "is not plausible",
    "memory": "changed in memory",
    "replay": "came out differently when it was computed again",
    "replicas": "differs between ranks that must hold the same",
}
"""What can be wrong, in words."""


@dataclass(frozen=True)
class Finding:
    """A tensor that is wrong, and where.

    >>> Finding("non-finite", "layers.1.layernorm_mlp", "fc2.input", rank=1, step=40, direction="forward", value="inf").text
    'fc2.input of layers.1.layernorm_mlp is not finite (inf) in the forward pass of rank 1, step 40'
    """

    kind: str
    """One of KINDS."""
    layer: str
    """The module, by its name in one process."""
    operand: str
    """What of it: input, weight, gradient, moment, scale; with the stage or the tensor's own name where there are several."""
    rank: int | None = None
    """None: it could not be told which."""
    step: int = 0
    """From 1, as in metrics.jsonl."""
    direction: str = ""
    """forward, backward; empty for state, which is there between passes."""
    value: str = ""
    """The number, or how many there are."""
    detail: str = ""
    """What else is known: transient or persistent, and what that was judged by."""
    order: int = 0
    """Of two findings of one step, the one with the lower number came first."""

    @property
    def state(self) -> bool:
        """Whether the run's state itself is wrong: to skip the step would not help."""
        return self.direction == ""

    @property
    def short(self) -> str:
        """Tensor and place, for a line of metrics."""
        rank = "a rank that cannot be told" if self.rank is None else f"rank {self.rank}"
        passed = f", {self.direction}" if self.direction else ""
        return f"{self.operand} of {self.layer}, {rank}{passed}"

    @property
    def text(self) -> str:
        """A sentence without its full stop."""
        value = f" ({self.value})" if self.value else ""
        passed = f" in the {self.direction} pass" if self.direction else ""
        rank = "; which rank is wrong cannot be told" if self.rank is None else f" of rank {self.rank}"
        rank = f" in rank {self.rank}" if self.rank is not None and not self.direction else rank
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.operand} of {self.layer} {KINDS[self.kind]}{value}{passed}{rank}, step {self.step}{detail}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """What `as_json` gave; keys of later versions are left out."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def at(self, step: int, rank: int) -> Finding:
        """The same, of this step and rank."""
        return replace(self, step=step, rank=rank)


def first(findings: Iterable[Finding]) -> Finding | None:
    """The one that came first. State comes before passes: what is read from it follows from it."""
    return min(findings, key=lambda f: (not f.state, f.order, -1 if f.rank is None else f.rank), default=None)
