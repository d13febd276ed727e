"""A run's checkpoints: everything that makes the run is saved and restored here.

Weights, optimizer, delayed scales and random streams are `ottava.checkpoint.model_state`'s business. The learning rate, the order of
data and the random numbers of a step are functions of the step, so the step is all that is added.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint import (
    Checkpoints,
    Loaded,
    NoUsableCheckpoint,
    Rejected,
    Relaxed,
    load_model_state,
    model_state,
)
from ottava.checkpoint.directory import LocalStorage
from ottava.checkpoint.errors import listed
from ottava.checkpoint.names import DISTRUSTED, directory_name
from ottava.checkpoint.storage import Folder, storage_at
from ottava.models import LlamaConfig
from ottava.models.hf_files import DESCRIBED, described
from ottava.models.hf_llama import config_from_hf
from ottava.notices import warn_once
from ottava.train.config import Config
from ottava.train.exits import NonFinite
from ottava.train.model import DistributedModel
from ottava.train.trust import non_finite

_DELAYED = ["delayed.*"]
RELAXED = Relaxed(extra=_DELAYED)
"""A run may change its recipe when it is resumed: delayed scales that nobody asks for are left."""


class RunState:
    """What is saved and restored. Every rank calls every method.

    >>> state = RunState(config, model, optimizer)
    >>> loaded = state.load()          # None in a new run
    >>> state.save(step)
    """

    def __init__(self, config: Config, model: DistributedModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.section = model, optimizer, config.checkpoint
        described_model = described(model.shape) if isinstance(model.shape, LlamaConfig) else {}
        self.checkpoints = Checkpoints(
            config.run_folder / "checkpoints",
            keep_last=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            hash=config.checkpoint.hash,
            config={**asdict(config), **described_model},
        )

    def save(self, step: int, wait: bool = False) -> None:
        """After `step` steps. wait: it is committed when this returns. NonFinite, and no save, if it could not be trusted."""
        state = model_state(self.model.module, self.optimizer) | {"step": step}
        if bad := self._non_finite(state):
            raise NonFinite(f"Step {step} is not saved: {listed(bad, 4)} is not finite.")
        if self.section.background and not wait:
            self.checkpoints.save_async(step, state, until=self.optimizer)
        else:
            self.checkpoints.finish(step, state)

    def begin(self) -> Loaded | None:
        """Restores what checkpoint.load says; None: the run begins at step 0."""
        chosen = self.section.load
        if chosen == "none":
            return None
        loaded = self.load()
        if loaded is not None:  # it may have been imported into the run's own folder
            self._check_shape(str(loaded.path), loaded.config)
        if loaded is not None or chosen == "exact":
            return loaded
        if several := _inside(chosen):
            raise ValueError(
                f"checkpoint.load {chosen} is not a checkpoint, but has some: name one of them, such as {several[0].path}."
            )
        try:
            loaded = self._load(chosen if "://" in chosen else Path(chosen).expanduser(), self._allowed())
        except ValueError as error:
            flags = "checkpoint.allow_missing, allow_extra, allow_shape and allow_dtype"
            raise ValueError(f"{error}\nIn a configuration these are {flags}.") from error
        assert loaded is not None
        self._check_shape(chosen, loaded.config)
        if bad := self._non_finite(model_state(self.model.module, self.optimizer)):
            raise ValueError(
                f"checkpoint.load {chosen}: {listed(bad, 4)} is not finite there. Take another checkpoint."
            )
        return loaded

    def _check_shape(self, chosen: str, config: Any) -> None:
        """Tensors may fit a model of other heads, eps or theta, which would train and be exported as what it is not."""
        found, shape = config.get(DESCRIBED) if isinstance(config, dict) else None, self.model.shape
        if not isinstance(found, dict) or not isinstance(shape, LlamaConfig):
            return
        made = config_from_hf(found)
        differences = [
            f"model.{name} is {getattr(made, name)} there and {getattr(shape, name)} here"
            for name in ("heads", "kv_heads", "norm_eps", "rope_theta", "tie_embeddings")
            if getattr(made, name) != getattr(shape, name)
        ]
        if differences:
            raise ValueError(f"checkpoint.load {chosen} is of another model: {'; '.join(differences)}.")

    def load(self, below: int | None = None, above: int = -1) -> Loaded | None:
        """Restores the newest checkpoint of the run that verifies and holds finite numbers alone; None if there is none at all.

        below, above: of an earlier, or later, step than this one. NoUsableCheckpoint if there are some, and none is good.
        """
        checkpoints = self.checkpoints
        rejected: list[Rejected] = []
        for step in checkpoints.team.agree(
            "no checkpoint was found", lambda: None, lambda _: self._steps(below, above)
        ):
            try:
                loaded = self._load(step, RELAXED)
            except NoUsableCheckpoint as error:
                rejected += error.rejected
                continue
            assert loaded is not None
            bad = self._non_finite(model_state(self.model.module, self.optimizer))
            if not bad:
                return replace(loaded, rejected=(*self._passed_over(loaded.step), *rejected))
            rejected.append(Rejected(str(loaded.path), f"{listed(bad, 4)} is not finite."))
            checkpoints.rotten.add(step)
        if rejected:
            raise NoUsableCheckpoint.of(str(checkpoints.storage.path), rejected)
        return None

    def distrust(self, step: int) -> None:
        """The run goes back behind this checkpoint, because what follows from it was no good twice: the next start shall not begin with it
        either. It stays, and is taken when no other is left: the data or the learning rate may have been to blame."""
        self.checkpoints.rotten.add(step)
        storage = self.checkpoints.storage
        if self.checkpoints.team.rank == 0 and isinstance(storage, LocalStorage):
            try:
                storage.distrust(step)
            except OSError as error:  # a full disk: this process knows it all the same
                warn_once(f"{storage.folder(directory_name(step)).path} cannot be marked: {error.strerror}.")

    def _passed_over(self, taken: int) -> list[Rejected]:
        """Newer checkpoints that some run went back behind. In rank 0, which tells of them."""
        storage = self.checkpoints.storage
        if self.checkpoints.team.rank or not isinstance(storage, LocalStorage):
            return []
        why = "the run went back behind it (remove the file {}{} beside it, and it is trusted again)."
        return [
            Rejected(str(folder.path), why.format(folder.name, DISTRUSTED))
            for step, folder in storage.candidates()
            if step > taken and storage.distrusted(step)
        ]

    def _steps(self, below: int | None, above: int) -> list[int]:
        """Of everything that is called a checkpoint, newest first. In rank 0."""
        storage = self.checkpoints.storage
        with suppress(OSError):  # a directory that may only be read has to be enough
            storage.recover()
        return [step for step, _ in storage.candidates() if step > above and (below is None or step < below)]

    def _non_finite(self, state: dict[str, Any]) -> list[str]:
        """Tensors with numbers that are not finite, in any rank."""

        def combine(parts: list[list[str]]) -> list[str]:
            return sorted({name for part in parts for name in part})

        return self.checkpoints.team.agree(
            "looking for numbers that are not finite", lambda: non_finite(state), combine
        )

    def _load(self, which: str | int | Path, relaxed: Relaxed) -> Loaded | None:
        settings = [_settings(group) for group in self.optimizer.param_groups]
        loaded = load_model_state(
            self.checkpoints, self.model.module, self.optimizer, extra={"step": 0}, which=which, relaxed=relaxed
        )
        for group, now in zip(self.optimizer.param_groups, settings):
            group.update(now)  # betas and decay are what the configuration says today
        return loaded

    def _allowed(self) -> Relaxed:
        section = self.section
        extra = [*section.allow_extra, *_DELAYED]
        return Relaxed(list(section.allow_missing), extra, list(section.allow_shape), list(section.allow_dtype))


def _inside(chosen: str) -> list[Folder]:
    """The checkpoints of a run, or of its folder of checkpoints, newest first, if that is what was chosen."""
    if "://" in chosen:
        return []
    path = Path(chosen).expanduser()
    with suppress(OSError):
        return [folder for place in (path, path / "checkpoints") for _, folder in storage_at(place).candidates()]
    return []


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
