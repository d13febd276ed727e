"""One save: plan, stage, write, commit ([design note 3] has the protocol).

    save = Save.begin(team, storage, step, state, options)    all ranks agree who writes what; rank 0 makes the directory
    save.stage(buffers)                                    optional: copies what this rank writes, so that training can go on
    save.finish()                                          writes, then rank 0 checks everything and commits

What is in the directory before the last rename is called `step-N.tmp-...` and is nobody's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint.boxes import Box, part_of
from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.files import About, Written, check_shards, encode_state, entries_of, seal, write_shard
from ottava.checkpoint.flat import Flat, flatten
from ottava.checkpoint.names import shard_name
from ottava.checkpoint.plan import Item, Offer, SavePlan, make_plan, offer
from ottava.checkpoint.prune import prune
from ottava.checkpoint.storage import Folder, Location, Storage
from ottava.checkpoint.team import Team
from ottava.notices import log

PHASES = ("planning", "staging", "writing", "fsync", "hash", "manifest", "rename", "prune")
"""In their order. Every rank passes the first five (staging in asynchronous saves only), rank 0 the others."""


def no_hook(phase: str) -> None:
    """The default of `SaveOptions.hook`."""


@dataclass(frozen=True)
class SaveOptions:
    """What stays the same from save to save."""

    hash: str
    """Algorithm of the files' digests (digest.py)."""
    keep_last: int = 0
    keep_every: int = 0
    config: Mapping[str, Any] | None = None
    hook: Callable[[str], None] = no_hook
    """Called with the name of each phase as it begins. Tests end the process there."""
    rotten: set[int] = field(default_factory=set)
    """Steps that `prune` does not count."""


class Save:
    """One save in progress, in every rank."""

    def __init__(self, team: Team, storage: Storage, step: int, options: SaveOptions) -> None:
        self.team, self.storage, self.step, self.options = team, storage, step, options
        self.folder: Folder | None = None
        self._plan: SavePlan | None = None  # in rank 0
        self._items: list[Item] = []
        self._sources: dict[Item, Tensor] = {}
        self._staged: set[Item] = set()
        self._staging_error: Exception | None = None
        self._published = False  # in rank 0: nothing that fails from then on takes the checkpoint away

    @property
    def _what(self) -> str:
        return f"step {self.step} was not saved"

    @classmethod
    def begin(cls, team: Team, storage: Storage, step: int, state: Mapping[str, Any], options: SaveOptions) -> Save:
        """Agrees who writes what. The tensors must not change until they are staged or the save is finished."""
        save = cls(team, storage, step, options)
        flat = Flat({}, {}, {})

        def work() -> tuple[int, Offer]:
            nonlocal flat
            options.hook("planning")
            if type(step) is not int or not 0 <= step < 10**18:
                raise ValueError(f"step={step!r}: expected an integer from 0.")
            flat = flatten(state)
            return step, offer(flat)

        def combine(parts: list[tuple[int, Offer]]) -> list[tuple[str, list[Item]]]:
            if len(steps := sorted({s for s, _ in parts})) > 1:
                raise ValueError(f"ranks save different steps: {steps[:8]}.")
            save._plan = make_plan([offered for _, offered in parts])
            encode_state(save._plan.values, options.config)  # its mistakes now, not after an hour of writing
            folder = storage.begin(step)
            return [(folder.name, items) for items in save._plan.items]

        name, save._items = team.agree(save._what, work, combine, scatter=True)
        save.folder = storage.folder(name)
        save._sources = _sources(save._items, flat)
        return save

    def stage(self, buffers: dict[Item, Tensor], later: frozenset[int] = frozenset()) -> None:
        """Copies what this rank writes into `buffers`, whose memory is used again from save to save.

        later: addresses of storages that need not be copied now; `stage_rest` copies what lies in them. An error is kept for
        `finish`, where all ranks learn of it.
        """

        def work() -> None:
            self.options.hook("staging")
            for item in [i for i in buffers if i not in self._sources]:
                del buffers[item]
            self._copy(buffers, [i for i, s in self._sources.items() if s.untyped_storage().data_ptr() not in later])

        self._keep_error(work)

    def stage_rest(self, buffers: dict[Item, Tensor], ready: torch.cuda.Event | None = None) -> None:
        """Copies what `stage` has left. On a GPU beside other work, after the event `ready` in the stream that wrote it."""

        def work() -> None:
            rest = [item for item in self._sources if item not in self._staged]
            if ready is None:
                self._copy(buffers, rest)
                return
            # A new thread is at the first GPU, whichever the rank's is: streams and their `synchronize` follow the event's.
            with torch.cuda.device(ready.device), torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(ready)
                self._copy(buffers, rest)

        self._keep_error(work)

    def _copy(self, buffers: dict[Item, Tensor], items: Sequence[Item]) -> None:
        sources = {item: self._sources[item] for item in items}
        for item, source in sources.items():
            buffer = buffers.get(item)
            if buffer is None or buffer.dtype != source.dtype:
                buffer = buffers[item] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
        if any(s.is_cuda for s in sources.values()):
            torch.cuda.current_stream().synchronize()
        self._sources |= {item: buffers[item] for item in items}
        self._staged.update(items)

    def _keep_error(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._staging_error = self._staging_error or error

    def finish(self, team: Team | None = None) -> Location:
        """Writes and commits; where the checkpoint is. team: to be used instead, by another thread than that of `begin`."""
        team = team or self.team
        assert self.folder is not None
        try:
            return self.storage.folder(team.agree(self._what, self._write, self._commit)).path
        except (CheckpointError, ValueError):
            if team.rank == 0 and not self._published:
                with suppress(OSError):  # the next sweep tries again
                    self.storage.discard(self.folder)
            raise
        finally:
            self._sources = {}

    def _write(self) -> Written:
        """In every rank: writes its file and makes it durable."""
        assert self.folder is not None
        if self._staging_error is not None:
            raise self._staging_error
        name, hook = shard_name(self.team.rank), self.options.hook
        hook("writing")
        tensors = (_standalone(self._sources[item]) for item in self._items)
        return (
            write_shard(self.folder, name, tensors, self.options.hash, hook) if self._items else Written(name, None, [])
        )

    def _commit(self, reports: list[Written]) -> str:
        """In rank 0: compares the reports with the plan and the storage, writes the small files, publishes, prunes."""
        assert self._plan is not None and self.folder is not None
        plan, options = self._plan, self.options
        files = check_shards(self.folder, reports, [len(items) for items in plan.items])
        options.hook("manifest")
        about = About(self.step, len(reports), plan.meshes, options.hash)
        entries = entries_of(plan.tensors, plan.items, reports)
        seal(self.folder, about, entries, plan.paths, encode_state(plan.values, options.config), files)
        options.hook("rename")
        published = self.storage.publish(self.folder, self.step)
        self._published = True
        options.hook("prune")
        options.rotten.discard(self.step)
        try:
            prune(self.storage, self.step, options.keep_last, options.keep_every, options.rotten)
        except Exception as error:  # of whatever kind a storage has. The checkpoint is there; the rest is tried again after the next save
            log.warning("old checkpoints in %s were not removed: %s", self.storage.path, error)
        return published.name


def _sources(items: Sequence[Item], flat: Flat) -> dict[Item, Tensor]:
    """The part of the caller's tensor that each item is: views, no copies."""
    boxes: dict[str, dict[Box, Tensor]] = {}
    for name in {name for name, _ in items}:
        part = part_of(name, flat.tensors[name])
        boxes[name] = {(offset, tuple(view.shape)): view for offset, view in part.views}
    return {(name, box): boxes[name][box] for name, box in items}


def _standalone(source: Tensor) -> Tensor:
    """`source` as a contiguous CPU tensor with nothing else in its storage: torch.save writes whole storages."""
    tensor = source.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
