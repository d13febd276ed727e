"""Triton kernels of `delayed.py`: one launch records an amax, one updates the histories and scales of many modules."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava import torch_private
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
    table_ptr, WINDOW,
    LIMIT: tl.constexpr, MOST_RECENT: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a state and column; twin of `scaling.delayed_update`. table: see `_table`. LIMIT: fp8_max / 2^margin."""
    entry = table_ptr + 4 * tl.program_id(0)
    n, column = tl.load(entry + 3), tl.program_id(1)
    if column < n:  # states may have different numbers of columns
        history_ptr = tl.load(entry).to(tl.pointer_type(tl.float32)) + column
        scale_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + column
        rows = tl.arange(0, BLOCK)
        values = tl.load(history_ptr + rows * n, mask=rows < WINDOW, other=0.0)
        after = tl.load(history_ptr + (rows + 1) * n, mask=rows + 1 < WINDOW, other=0.0)
        newest = tl.load(history_ptr)
        amax = newest if MOST_RECENT else tl.max(values)
        usable = (amax > 0) & (amax < float("inf"))
        safe = tl.where(usable, amax, 1.0)
        fresh = tl.div_rn(safe * 0.0 + LIMIT, safe)
        fresh = tl.where(fresh == float("inf"), 3.4028234663852886e38, fresh)
        if KEEP:
            tl.store(tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + column, tl.load(scale_ptr))
        tl.store(scale_ptr, fresh, mask=usable)
        tl.debug_barrier()  # every load of this column comes before the first store
        rolled = tl.where(rows == WINDOW - 1, newest, after)
        rolled = tl.where(rows == 0, 0.0, rolled)
        tl.store(history_ptr + rows * n, rolled, mask=rows < tl.where(newest != 0.0, WINDOW, 0))


_UPDATE = Launcher(_update_kernel)
_UPDATES: dict[tuple, Launch] = {}
"""By all but the table's address."""


def update(
    histories: list[Tensor], scales: list[Tensor], previous: list[Tensor], window: int, limit: float, most_recent: bool
) -> None:
    """See `delayed._update_many`."""
    widest = max(map(len, scales))
    key = (len(scales), widest, window, limit, most_recent, bool(previous))
    launch = _UPDATES.get(key)
    if launch is None:
        arguments = {
            "WINDOW": window, "LIMIT": limit, "MOST_RECENT": most_recent, "KEEP": bool(previous),
            "BLOCK": triton.next_power_of_2(window),
        }  # fmt: skip
        launch = _UPDATES[key] = _UPDATE.prepare((len(scales), widest), 4, arguments, ("table_ptr",))
    launch(_table(histories, scales, previous or scales))


_TABLES: dict[tuple[int, ...], Tensor] = {}
"""By their numbers and their device: a table is right for whatever lies at these addresses."""
_MOST_TABLES = 64
_CAPTURED: list[Tensor] = []
"""Tables that graphs read whenever they are replayed."""


def _table(histories: list[Tensor], scales: list[Tensor], previous: list[Tensor]) -> Tensor:
    """int64 [states, 4]: addresses of history [L, n], scale [n] and previous [n], and n."""
    numbers: list[int] = []
    for history, scale, kept in zip(histories, scales, previous, strict=True):
        numbers += (history.data_ptr(), scale.data_ptr(), kept.data_ptr(), scale.shape[0])
    key = (*numbers, scales[0].get_device())
    table, capturing = _TABLES.get(key), scales[0].is_cuda and torch_private.is_capturing()
    if table is None:
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=scales[0].is_cuda)
        table = host.to(scales[0].device, non_blocking=True)
        if capturing:
            _CAPTURED.append(host)
        else:  # what a graph copies is there only when it has been replayed
            if len(_TABLES) >= _MOST_TABLES:
                _TABLES.clear()
            _TABLES[key] = table
    if capturing:
        _CAPTURED.append(table)
    return table
