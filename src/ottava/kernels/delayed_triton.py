"""Triton kernels of `delayed.py`: one launch records an amax, one updates all columns of a module's history and scales."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launch, Launcher


@triton.jit
def _record_kernel(history_ptr, amax_ptr, column):
    """history[0, column] = the larger of itself and amax, NaN if one of them is, as `torch.maximum`."""
    before, amax = tl.load(history_ptr + column), tl.load(amax_ptr)
    tl.store(history_ptr + column, tl.where((amax != amax) | (amax > before), amax, before))


_RECORD = Launcher(_record_kernel)
RECORDS: dict[int, Launch] = {}
"""By column, what takes history [L, n] and amax [1], both float32, and raises the history in place: `prepare_record` makes it."""


def prepare_record(column: int) -> Launch:
    """The launch for `column`, which is in `RECORDS` from now on."""
    launch = RECORDS[column] = _RECORD.prepare((1,), 1, {"column": column}, ("history_ptr", "amax_ptr"))
    return launch


@triton.jit
def _update_kernel(
    history_ptr, scale_ptr, previous_ptr, N, WINDOW,
    LIMIT: tl.constexpr, MOST_RECENT: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a column; twin of `scaling.delayed_update`. LIMIT: fp8_max / 2^margin."""
    column = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    values = tl.load(history_ptr + rows * N + column, mask=rows < WINDOW, other=0.0)
    after = tl.load(history_ptr + (rows + 1) * N + column, mask=rows + 1 < WINDOW, other=0.0)
    newest = tl.load(history_ptr + column)
    amax = newest if MOST_RECENT else tl.max(values)
    usable = (amax > 0) & (amax < float("inf"))
    safe = tl.where(usable, amax, 1.0)
    fresh = tl.div_rn(safe * 0.0 + LIMIT, safe)
    fresh = tl.where(fresh == float("inf"), 3.4028234663852886e38, fresh)
    if KEEP:
        tl.store(previous_ptr + column, tl.load(scale_ptr + column))
    tl.store(scale_ptr + column, fresh, mask=usable)
    tl.debug_barrier()  # every load of this column comes before the first store
    rolled = tl.where(rows == WINDOW - 1, newest, after)
    rolled = tl.where(rows == 0, 0.0, rolled)
    tl.store(history_ptr + rows * N + column, rolled, mask=(rows < WINDOW) & (newest != 0.0))


_UPDATE = Launcher(_update_kernel)
_UPDATES: dict[tuple, Launch] = {}
"""By all but the addresses."""


def update(
    history: Tensor, scale: Tensor, previous: Tensor | None, window: int, limit: float, most_recent: bool
) -> None:
    """history [L, n] and scale [n], in place; previous [n] receives the scale of before."""
    n = history.shape[1]
    key = (n, window, limit, most_recent, previous is None)
    launch = _UPDATES.get(key)
    if launch is None:
        arguments = {
            "previous_ptr": None, "N": n, "WINDOW": window, "LIMIT": limit, "MOST_RECENT": most_recent,
            "KEEP": previous is not None, "BLOCK": triton.next_power_of_2(window),
        }  # fmt: skip
        pointers = ("history_ptr", "scale_ptr") if previous is None else ("history_ptr", "scale_ptr", "previous_ptr")
        launch = _UPDATES[key] = _UPDATE.prepare((n,), 4, arguments, pointers)
    if previous is None:
        launch(history, scale)
    else:
        launch(history, scale, previous)
