"""What modules that `autocast` concerns have in common: which recipe is in force for them, also when backward runs them again."""

from __future__ import annotations

from typing import Any

import torch

from ottava import torch_private
from ottava.quant.state import CURRENT
from ottava.recipe import Recipe


class FollowsAutocast:
    """A part of a module: `_last_context` is to be an empty dictionary of its own, and not to be pickled."""

    unquantized = False
    """Whether the module multiplies unquantized, also inside of `autocast`. See `leave_unquantized`."""

    # With gradients and without: an evaluation between a forward and its recomputation must not change the latter.
    _last_context: dict[bool, tuple[Recipe | None, bool, Any]]

    def _context(self, compiling: bool) -> tuple[Recipe | None, bool, Any]:
        """(recipe, calibrating, group) of the `autocast` in force.

        torch.utils.checkpoint recomputes in backward, when the `with` block is long over: what the last forward used holds then.
        """
        if self.unquantized:
            return None, False, None
        now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)
        if compiling:
            return now
        if CURRENT.depth == 0 and torch_private.inside_backward():
            # A reentrant checkpoint ran its first pass without gradients.
            return self._last_context.get(not torch_private.in_reentrant_checkpoint(), now)
        self._last_context[torch.is_grad_enabled()] = now
        return now
