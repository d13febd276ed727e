"""A run on disk: sharded, bit-exact checkpoints that are committed or absent, and safe to open.

    from ottava.checkpoint import Checkpoints

    with Checkpoints("run/checkpoints", keep_last=3) as checkpoints:
        loaded = checkpoints.load(state)
        checkpoints.save(100, state)

docs/checkpoints.md is the guide, docs/design/0003-checkpoints.md the reasons.

`ottava.checkpoint(function, *args)` is TransformerEngine's name for recomputation, and importing this package puts it under the
same name. So the package can be called too, and does what the function does.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from ottava.checkpoint.boxes import Part, Piece, Pieces, one_piece
from ottava.checkpoint.checkpoints import Checkpoints
from ottava.checkpoint.errors import CheckpointError, InvalidCheckpoint, NoUsableCheckpoint, Rejected
from ottava.checkpoint.inspect import Row, ls, newest, verify
from ottava.checkpoint.load import Loaded, Relaxed
from ottava.checkpoint.reader import Reader
from ottava.checkpoint.reshard import reshard
from ottava.checkpoint.run_state import load_model_state, model_state
from ottava.checkpoint.stop import EXIT_CODE, StopSignal
from ottava.distributed.recompute import checkpoint as _recompute

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
    "Piece",
    "Pieces",
    "one_piece",
    "StopSignal",
    "EXIT_CODE",
    "Row",
    "ls",
    "verify",
    "newest",
    "reshard",
    "Reader",
]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _recompute(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
