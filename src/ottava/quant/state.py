"""What is switched on now: `autocast` and `quantized_model_init`.

Plain objects in one holder, whose attributes every thread has for itself: as with `torch.autocast`, a `with` block holds for the
thread that entered it. `threading.local` rather than `contextvars`, which torch.compile cannot trace. Backward passes, which run in
threads of autograd for CUDA, do not read it; what they recompute brings its own (`Module._context`, `distributed.recompute`).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ottava.quant.scheme import check_is_recipe
from ottava.recipe import DelayedScaling, Recipe

if TYPE_CHECKING:
    from ottava.quant.delayed import DelayedState


class _Current(threading.local):
    """The innermost `autocast` and `quantized_model_init`, and what the outermost `autocast` has to update when it ends."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.calibrating: bool = False
        self.group: Any = None
        self.depth: int = 0
        self.touched: list[DelayedState] = []
        self.init: quantized_model_init | None = None


CURRENT = _Current()


def default_recipe() -> Recipe:
    """What `autocast()` uses when it is given no recipe."""
    return DelayedScaling()


class autocast:
    """Runs Ottava modules in FP8 inside a `with` block, in the thread that has entered it.

    recipe: how (default `DelayedScaling()`); enabled=False: high precision, also inside an enabled block;
    calibrating=True with enabled=False: high precision, but delayed-scaling statistics are collected;
    amax_reduction_group: the ranks that share delayed-scaling statistics (default: all, if torch.distributed is initialized).

        >>> with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        ...     y = layer(x)
        >>> y.sum().backward()  # outside the block
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
    ) -> None:
        recipe = fp8_recipe if recipe is None else recipe
        if recipe is not None:
            check_is_recipe(recipe, "autocast: ")
        wanted = (enabled or calibrating) and (recipe is None or recipe.quantizes)
        self.recipe = (default_recipe() if recipe is None else recipe) if wanted else None
        self.calibrating = calibrating and not enabled
        self.outer: list[tuple[Recipe | None, bool, Any]] = []  # a stack: the same object may be entered twice
        self.group = fp8_group if amax_reduction_group is None else amax_reduction_group

    def __enter__(self) -> autocast:
        self.outer.append((CURRENT.recipe, CURRENT.calibrating, CURRENT.group))
        CURRENT.recipe, CURRENT.calibrating, CURRENT.group = self.recipe, self.calibrating, self.group
        CURRENT.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        CURRENT.recipe, CURRENT.calibrating, CURRENT.group = self.outer.pop()
        CURRENT.depth -= 1
        if CURRENT.depth == 0 and CURRENT.touched:
            from ottava.quant.delayed import update_forward

            touched = list(CURRENT.touched)
            CURRENT.touched.clear()
            if kind is None:
                update_forward(touched)
            else:  # the step failed: as if it had not been
                for state in touched:
                    state.forget_this_step()


class quantized_model_init:
    """Makes modules that are constructed inside the `with` block store their weights in FP8 only.

    recipe: which FP8 (default `DelayedScaling()`). preserve_high_precision_init_val=True keeps the initial high-precision
    values on the CPU, for an optimizer's masters: `weight.get_high_precision_init_val()`, then `clear_high_precision_init_val()`.

        >>> with ottava.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        ...     layer = ottava.Linear(256, 256)
        >>> layer.weight
        Parameter(QuantizedTensor((256, 256), e4m3:128x128:pow2, ...))
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        if recipe is not None:
            check_is_recipe(recipe, "quantized_model_init: ")
        self.enabled = enabled and (recipe is None or recipe.quantizes)
        self.recipe = default_recipe() if recipe is None else recipe
        self.preserve = preserve_high_precision_init_val
        self.outer: list[quantized_model_init | None] = []

    def __enter__(self) -> quantized_model_init:
        self.outer.append(CURRENT.init)
        CURRENT.init = self if self.enabled else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        CURRENT.init = self.outer.pop()
