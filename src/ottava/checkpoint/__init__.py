"""A run on disk: sharded, bit-exact checkpoints that are committed or absent, and safe to open.

    from ottava.checkpoint import Checkpoints

    with Checkpoints("run/checkpoints", keep_last=3) as checkpoints:
        loaded = checkpoints.load(state)
        checkpoints.save(100, state)

docs/checkpoints.md is the guide, docs/design/0003-checkpoints.md the reasons.

`ottava.checkpoint(function, *args)` is TransformerEngine's name for recomputation, and this package has the same name. So the package
can be called and does what `ottava.distributed.checkpoint` does. `import ottava` imports it, with none of the modules inside, so that
`ottava.checkpoint` is one object, whatever else is imported and in whatever order.
"""

from __future__ import annotations

import importlib
import sys
import types
from inspect import signature
from typing import TYPE_CHECKING, Any

from ottava.distributed.recompute import checkpoint as _recompute

if TYPE_CHECKING:
    from ottava.checkpoint.boxes import Part
    from ottava.checkpoint.checkpoints import Checkpoints
    from ottava.checkpoint.errors import CheckpointError, InvalidCheckpoint, NoUsableCheckpoint, Rejected
    from ottava.checkpoint.inspect import Row, ls, newest, verify
    from ottava.checkpoint.load import Loaded, Relaxed
    from ottava.checkpoint.reader import Reader
    from ottava.checkpoint.reshard import reshard
    from ottava.checkpoint.run_state import load_model_state, model_state
    from ottava.checkpoint.stop import EXIT_CODE, StopSignal

__all__ = [
    "Checkpoints",
    "model_state",
    "load_model_state",
    "Loaded",
    "Relaxed",
    "CheckpointError",
    "InvalidCheckpoint",
    "NoUsableCheckpoint",
    "Rejected",
    "Part",
    "StopSignal",
    "EXIT_CODE",
    "Row",
    "ls",
    "verify",
    "newest",
    "reshard",
    "Reader",
]

# Where the names live: imported when they are asked for.
_HOMES = {
    "Part": "boxes",
    "Checkpoints": "checkpoints",
    **dict.fromkeys(("CheckpointError", "InvalidCheckpoint", "NoUsableCheckpoint", "Rejected"), "errors"),
    **dict.fromkeys(("Row", "ls", "newest", "verify"), "inspect"),
    **dict.fromkeys(("Loaded", "Relaxed"), "load"),
    "Reader": "reader",
    "reshard": "reshard",
    **dict.fromkeys(("load_model_state", "model_state"), "run_state"),
    **dict.fromkeys(("EXIT_CODE", "StopSignal"), "stop"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableModule(types.ModuleType):
    """This package: a module that can be called, copied and pickled like the function that it stands for."""

    __signature__ = signature(_recompute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _recompute(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python puts a module inside under its own name; `reshard` is the function in it.
        if name not in _HOMES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(self, name, value)  # asked for once
        return value


sys.modules[__name__].__class__ = _CallableModule
