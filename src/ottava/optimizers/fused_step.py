"""A step of Adam on a GPU: what each launch of `kernels/adam_triton.py` is told. No element is touched here.

[Note: launches of a step] One small launch adds 1 to all step counts and makes the factors of this step from them, in float64, where
the counts are: the host never waits. Then one launch for each group and kind of tensors: those whose parameter, gradient and moments
have the same types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.block_moment import BLOCK, blocks_of_row
from ottava.kernels.random_bits import GOLDEN, MASK
from ottava.kernels.registry import has_triton
from ottava.kernels.upload import Upload
from ottava.optimizers.masters import has_bytes_only
from ottava.quant.weight import Weight

if TYPE_CHECKING:
    from ottava.kernels.adam_triton import Kind
    from ottava.optimizers.adam_update import Settings, Update


def runs_fused(update: Update) -> bool:
    """Whether the kernel can take a parameter; otherwise it is `adam_update`'s, in torch ops."""
    if not torch_private.is_fake(update.grad) and (update.grad.device.type != "cuda" or not has_triton()):
        return False
    contiguous = has_bytes_only(update.param) or update.working.is_contiguous()
    return contiguous and not any(form.of_whole_tensor for form in update.formats)


class FusedStep:
    """The launches of an optimizer on one device, with what stays from step to step.

    >>> launch = FusedStep()
    >>> launch([(group, updates)], settings, grad_scale=None)
    """

    def __init__(self) -> None:
        self._table = Upload()
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        """By the number of blocks of each tensor."""

    def __call__(
        self, work: list[tuple[dict[str, Any], list[Update]]], settings: Settings, grad_scale: Tensor | None
    ) -> None:
        """One step of all groups' updates, which are on one device."""
        if torch_private.is_fake(work[0][1][0].grad):
            return  # an estimate of memory, of which the kernel needs none
        from ottava.kernels import adam_triton

        launches = [
            (group, kind, found) for group, updates in work for kind, found in _kinds(updates, settings.rounds).items()
        ]
        device = launches[0][2][0].grad.device
        counts: list[int] = []
        rows: list[int] = []
        for group, _, found in launches:
            shared = _of_group(group)
            for update in found:
                counts += update.state["step"].data_ptr(), *shared, (settings.seed + GOLDEN * update.number) & MASK
                rows += _row(update)
        numbers = self._table(counts + rows, device)
        total = len(counts) // adam_triton.COUNT_WIDTH.value
        coefficients = torch.empty(total, 4, dtype=torch.float32, device=device)
        with torch.cuda.device(device):
            adam_triton.count(numbers[: len(counts)].view(total, -1), coefficients, grad_scale)
            table, first = numbers[len(counts) :].view(total, -1), 0
            for group, kind, found in launches:
                part = slice(first, first + len(found))
                first += len(found)
                chunks = self._chunks_of(tuple(u.row[8] for u in found), device)
                if chunks.shape[0]:
                    adam_triton.step(
                        kind, table[part], chunks, coefficients[part], grad_scale, group, settings.adam_w_mode, settings.rounds
                    )  # fmt: skip
        mark_written(u for _, _, found in launches for u in found)

    def _chunks_of(self, blocks: tuple[int, ...], device: torch.device) -> Tensor:
        """int32 [c, 2]: (tensor, number of a chunk in it)."""
        from ottava.kernels.adam_triton import CHUNK

        if blocks not in self._chunks:
            pairs = [(tensor, chunk) for tensor, count in enumerate(blocks) for chunk in range(-(-count // CHUNK))]
            self._chunks[blocks] = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).to(device)
        return self._chunks[blocks]


def _kinds(updates: list[Update], rounds: bool) -> dict[Kind, list[Update]]:
    found: dict[Kind, list[Update]] = {}
    for update in updates:
        if not update.grad.is_contiguous():
            update.grad = update.grad.contiguous()
        key = (update.grad.dtype, update.grad.data_ptr() % 16 == 0)
        kind = update.kinds.get(key) or update.kinds.setdefault(key, _kind(update, rounds))
        found.setdefault(kind, []).append(update)
    return found


def _kind(update: Update, rounds: bool) -> Kind:
    from ottava.kernels.adam_triton import IN_MASTER, IN_PARAM, IN_REMAINDER, IN_ROUNDED_PARAM, Kind

    written: torch.dtype | None = update.param.dtype
    if "master_param" in update.state:
        held = IN_REMAINDER if update.remainder else IN_MASTER
        written = None if has_bytes_only(update.param) else written
    else:
        held = IN_PARAM if update.param.dtype == torch.float32 else IN_ROUNDED_PARAM
    names = (update.formats[0].name, update.formats[1].name)
    aligned = all(address % 16 == 0 for address in _addresses(update))
    columnwise = rounds and update.place.columnwise
    return Kind(held.value, written, update.grad.dtype, names, aligned, _ragged(update), columnwise)


def _ragged(update: Update) -> bool:
    """Whether there are blocks with scales, and rows that do not end with a block."""
    return any(form.blocks for form in update.formats) and update.param.shape[-1] % BLOCK != 0


def _blocks(update: Update) -> int:
    """Blocks of 128 elements, counted row by row where rows do not end with one."""
    elements = update.param.numel()
    if not elements or not _ragged(update):
        return -(-elements // BLOCK)
    columns = update.param.shape[-1]
    return elements // columns * blocks_of_row(columns)


def _addresses(update: Update) -> list[int]:
    """gradient, parameter, master, exp_avg, exp_avg_sq; 0 where there is none."""
    state, master = update.state, update.state.get("master_param")
    return [
        update.grad.data_ptr(),
        0 if has_bytes_only(update.param) else update.working.data_ptr(),
        0 if master is None else master.data_ptr(),
        state["exp_avg"].data_ptr(),
        state["exp_avg_sq"].data_ptr(),
    ]


def _row(update: Update) -> list[int]:
    if update.row:
        update.row[1] = update.grad.data_ptr()
        return update.row
    scales = [update.state.get(f"{name}_scale_inv") for name in ("exp_avg", "exp_avg_sq")]
    place, param = update.place, update.param
    columns = param.shape[-1] if param.dim() else 1
    update.row = [
        param.numel(), *_addresses(update), *(0 if scale is None else scale.data_ptr() for scale in scales),
        _blocks(update), columns, place.base, place.stride,
    ]  # fmt: skip
    return update.row


def _of_group(group: dict[str, Any]) -> list[int]:
    """What the counting kernel needs of a group: where lr is, or lr itself; betas, decay, whether to correct."""
    lr, at = group["lr"], 0
    if isinstance(lr, Tensor) and lr.device.type == "cuda":
        if lr.dtype != torch.float32:
            raise ValueError(f"FusedAdam: lr as a tensor on a GPU must be float32, got {lr.dtype}: use lr.float().")
        at, lr = lr.data_ptr(), 0.0
    numbers = [_bits(float(x)) for x in (lr, *group["betas"], group["weight_decay"])]
    return [at, *numbers, int(group["bias_correction"])]


def _bits(number: float) -> int:
    """A float64 as an int64."""
    return struct.unpack("<q", struct.pack("<d", number))[0]


def mark_written(updates: Iterable[Update]) -> None:
    """The kernel writes behind torch's back: autograd has to see it, and whoever keeps FP8 copies of weights that were just changed."""
    tensors: list[Tensor] = []
    for update in updates:
        tensors += update.state.values()
        if not has_bytes_only(update.param):
            tensors.append(update.working)
        if isinstance(update.param, Weight):
            update.param.memory.made_from = {}  # an alias of a weight has a version of its own; its memory is shared
    torch.autograd.graph.increment_version(tensors)
