"""What can go wrong with a checkpoint, as exceptions and as values that ranks can send to each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ottava.exchange import travels


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises the same one.

    >>> try:
    ...     checkpoints.save(100, state)
    ... except CheckpointError as error:
    ...     print(error)        # step 100 was not saved: rank 1, __1_0.distcp: No space left on device
    """


class RankLost(CheckpointError):
    """A rank died or did not answer: what the others do together is over."""


class InvalidCheckpoint(CheckpointError):
    """A file of a checkpoint is not what it has to be. The message begins with the file's name."""

    @classmethod
    def of(cls, file: str, reason: str) -> InvalidCheckpoint:
        """`file`: name inside the checkpoint's directory."""
        return cls(f"{shown(file)}: {reason}")


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints and none of them can be used; or the one that was asked for cannot. `rejected` says why, each."""

    rejected: tuple[Rejected, ...] = ()

    @classmethod
    def of(cls, where: str, rejected: Sequence[Rejected]) -> NoUsableCheckpoint:
        """`where`: the directory that was searched."""
        lines = "".join(f"\n  {r.path}: {r.reason}" for r in rejected)
        error = cls(f"No usable checkpoint in {where}:{lines or ' there is none.'}")
        error.rejected = tuple(rejected)
        return error


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was looked at and not used."""

    path: str
    reason: str


@travels
@dataclass(frozen=True)
class Failure:
    """Why a rank could not do its part."""

    rank: int | None
    """None where it is no rank's own: what they say together does not fit, or they all say the same."""
    file: str
    """Name of the file it worked on; empty where it was none."""
    reason: str
    mistake: bool = False
    """Whether the caller's arguments are to blame: a ValueError then."""

    @classmethod
    def of(cls, rank: int | None, error: BaseException) -> Failure:
        """The reason of an `OSError` is the system's text, without the path, of which `file` is the last part."""
        if isinstance(error, OSError) and error.strerror:
            return cls(rank, os.path.basename(os.fsdecode(error.filename or "")), error.strerror)
        return cls(rank, "", str(error) or type(error).__name__, isinstance(error, ValueError))

    def __str__(self) -> str:
        where = ", ".join([*([] if self.rank is None else [f"rank {self.rank}"]), *([self.file] if self.file else [])])
        return f"{where}: {self.reason}" if where else self.reason


def joined(failures: Sequence[Failure], ranks: int, most: int = 8) -> str:
    """The first `most` failures as text, and how many more there are. What all ranks say is said once."""
    if len(failures) == ranks and len({(f.file, f.reason) for f in failures}) == 1:
        failures = [replace(failures[0], rank=None)]
    more = f"; and {len(failures) - most} more" if len(failures) > most else ""
    return "; ".join(str(f) for f in failures[:most]) + more


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first `most` names as text, and how many more there are. Names may come from a stranger's file: shortened, escaped."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(n) for n in names[:most]) + more


def shown(name: str, most: int = 120) -> str:
    """A name from a file as one printable line."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= most else text[:most] + "..."
