"""`torch.manual_seed` in a script for TransformerEngine: a model that is built on the meta device again after it starts the same."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ottava.nn.construction import ORDER


def follow_seeds() -> None:
    """From now on `torch.manual_seed` also begins the numbering of modules anew, for the rest of the process."""
    if hasattr(torch.manual_seed, "__wrapped__"):
        return
    original = torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch.Generator:
        ORDER.restart()
        return original(seed)

    torch.manual_seed = manual_seed
