"""`Team`: the ranks that save and load together. What fails in one of them is raised in all, once, by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ottava import exchange
from ottava.checkpoint.errors import CheckpointError, Failure, RankLost, joined

Part = TypeVar("Part")


class Team:
    """All ranks of the default process group, over a gloo group of their own; one process where there is no group.

    timeout: seconds that a rank waits for the others in one step. A rank that died is noticed at once, one that hangs then.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self._group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def attempt(self, what: str, work: Callable[[], Part]) -> tuple[Part | None, list[Failure]]:
        """`work()` in every rank: this rank's result, and the failures of all ranks."""
        part = self._work(work, self.rank)
        failures = [f for f in self._gather(what, part if isinstance(part, Failure) else None) if f is not None]
        failures = self._broadcast(what, failures)
        return (None if isinstance(part, Failure) else part), failures

    def agree(
        self, what: str, work: Callable[[], Part], combine: Callable[[list[Part]], Any], scatter: bool = False
    ) -> Any:
        """`work()` in every rank, then `combine` of all results in rank 0: what it returns is returned in every rank.

        scatter: `combine` returns a list, and each rank gets its own element. Any exception in any rank becomes one in all:
        ValueError where it is the caller's mistake, CheckpointError otherwise; its message begins with `what`.
        """
        parts = self._gather(what, self._work(lambda: self._sendable(work()), self.rank))
        verdicts: list[Any] = []  # (passed, result or failures): one for each rank with scatter, else one
        if self.rank == 0:
            failures = [p for p in parts if isinstance(p, Failure)]
            combined: Any = None if failures else self._work(lambda: self._sendable(combine(parts)), rank=None)
            if isinstance(combined, Failure):
                failures = [combined]
            if failures:
                verdicts = [(False, failures)] * self.size
            else:
                verdicts = [(True, c) for c in combined] if scatter else [(True, combined)]
        answer = self._scatter(what, verdicts) if scatter else self._broadcast(what, verdicts[0] if verdicts else None)
        passed, verdict = answer
        if not passed:
            kind = ValueError if any(f.mistake for f in verdict) else CheckpointError
            raise kind(f"{what}: {joined(verdict, self.size)}")
        return verdict

    def _work(self, work: Callable[[], Any], rank: int | None) -> Any:
        """What `work` returns; what it raises, as the Failure of `rank`."""
        try:
            return work()
        except Exception as error:
            return Failure.of(rank, error)

    def _sendable(self, value: Part) -> Part:
        """`value`. What cannot be sent fails here, where all ranks learn of it, and not in a message that the others wait for."""
        if self.size > 1:
            exchange.encode(value)
        return value

    # ------------------------------------------------------------------------------------------------------ messages

    def _gather(self, what: str, value: Any) -> list[Any]:
        """All ranks' values in rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        return self._communicate(what, lambda group: exchange.gather(value, group))

    def _broadcast(self, what: str, value: Any) -> Any:
        if self.size == 1:
            return value
        return self._communicate(what, lambda group: exchange.broadcast(value, group))

    def _scatter(self, what: str, values: list[Any]) -> Any:
        if self.size == 1:
            return values[0]
        return self._communicate(what, lambda group: exchange.scatter(values, group))

    def _communicate(self, what: str, collective: Callable[[dist.ProcessGroup], Any]) -> Any:
        self.connect(what)
        assert self._group is not None
        try:
            return collective(self._group)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def connect(self, what: str) -> None:
        """Makes the group now. All ranks have to make their groups in the same order; otherwise the first message makes it."""
        if self._group is not None or self.size == 1:
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> RankLost:
        self.leave()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        return RankLost(
            f"a rank was lost, or did not answer in {self.timeout:g} s; as far as this rank knows, {what}: {reason}"
        )

    def leave(self) -> None:
        """Gives up the group, whose connections then close, so that others who wait in it learn of it. The next use makes a new one."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
