"""A save in another thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ottava import torch_private
from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.plan import Item
from ottava.checkpoint.save import Save
from ottava.checkpoint.team import Team
from ottava.quant.weight import Weight


class Background:
    """Finishes saves in a thread, with a process group that the training thread does not use."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.trusted = True
        """False after a save failed here: the next one belongs into the caller's thread."""
        self._buffers: dict[Item, Tensor] = {}
        self._staged = threading.Event()
        self._ended = threading.Event()
        self._hook: Any = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None
        self._done = False

    def start(self, save: Save, step: int, until: Optimizer | None = None) -> None:
        """Copies the state, which then may change, and writes the copy. If no thread can be had, writes here.

        until: what this optimizer alone changes is copied by the thread, and the optimizer's next step waits for it.
        """
        save.stage(self._buffers, frozenset() if until is None else storages_of(until))
        self._step, self._error, self._done = step, None, False
        self._staged.clear()
        self._ended.clear()
        on_gpu = until is not None and torch.cuda.is_initialized()
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        self.team.connect(f"step {step} was not saved")  # here: making a group is an act of all ranks in one order
        if until is not None:  # behind everything that can fail: the optimizer waits for the thread
            self._hook = until.register_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, args=(save, ready), name="ottava-checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._run(save, ready)

    def wait(self) -> int | None:
        """The step that was saved; None if no save was under way. Raises the error of the save, once."""
        thread = self._thread
        if thread is None:
            return None
        # Not `join`: CPython takes a thread for ended once a signal's handler has interrupted it. Whoever does may wait again.
        while not self._ended.wait(1.0) and thread.is_alive():
            pass
        self._thread = None
        self._forget_hook()
        if self._done:
            return self._step
        self.trusted = False
        raise self._error or CheckpointError(f"step {self._step} was not saved: its thread ended without a word.")

    def _run(self, save: Save, ready: torch.cuda.Event | None) -> None:
        try:
            try:
                save.stage_rest(self._buffers, ready)
            finally:
                self._staged.set()
            save.finish(self.team)
            self._done = True
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._ended.set()

    def _before_step(self, *_: Any) -> None:
        self._staged.wait()
        self._forget_hook()

    def _forget_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def storages_of(optimizer: Optimizer) -> frozenset[int]:
    """Addresses of the memory that a step of the optimizer changes: parameters (of stored ones bytes and scales) and its own state."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return frozenset(plain.untyped_storage().data_ptr() for tensor in tensors for plain in _plain(tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    local = torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, Weight):
        yield local
    elif local.master is not None:
        yield local.master
    else:
        yield from local.memory.tensors()
