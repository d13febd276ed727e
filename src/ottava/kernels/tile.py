"""The Triton kernel behind every quantizing op: a producer makes a float32 tile, a consumer turns it into bytes.

Producers: the tensor itself, a norm, an activation, an activation's backward; gated or not. Consumers: rowwise and columnwise
copies of any scheme, an amax, a sum over rows, or a plain rounded copy. One kernel, specialised at compile time, so each
combination reads its inputs once and writes its outputs once, and a new producer serves every recipe.

Speed of light on an H200 is 4.25 TB/s (measured copy); a cast with transpose of bf16 moves 4 bytes an element.

[Note: plans] What a call does follows from the producer's facts, shapes, dtypes and the scheme: sizes of the outputs, the tile, forty
kernel arguments. All of it is settled once for each such key (`_Plan`); a call then looks the plan up, allocates and launches.

Compiled with `enable_fp_fusion=False`: a fused multiply-add would round differently from the torch reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels import activation as activations
from ottava.kernels import activation_amax_triton, tally
from ottava.kernels.cast import Buffers, BufferTensors, check_scale, reference_buffers
from ottava.kernels.launch import Launch, Launcher
from ottava.kernels.tile_kernel import tile_kernel
from ottava.kernels.zeros import zero_like
from ottava.quant.scheme import Scheme

# -------------------------------------------------------------------------------------------------------------- producers


class Producer:
    """What fills a tile, from `x` [M, K] and other tensors."""

    name = "identity"
    variant: str | None = None
    """Where a tile of its own is best, what it is called in `_TILES`."""
    rounds = True
    """Whether the output is rounded to the activation dtype unless the scheme takes float32."""
    facts: tuple = ()
    """All that a plan depends on beside x: numbers, dtypes and strides of `tensors`."""
    tensors: tuple[Tensor, ...] = ()
    """What the kernel reads beside x, in the order of `pointers`."""

    x: Tensor
    """[M, K], with rows that are contiguous."""

    def columns(self) -> int:
        """Columns that the grid covers."""
        return self.x.shape[1]

    def has_dtype(self, rounds: bool) -> bool:
        """Whether all that it makes has the activation dtype's precision, if the output is rounded to it or not."""
        return rounds or not self.rounds

    def width(self) -> int:
        """Columns of the output."""
        return self.columns()

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments that differ from the defaults."""
        return {}

    def pointers(self) -> tuple[str, ...]:
        """The kernel's names for `tensors`."""
        return ()


class Identity(Producer):
    """The tensor itself. Whoever makes one sets `x`: a constructor would be a call more in every cast."""

    rounds = False


class Norm(Producer):
    """A normalized tensor, from its statistics."""

    name = "norm"

    def __init__(
        self, x: Tensor, gamma: Tensor, beta: Tensor | None, mean: Tensor, rstd: Tensor, zero_centered: bool
    ) -> None:
        self.x = x if x.stride(-1) == 1 else x.contiguous()
        center = mean.numel() > 0
        self.facts = (
            gamma.dtype, None if beta is None else beta.dtype, mean.dtype if center else None, rstd.dtype, zero_centered
        )  # fmt: skip
        self.tensors = (gamma, rstd)
        if center:
            self.tensors += (mean,)
        if beta is not None:
            self.tensors += (beta,)

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        _, beta, mean, _, zero_centered = self.facts
        return {"BETA": beta is not None, "CENTER": mean is not None, "ZERO_CENTERED": zero_centered}

    def pointers(self) -> tuple[str, ...]:
        """See `Producer.pointers`."""
        _, beta, mean, _, _ = self.facts
        return ("gamma_ptr", "rstd_ptr", *["mean_ptr"] * (mean is not None), *["beta_ptr"] * (beta is not None))


class Activation(Producer):
    """An activation of the tensor."""

    name = "activation"

    def __init__(self, x: Tensor, activation: activations.Activation) -> None:
        self.x = x if x.stride(-1) == 1 else x.contiguous()
        self.facts = (activation.base, activation.gated)

    def columns(self) -> int:
        """See `Producer.columns`."""
        return self.x.shape[1] // 2 if self.facts[1] else self.x.shape[1]

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        return {"ACT": self.facts[0], "GATED": self.facts[1]}


class ActivationBackward(Activation):
    """The gradient of an activation's input."""

    name = "activation_backward"

    def __init__(self, dy: Tensor, x: Tensor, activation: activations.Activation) -> None:
        self.x = x if x.stride(-1) == 1 else x.contiguous()
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        self.facts = (activation.base, activation.gated, dy.dtype, dy.stride(0))
        self.tensors = (dy,)

    def width(self) -> int:
        """See `Producer.width`."""
        return self.x.shape[1]

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        return {**super().arguments(), "dy_stride": self.facts[3]}

    def pointers(self) -> tuple[str, ...]:
        """See `Producer.pointers`."""
        return ("dy_ptr",)


class ActivationBackwardWithOutput(ActivationBackward):
    """The same, and on the way the columnwise copy of what the activation gave in forward, into `output` and `output_scale`: it has all
    that is needed in registers, and so forward does not have to keep that copy.

    output_scheme: of the same kind and block as the gradient's (`fits`). given: the scale or the amax that forward quantized with; None
    for schemes whose scales follow from their blocks.
    """

    variant = "activation_backward_with_output"

    def __init__(
        self, dy: Tensor, x: Tensor, activation: activations.Activation, output_scheme: str, scale: Tensor | None, amax: Tensor | None
    ) -> None:  # fmt: skip
        super().__init__(dy, x, activation)
        kind = "given" if scale is not None else "blocks" if amax is None else "amax"
        self.facts = (*self.facts, output_scheme, kind)
        scheme, (m, k) = Scheme.parse(output_scheme), (x.shape[0], self.columns())
        self.output = x.new_empty(k, m, dtype=torch.uint8)
        scale_dtype = torch.uint8 if scheme.kind == "mx" else torch.float32
        self.output_scale = x.new_empty(scheme.scale_shape(k, m), dtype=scale_dtype)
        given = scale if scale is not None else amax
        self.tensors = (*self.tensors, *(() if given is None else (given,)), self.output, self.output_scale)

    def has_dtype(self, rounds: bool) -> bool:
        """See `Producer.has_dtype`."""
        return rounds and not Scheme.parse(self.facts[-2]).from_float32

    @staticmethod
    def fits(x: Tensor, grad: Scheme, output: Scheme) -> bool:
        """Whether one kernel can make both, and is faster than two: tiles of 128 rows are too large for that."""
        kind = kind_of(grad)
        return kind == kind_of(output) and kind in ("tensor", "mx") and x.shape[0] % 2 == 0 and x.numel() > 0

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        *_, output_scheme, kind = self.facts
        scheme = Scheme.parse(output_scheme)
        return {
            **super().arguments(), "OUTPUT": kind, "OUTPUT_E5M2": scheme.format == "e5m2", "OUTPUT_MAX": scheme.element.max,
            "OUTPUT_EPSILON": scheme.epsilon, "OUTPUT_POWER_OF_TWO": scheme.power_of_two, "OUTPUT_ROUND": not scheme.from_float32,
        }  # fmt: skip

    def pointers(self) -> tuple[str, ...]:
        """See `Producer.pointers`."""
        given = () if self.facts[-1] == "blocks" else ("output_in_ptr",)
        return (*super().pointers(), *given, "output_ptr", "output_scale_ptr")

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        """(data, scale_inv, amax) of the columnwise copy, once the kernel has run. The amax is empty, as in `Buffers`."""
        return self.output, self.output_scale, self.output_scale.new_empty(0, dtype=torch.float32)


def packs(x: Tensor) -> bool:
    """Whether two numbers that are rounded to x's dtype can be kept as one (magnitudes_triton.py, [Note: packed]), whose instructions came
    with Hopper."""
    return x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def kind_of(scheme: Scheme) -> str:
    """The kernel's name for it."""
    return scheme.kind if scheme.kind != "block" else ("block1d" if scheme.block == (1, 128) else "block2d")


# ------------------------------------------------------------------------------------------------------------------ launch

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("dy_ptr", "gamma_ptr", "beta_ptr", "mean_ptr", "rstd_ptr", "scale_ptr", "amax_in_ptr", "bad_ptr")),
    **dict.fromkeys(("row_ptr", "row_scale_ptr", "col_ptr", "col_scale_ptr", "amax_ptr", "sum_ptr", "values_ptr")),
    **dict.fromkeys(("output_in_ptr", "output_ptr", "output_scale_ptr")),
    "OUTPUT": "none", "OUTPUT_E5M2": False, "OUTPUT_MAX": 448.0, "OUTPUT_EPSILON": 0.0, "OUTPUT_POWER_OF_TWO": False, "OUTPUT_ROUND": False,
    "dy_stride": 0, "col_stride": 0, "ACT": "none", "GATED": False, "BETA": False, "CENTER": False, "ZERO_CENTERED": False, "SCALE": "none",
    "E5M2": False, "FP8_MAX": 448.0, "EPSILON": 0.0, "POWER_OF_TWO": False, "INF_VALUE": 0.0, "ROWWISE": False, "COLUMNWISE": False,
    "AMAX": "none", "SUM": False, "ROUND": False, "PACK": False,
}  # fmt: skip


class _Tile(NamedTuple):
    """How the kernel is cut and run."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None
    """Of a thread, at most: fewer than it would take where more programs on a processor win more than what goes to memory costs."""


def _prepare(producer: Producer, tile: _Tile, pointers: tuple[str, ...], **arguments: Any) -> Launch:
    """A launch that takes x, the producer's tensors, and then `pointers`."""
    x, (bm, bk, warps, registers) = producer.x, tile
    m, k = x.shape[0], producer.columns()
    arguments = {
        **_DEFAULTS,
        "x_stride": x.stride(0),
        "M": m,
        "K": k,
        "PRODUCER": producer.name,
        "DTYPE": _TRITON_DTYPES[x.dtype],
        "EVEN": m % bm == 0 and k % bk == 0,
        "BM": bm,
        "BK": bk,
        **producer.arguments(),
        **arguments,
    }
    grid = (triton.cdiv(k, bk), triton.cdiv(m, bm))
    return _KERNEL.prepare(grid, warps, arguments, ("x_ptr", *producer.pointers(), *pointers), registers=registers)


_KERNEL = Launcher(tile_kernel)
# By kind, and by producer where that differs: the fastest of those tried on an H200 at 8192 rows (`ottava bench kernels`).
_TILES: dict[Any, _Tile] = {
    "tensor": _Tile(64, 128, 8),
    ("tensor", "activation"): _Tile(32, 128, 4, 64),
    ("tensor", "activation_backward"): _Tile(64, 128, 8, 80),
    ("tensor", "activation_backward_with_output"): _Tile(32, 128, 8, 80),
    ("mx", "activation_backward_with_output"): _Tile(64, 128, 8),
    "block1d": _Tile(128, 128, 4, 168),
    ("block1d", "activation"): _Tile(128, 128, 8, 80),
    ("block1d", "activation_backward"): _Tile(128, 128, 8, 128),
    "block2d": _Tile(128, 128, 16),
    ("block2d", "identity"): _Tile(128, 128, 8),
    ("block2d", "activation"): _Tile(128, 128, 8, 80),
    ("block2d", "activation_backward"): _Tile(128, 128, 16, 104),
    "mx": _Tile(64, 128, 4),
    "values": _Tile(32, 128, 4),
}


# ------------------------------------------------------------------------------------------------------------------- plans


class _Plan(NamedTuple):
    """See [Note: plans]. Shapes are (0,) where nothing is wanted."""

    launch: Launch
    row: tuple[int, ...]
    row_scale: tuple[int, ...]
    column: tuple[int, ...]
    """An even row length: columnwise bytes are stored in pairs."""
    column_scale: tuple[int, ...]
    scale_dtype: torch.dtype
    transposes_scales: bool
    """1x128 scales are stored with the row index fastest, as the block GEMM reads them."""
    cut: int | None
    """Rows of x, if `column` is longer."""
    amax: str
    """How the output's amax comes about: "kernel" (scales are given), "producer" (a launch of its own), "given" or "none"."""
    partial: tuple[int, int] | None
    """Of the sum over rows: one row for each row of tiles."""
    nothing: dict[int, Buffers]
    """By device, what stands for buffers that are not wanted: empty tensors, made once, since every allocation is 3 us of the host."""


def _nothing(plan: _Plan, x: Tensor) -> Buffers:
    """`plan.nothing` for x's device. Six tensors: an op may not return one twice."""
    byte, scale, amax = torch.uint8, plan.scale_dtype, torch.float32
    with torch.inference_mode(False):  # what is made in inference mode can never be saved for a backward
        made = Buffers(*(x.new_empty(0, dtype=dtype) for dtype in (byte, scale, byte, scale, amax, amax)))
    plan.nothing[x.get_device()] = made
    return made


_MOST_PLANS = 4096
_PLANS: dict[tuple, Any] = {}
"""By the key that `quantize`, `amax` and `store` make; None where `quantize` does not serve it."""


def forget_plans() -> None:
    """For those who change what plans are made from."""
    _PLANS.clear()


def _keep(key: tuple, plan: Any) -> Any:
    if len(_PLANS) >= _MOST_PLANS:  # shapes that come and go, as of experts
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def amax(producer: Producer) -> Tensor:
    """float32 [1]. Of the float32 values for activations, of the rounded ones otherwise (as the references do)."""
    x = producer.x
    out = zero_like(x)
    if x.numel() == 0:
        return out
    key = ("amax", producer.name, producer.facts, x.shape, x.stride(0), x.dtype)
    launch = _PLANS.get(key)
    if launch is None:
        launch = _keep(key, _amax_launch(producer))
    launch(x, *producer.tensors, out)
    return out


def _amax_launch(producer: Producer) -> Launch:
    """Takes x, the producer's tensors, and the amax."""
    if isinstance(producer, Activation) and producer.facts[0] in activation_amax_triton.BOUNDED:
        stride = producer.facts[3] if isinstance(producer, ActivationBackward) else None
        return activation_amax_triton.prepare(producer.x, producer.columns(), producer.facts[1], stride)
    unrounded = producer.name in ("identity", "activation")
    return _prepare(
        producer, _Tile(64, 128, 4), ("amax_ptr",), KIND="none", AMAX="unrounded" if unrounded else "rounded", ROUND=not unrounded
    )  # fmt: skip


def store(producer: Producer, dtype: torch.dtype) -> Tensor:
    """The produced values in the activation dtype [M, width]."""
    x = producer.x
    out = x.new_empty(x.shape[0], producer.width())
    if out.numel() == 0:
        return out.to(dtype)
    key = ("store", producer.name, producer.facts, x.shape, x.stride(0), x.dtype)
    launch = _PLANS.get(key)
    if launch is None:
        launch = _keep(key, _prepare(producer, _TILES["values"], ("values_ptr",), KIND="values", ROUND=False))
    launch(x, *producer.tensors, out)
    return out if out.dtype == dtype else out.to(dtype)


def supports(producer: Producer, scheme: Scheme) -> bool:
    """Whether `quantize` can do it; the torch reference, on the same device, does the rest.

    Not NVFP4, which Hopper cannot multiply anyway; not two ways at once, which the reference asks for one by one; not a gated backward
    whose halves share a block; and not rows of bytes that do not start on a 16-byte boundary: Triton 3.6 misplaced bytes of such tiles
    for float32 inputs. No FP8 GEMM takes those.
    """
    columns = producer.columns()
    gated_backward = columns != producer.width()
    return (
        scheme.kind != "nvfp4"
        and scheme.columns is None
        and columns % 16 == 0
        and not (gated_backward and scheme.block is not None and columns % 128)
    )


def quantize(
    producer: Producer,
    scheme: str,
    scale: Tensor | None,
    amax_in: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    sums: Tensor | None = None,
) -> BufferTensors | None:
    """The produced values, quantized; same bytes as the reference. None: not supported, so the reference has to do it.

    `sums`: float32 [width], receives the sum over rows. `amax_in` beside a `scale`: float32 [1], which the kernel raises to the amax that
    it finds, and which is returned as the amax. The ops do not say that they change it: only for callers of the function itself.
    """
    x = producer.x
    key = (
        producer.name, producer.facts, x.shape, x.stride(0), x.dtype, scheme, scale is None,
        None if amax_in is None else amax_in.dtype, rowwise, columnwise, sums is None,
    )  # fmt: skip
    try:
        plan: _Plan | None = _PLANS[key]
    except KeyError:
        plan = _keep(key, _quantize_plan(producer, Scheme.parse(scheme), scale, amax_in, rowwise, columnwise, sums))
    if plan is None:
        return None
    if scale is not None and (scale.dtype is not torch.float32 or scale.numel() != 1):
        check_scale(scale)  # raises
    if x.shape[0] == 0 or x.shape[1] == 0:
        values = x.new_empty(x.shape[0], producer.width())
        return reference_buffers(values, Scheme.parse(scheme), scale, amax_in, rowwise, columnwise, x.dtype)
    device = x.get_device()
    counters = tally.counters.get(device)
    tensors: list[Any] = [x, *producer.tensors, tally.counter(x) if counters is None else counters[tally.slot]]
    nothing = plan.nothing.get(device) or _nothing(plan, x)
    if plan.amax == "kernel":
        amax_out = zero_like(x) if amax_in is None else amax_in
        tensors += (scale, amax_out)
    elif plan.amax == "producer":
        amax_out = amax(producer)
        tensors += (amax_out, amax_out)
    elif plan.amax == "given":
        amax_out = x.new_empty(1, dtype=torch.float32)
        tensors += (amax_in, amax_out)
    else:
        amax_out = nothing.rowwise_amax
    row, row_scale, column, column_scale = nothing[:4]
    if rowwise:
        row, row_scale = x.new_empty(plan.row, dtype=torch.uint8), x.new_empty(plan.row_scale, dtype=plan.scale_dtype)
        tensors += (row, row_scale)
    if columnwise:
        column = x.new_empty(plan.column, dtype=torch.uint8)
        column_scale = x.new_empty(plan.column_scale, dtype=plan.scale_dtype)
        tensors += (column, column_scale)
    if plan.partial is None:
        plan.launch(*tensors)
    else:
        partial = x.new_empty(plan.partial, dtype=torch.float32)
        plan.launch(*tensors, partial)
        torch.sum(partial, dim=0, out=sums)
    if plan.transposes_scales:
        row_scale = row_scale.t() if rowwise else row_scale
        column_scale = column_scale.t() if columnwise else column_scale
    if plan.cut is not None and columnwise:
        column = column[:, : plan.cut].contiguous()
    return row, row_scale, column, column_scale, amax_out, nothing.columnwise_amax


def _quantize_plan(
    producer: Producer,
    scheme: Scheme,
    scale: Tensor | None,
    amax_in: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    sums: Tensor | None,
) -> _Plan | None:
    if not supports(producer, scheme):
        return None
    x = producer.x
    m, width = x.shape[0], producer.width()
    kind = kind_of(scheme)
    tile = _TILES.get((kind, producer.variant or producer.name), _TILES[kind])
    source = "none"
    if scheme.per_tensor:
        source = "kernel" if scale is not None else "producer" if amax_in is None else "given"
    pointers: tuple[str, ...] = ("bad_ptr",)
    pointers += {"none": (), "kernel": ("scale_ptr", "amax_ptr")}.get(source, ("amax_in_ptr", "amax_ptr"))
    pointers += ("row_ptr", "row_scale_ptr") if rowwise else ()
    pointers += ("col_ptr", "col_scale_ptr") if columnwise else ()
    pointers += ("sum_ptr",) if sums is not None else ()
    rounds = producer.rounds and not scheme.from_float32
    launch = _prepare(
        producer, tile, pointers, KIND=kind, E5M2=scheme.format == "e5m2", FP8_MAX=scheme.element.max,
        EPSILON=scheme.epsilon, POWER_OF_TWO=scheme.power_of_two,
        INF_VALUE=torch.finfo(torch.float32 if kind == "tensor" else x.dtype).max,
        ROWWISE=rowwise, COLUMNWISE=columnwise, ROUND=rounds, PACK=kind != "mx" and producer.has_dtype(rounds) and packs(x),
        AMAX={"kernel": "rounded", "given": "copy"}.get(source, "none"), SUM=sums is not None,
        SCALE={"none": "none", "kernel": "given"}.get(source, "amax"), col_stride=m + m % 2,
    )  # fmt: skip

    def scales(rows: int, columns: int) -> tuple[int, ...]:
        shape = scheme.scale_shape(rows, columns)
        return shape[::-1] if kind == "block1d" else shape

    return _Plan(
        launch,
        (m, width) if rowwise else (0,),
        scales(m, width) if rowwise else (0,),
        (width, m + m % 2) if columnwise else (0,),
        scales(width, m) if columnwise else (0,),
        torch.uint8 if kind == "mx" else torch.float32,
        kind == "block1d",
        m if m % 2 else None,
        source,
        (triton.cdiv(m, tile.rows), width) if sums is not None else None,
        {},
    )
