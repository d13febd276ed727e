"""`check_agreement`: do all ranks have the same plan, configuration and parameters? A named difference at the start, never a hang.

Ranks that disagree would otherwise meet in collectives of different sizes, which hang or add wrong numbers.

    >>> check_agreement(None, plan, {"lr": 3e-4}, model)
    Traceback (most recent call last):
    ValueError: Rank 2 of 4 differs from the others:
      config.lr: 0.0003 on ranks 0, 1, 3; 0.003 on rank 2
    Start every rank with the same plan and config.

[Note: protocol]
Ranks talk through the process group's store (keys and values in one place) and not through collectives: a store can be
waited on for a stated time, and it does not need the ranks to agree on anything.
    1. every rank writes what it has, as JSON, then its digest;
    2. the first rank waits for all digests, compares them, reads one text for each digest that differs, and writes a verdict;
    3. the others wait for the verdict alone, so the store moves O(ranks) and not O(ranks^2) values.
A rank whose time is over looks who has not written and offers that as the verdict. The first verdict offered stands
(`compare_set`), so either all ranks pass or none does, and a rank that comes too late finds out that the others have left.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ottava.distributed.plan import ParallelPlan

MOST_DIFFERENCES = 5
"""Differences that a message shows; the others are counted."""

_MOST_TEXTS = 4  # distinct texts that are read and compared with the majority's
_VERDICT_SECONDS = 4.0  # for the first rank to compare, once all have come
_STORE_SECONDS = 3.0  # beyond both, for a store that does not answer at all


def check_agreement(
    group: dist.ProcessGroup | None,
    plan: ParallelPlan,
    config: Mapping[str, Any],
    model: nn.Module,
    timeout: float = 20.0,
) -> None:
    """Raises ValueError in every rank of `group` if any of them has another plan, configuration or parameters.

    group: None is all ranks, which is right before a mesh exists. config: nested mappings, sequences and plain values; anything
    that is meant to differ between ranks (a rank, a path of its own) has to be left out. Parameters are compared by name, shape,
    dtype, placements and order. timeout: seconds to wait for the other ranks, counted from this rank's call; an answer comes at
    most 7 s after it.

        >>> check_agreement(None, ParallelPlan(tp=2), {"lr": 3e-4}, model)
    """
    if timeout <= 0:
        raise ValueError(f"check_agreement: timeout must be a number of seconds above 0, got {timeout!r}.")
    mine = describe(plan, config, model)
    if not dist.is_available() or not dist.is_initialized():
        return
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # what new_group gives to the ranks that are not in it
        raise ValueError(
            f"check_agreement: rank {dist.get_rank()} is not in the group: call it in the group's ranks only."
        )
    if dist.get_backend(group) == "fake":  # its other ranks exist in name only
        return
    ranks = dist.get_process_group_ranks(group)
    exchange = _Exchange(group.get_group_store(), ranks, dist.get_rank(), timeout)
    problem = _within(timeout + _VERDICT_SECONDS + _STORE_SECONDS, lambda: exchange.run(mine))
    if problem:
        raise ValueError(problem)


def describe(plan: ParallelPlan, config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """What ranks have to agree on, as flat JSON values by dotted name; parameters in the model's order.

    >>> describe(ParallelPlan(), {"model": {"layers": 2}}, nn.Linear(2, 3, bias=False))
    {'plan.dp_replicate': 1, ..., 'config.model.layers': 2, 'parameter weight': 'float32 [3, 2]'}
    """
    found: dict[str, Any] = {f"plan.{name}": value for name, value in plan.as_dict().items()}
    _flatten("config", config, found)
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        placements = getattr(parameter, "placements", None)  # a DTensor's; its shape is the full one
        spread = "" if placements is None else f" {', '.join(map(str, placements))}"
        frozen = "" if parameter.requires_grad else " frozen"  # a frozen parameter takes no part in gradient reduction
        found[f"parameter {name}"] = f"{dtype} {list(parameter.shape)}{spread}{frozen}"
    return found


class _Exchange:
    """One check of one rank, see [Note: protocol]."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.store, self.ranks, self.rank, self.timeout = store, ranks, rank, timeout

    def run(self, mine: dict[str, Any]) -> str:
        """What is wrong, or "" if nothing is. The same in all ranks."""
        deadline = time.monotonic() + self.timeout
        # The n-th check of every rank meets the n-th of the others. Counted in the store, so it lives as long as the keys do.
        number = self.store.add(f"ottava/agreement/calls/{self.rank}", 1)
        self.store = dist.PrefixStore(f"ottava/agreement/{number}", self.store)
        text = json.dumps(mine)
        # Packed, because one process holds the texts of all ranks. The digest comes last: it says that the text is there.
        self.store.set(f"text/{self.rank}", base64.b64encode(zlib.compress(text.encode())).decode())
        self.store.set(f"digest/{self.rank}", hashlib.sha256(text.encode()).hexdigest())
        if self.rank == self.ranks[0]:
            arrived = self._wait([f"digest/{rank}" for rank in self.ranks], deadline)
            return self._offer(self._compare() if arrived else self._absent())
        if self._wait(["verdict"], deadline):
            return self._offer("")
        if not (absent := self._missing()) and self._wait(["verdict"], deadline + _VERDICT_SECONDS):
            return self._offer("")  # all have come, and the first rank was still comparing
        if not absent:
            return self._offer(
                f"Rank {self.ranks[0]} wrote its part and then did not answer: it is stopped or has died."
            )
        return self._offer(self._absent())

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Whether all keys are there before the deadline."""
        seconds = deadline - time.monotonic()
        if seconds > 0:
            try:
                self.store.wait(keys, timedelta(seconds=seconds))
                return True
            except RuntimeError:  # some stores raise DistStoreError, which is one, and some a plain one
                pass
        return all(self.store.check([key]) for key in keys)

    def _offer(self, verdict: str) -> str:
        """The verdict that stands: this one, or the one that was there first."""
        # "+" because a store takes an empty value for one that is not there.
        return self.store.compare_set("verdict", "", "+" + verdict).decode()[1:]

    def _text(self, rank: int) -> dict[str, Any]:
        return json.loads(zlib.decompress(base64.b64decode(self.store.get(f"text/{rank}"))))

    def _missing(self) -> list[int]:
        return [rank for rank in self.ranks if not self.store.check([f"digest/{rank}"])]

    def _absent(self) -> str:
        missing = self._missing()
        if not missing:  # the last one came in this moment: too late to be compared in time
            return f"Not all of the {len(self.ranks)} ranks reached the check of plan and parameters within {self.timeout:g} s."
        return (
            f"{_ranks(missing).capitalize()} of {len(self.ranks)} did not reach the check of plan and parameters within "
            f"{self.timeout:g} s of rank {self.rank}: "
            "look for an earlier error there, or for a rank that was not started; give a longer timeout if it is only slow."
        )

    def _compare(self) -> str:
        """The differences, told from the side of the larger number of ranks; of the first rank's side if there is none."""
        by_digest: dict[bytes, list[int]] = {}
        for rank in self.ranks:
            by_digest.setdefault(self.store.get(f"digest/{rank}"), []).append(rank)
        if len(by_digest) == 1:
            return ""
        sides = sorted(by_digest.values(), key=lambda side: -len(side))  # stable: equal sides stay in order of rank
        texts = [(side, self._text(side[0])) for side in sides[: _MOST_TEXTS + 1]]
        lines = _differences(texts)
        unread = [rank for side in sides[_MOST_TEXTS + 1 :] for rank in side]
        odd = sorted(rank for side in sides[1:] for rank in side)
        verb = "differs" if len(odd) == 1 else "differ"
        told = [f"{_ranks(odd).capitalize()} of {len(self.ranks)} {verb} from the others:", *lines[:MOST_DIFFERENCES]]
        if len(lines) > MOST_DIFFERENCES:
            told.append(f"and {len(lines) - MOST_DIFFERENCES} more differences")
        if unread:
            told.append(f"and other differences on {_ranks(unread)}")
        return "\n  ".join(told) + "\nStart every rank with the same plan and config."


def _differences(sides: list[tuple[list[int], dict[str, Any]]]) -> list[str]:
    """One line a name on which the sides differ: `name: value on ranks ...; value on ranks ...`."""
    names = dict.fromkeys(name for _, values in sides for name in values)
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for ranks, values in sides:
            holders.setdefault(json.dumps(values[name]) if name in values else "missing", []).extend(ranks)
        if len(holders) > 1:
            told = (f"{value} on {_ranks(sorted(ranks))}" for value, ranks in holders.items())
            lines.append(f"{name}: {'; '.join(told)}")
    return lines or _order(sides)


def _order(sides: list[tuple[list[int], dict[str, Any]]]) -> list[str]:
    """For sides with the same names and values: where their order parts. Ranks run collectives in the order of parameters."""
    (ours, first), lines = sides[0], []
    for theirs, values in sides[1:]:
        a, b = next((a, b) for a, b in zip(first, values) if a != b)
        lines.append(f"order of parameters: {a!r} comes first on {_ranks(ours)}; {b!r} on {_ranks(theirs)}")
    return lines


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    """ "rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1016 more"."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:most])) + more


def _flatten(name: str, value: Any, found: dict[str, Any]) -> None:
    """Writes `value` into `found` under dotted names. Mappings are sorted: their order is no difference."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        for key in sorted(value, key=str):
            _flatten(f"{name}.{key}", value[key], found)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            _flatten(f"{name}.{index}", item, found)
    else:
        found[name] = _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return []  # empty
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return str(value)
    # str() of other objects may hold an address, which differs between ranks that agree.
    raise ValueError(
        f"check_agreement: {name} is a {type(value).__name__}, which ranks cannot compare: "
        "give numbers, strings, dtypes, paths, enums, and mappings, sequences or dataclasses of them."
    )


def _within(seconds: float, function: Callable[[], str]) -> str:
    """`function()`, or a problem to report if it takes longer.

    A store's own timeout does not cover a server that is there and silent (a stopped rank 0 that hosts it), so the exchange
    runs in a thread that can be left behind.
    """
    answers: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ottava-agreement", daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    if errors and not isinstance(errors[0], RuntimeError):  # a store's errors are RuntimeErrors; this one is ours
        raise errors[0]
    told = f"it answered: {errors[0]}" if errors else f"it did not answer in {seconds:g} s"
    return f"The process group's store, in the process that started it (mostly rank 0), is gone or stopped: {told}."
