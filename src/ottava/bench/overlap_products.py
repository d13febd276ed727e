"""The twelve products of a tensor-parallel layer, and the collective that each can hide: what `ottava bench overlap` times.

Everything goes through the strategies that modules hold, with operands as modules make them; so what is timed is what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.kernels import cast
from ottava.nn.operand import Operand, columnwise, rowwise, transposed
from ottava.nn.options import NO_OVERLAP, OverlapOptions
from ottava.nn.product import Product, product
from ottava.nn.strategy import Later, backend
from ottava.overlap import bulk, collectives
from ottava.overlap.cost import Choice, crossing, machine_of
from ottava.overlap.cost import Product as Sizes
from ottava.overlap.engine import Engine, gathered_product, scattered_product, travelling_bytes
from ottava.overlap.schedule import Schedule
from ottava.overlap.transports import transport_of
from ottava.plan.overlap_time import LayerShape
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import Scheme

PRODUCTS = ("qkv", "proj", "fc1", "fc2")
DIRECTIONS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Setting:
    """What is the same for all products of a run."""

    group: Any
    device: torch.device
    dtype: torch.dtype
    """Of activations."""
    shape: LayerShape
    tokens: int
    """Of all ranks."""
    method: str
    """As a plan's `overlap` says it."""
    transport: str = "auto"
    quantization: Quantization | None = None
    by_transport: bool = False
    """Collectives that nothing hides go through the engine's transport too: it is a virtual link, or the group has no collectives worth
    comparing with on this device."""

    @property
    def size(self) -> int:
        """Ranks."""
        return dist.get_world_size(self.group)

    def options(self, method: str) -> OverlapOptions:
        """Of a stage whose products are always cut."""
        return OverlapOptions(method=method, transport=self.transport, minimum_tokens=0)


@dataclass(frozen=True)
class Case:
    """One product, and what travels under it. All callables run on all ranks together and return tensors to be compared."""

    product: str
    direction: str
    collective: str
    """ "all-gather", "reduce-scatter", both, or "" where nothing travels."""
    method: str
    multiply: Callable[[], Any]
    """The product alone, of all tokens."""
    communicate: Callable[[], Any] | None = None
    """The collective alone."""
    sequential: Callable[[], list[Tensor]] | None = None
    overlapped: Callable[[], list[Tensor]] | None = None
    bytes_sent: int = 0
    """By this rank."""
    choice: Choice | None = None
    """What the engine would do with these sizes."""
    crossing: int | None = None
    """Tokens from which on it cuts the product."""

    @property
    def name(self) -> str:
        """ "qkv forward"."""
        return f"{self.product} {self.direction}"


class _Ready(Product):
    """A product that was made before: what is left of a schedule is its communication."""

    def __init__(self, out: Tensor) -> None:
        object.__setattr__(self, "out", out)
        object.__setattr__(self, "weights", [Operand(out.new_empty(out.shape[1], 1))])
        object.__setattr__(self, "dtype", out.dtype)
        object.__setattr__(self, "extra", out)  # it cannot be made in chunks

    def __call__(self, operands: list[Operand], biases: Any = ()) -> Tensor:
        return self.out  # type: ignore[attr-defined]


class _Copies(NamedTuple):
    """A tensor as both directions of a product take it."""

    rows: Operand
    columns: Operand


def _copies(x: Tensor, scheme: Scheme | None, own: slice | None = None) -> _Copies:
    """x [M, K], quantized as a whole; own: rows of this rank, which has them alone."""
    part = x if own is None else x[own].contiguous()
    if scheme is None:
        return _Copies(Operand(part), Operand(part))
    amax = cast.operand_amax(x, scheme) if scheme.needs_tensor_amax else None
    scale = None
    q = cast.Buffers(*torch.ops.ottava.quantize(part, str(scheme), scale, amax, True, True))
    return _Copies(rowwise(q, scheme), columnwise(q, scheme))


class Stage:
    """One matrix of the layer on this rank, with operands of a step."""

    def __init__(self, setting: Setting, name: str) -> None:
        self.setting, self.name = setting, name
        shape, size, rank = setting.shape, setting.size, dist.get_rank(setting.group)
        outputs, inputs = {
            "qkv": (shape.qkv // size, shape.hidden), "proj": (shape.hidden, shape.hidden // size),
            "fc1": (shape.fc1 // size, shape.hidden), "fc2": (shape.hidden, shape.ffn // size),
        }[name]  # fmt: skip
        self.mode = "column" if name in ("qkv", "fc1") else "row"
        own = slice(rank * setting.tokens // size, (rank + 1) * setting.tokens // size)
        q, column = setting.quantization, self.mode == "column"
        common = torch.Generator(device=setting.device).manual_seed(PRODUCTS.index(name))
        special = torch.Generator(device=setting.device).manual_seed(100 + rank)
        x = self._draw((setting.tokens, inputs), common if column else special)
        dy = self._draw((setting.tokens, outputs), special if column else common)
        w = self._draw((outputs, inputs), special) * inputs**-0.5
        self.x = _copies(x, q.input if q else None, own if column else None)
        self.whole_x = _copies(x, q.input if q else None)
        self.dy = _copies(dy, q.grad if q else None, None if column else own)
        self.whole_dy = _copies(dy, q.grad if q else None)
        weight = _copies(w, q.weight if q else None)
        splits = (q.split_fprop, q.split_dgrad) if q else (False, False)
        turned = weight.columns if q else Operand(w.t())
        self.fprop = Product([weight.rows], setting.dtype, splits[0])
        self.dgrad = Product([turned], setting.dtype, splits[1])
        self.off: Any = backend().strategy(self.mode, setting.group, True, NO_OVERLAP, name)
        self.on: Any = backend().strategy(self.mode, setting.group, True, setting.options(setting.method), name)
        self.schedule = Schedule.of(setting.method)

    def _draw(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        device = self.setting.device
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.setting.dtype)

    def chooser(self) -> Engine:
        """An engine that decides by sizes, as in training. It warns of nothing: the table says what it would do."""
        return Engine(self.setting.group, replace(self.schedule, transport=self.setting.transport, requested=()))

    @property
    def two_copies(self) -> bool:
        """Whether a gradient's columnwise copy travels beside its rowwise one."""
        scheme = self.dy.rows.scheme
        return scheme is not None and scheme.two_copies

    def wgrad(self) -> Tensor:
        """The weight's gradient, of all tokens."""
        q = self.setting.quantization
        columns, operand = self.whole_dy.columns, self.whole_x.columns
        if q is None:
            columns, operand = transposed(columns), transposed(operand)
        return product([columns], [operand], [], self.setting.dtype, q.split_wgrad if q else False)

    # ------------------------------------------------------------------------------------------------- collectives alone

    def gather(self, *operands: Operand) -> list[Operand]:
        """The operands of all ranks' tokens, waited for."""
        if self.setting.by_transport:
            transport = Engine(self.setting.group, self.schedule).transport(operands[0].data)
            assert transport is not None
            return [bulk.begin_gather(transport, [operand])()[0] for operand in operands]
        return [self.off.gather_tokens(operand) for operand in operands]

    def scatter(self, y: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks, waited for."""
        if self.setting.by_transport:
            transport = Engine(self.setting.group, self.schedule).transport(y)
            assert transport is not None
            return bulk.begin_scatter(transport, y, [y.shape[0]])(None)
        return collectives.reduce_scatter(y, self.setting.group)

    def gathered_bytes(self, *operands: Operand) -> int:
        """That this rank sends of them."""
        return (self.setting.size - 1) * travelling_bytes(list(operands))

    def scattered_bytes(self, y: Tensor) -> int:
        """That this rank sends of y."""
        return y.nbytes * (self.setting.size - 1) // self.setting.size


def _data(operands: list[Operand]) -> list[Tensor]:
    return [operand.data for operand in operands]


def cases(setting: Setting, names: Sequence[str] = PRODUCTS, directions: Sequence[str] = DIRECTIONS) -> Iterator[Case]:
    """All twelve, or some, one after the other: the operands of one are gone when the next is made."""
    for name in names:
        stage = Stage(setting, name)
        make = _column if stage.mode == "column" else _row
        for direction in directions:
            yield make(stage, direction)


def _column(stage: Stage, direction: str) -> Case:
    """qkv and fc1: x is gathered, the gradient of x is summed."""
    if direction == "forward":
        return _gathered_product(stage, "forward", stage.x.rows, stage.whole_x.rows, stage.fprop, None)
    pipelined = stage.schedule.scatter_dgrad == "pipeline"
    rows, columns = stage.dy.rows, stage.x.columns
    if direction == "wgrad":
        return Case(stage.name, "wgrad", "", "", stage.wgrad) if pipelined else _sum_under_wgrad(stage)
    whole = stage.dgrad([rows])

    def sequential() -> list[Tensor]:
        gathered = stage.gather(columns)
        y = stage.dgrad([rows])
        return [*_data(gathered), stage.scatter(y) if pipelined else y]

    def overlapped() -> list[Tensor]:
        arriving = stage.on.before_wgrad([columns])
        y = stage.on.dgrad([rows], stage.dgrad)[0]() if pipelined else stage.dgrad([rows])
        return [*_data(arriving()), y]

    sent = stage.gathered_bytes(columns) + (stage.scattered_bytes(whole) if pipelined else 0)
    choice = crossing_at = None
    if pipelined:
        choice = stage.chooser().choose_scatter([rows], whole.shape[1], whole.dtype, dgrad=True)
        if not choice.overlaps:  # the sum goes under wgrad then
            choice = replace(choice, method="bulk")
        crossing_at = _crossing("scatter", stage, scattered_product([rows], whole.shape[1], whole.dtype))
    return Case(
        stage.name, "dgrad", "all-gather + reduce-scatter" if pipelined else "all-gather", "pipeline" if pipelined else "bulk",
        lambda: stage.dgrad([rows]), lambda: (stage.gather(columns), pipelined and stage.scatter(whole)), sequential, overlapped, sent,
        choice, crossing_at,
    )  # fmt: skip


def _sum_under_wgrad(stage: Stage) -> Case:
    rows = stage.dy.rows
    made = stage.dgrad([rows])

    def sequential() -> list[Tensor]:
        total = stage.scatter(made)
        return [stage.wgrad(), total]

    def overlapped() -> list[Tensor]:
        total, _ = stage.on.dgrad([rows], _Ready(made))
        return [stage.wgrad(), total()]

    sent = stage.scattered_bytes(made)
    return Case(
        stage.name,
        "wgrad",
        "reduce-scatter",
        "bulk",
        stage.wgrad,
        lambda: stage.scatter(made),
        sequential,
        overlapped,
        sent,
    )


def _row(stage: Stage, direction: str) -> Case:
    """proj and fc2: the gradient of y is gathered, y is summed."""
    if direction == "wgrad":
        return Case(stage.name, "wgrad", "", "", stage.wgrad)
    if direction == "dgrad":
        columns = stage.dy.columns if stage.two_copies else None
        return _gathered_product(stage, "dgrad", stage.dy.rows, stage.whole_dy.rows, stage.dgrad, columns)
    rows = stage.x.rows
    made = stage.fprop([rows])
    engine = stage.chooser()
    choice = engine.choose_scatter([rows], made.shape[1], made.dtype)
    sizes = scattered_product([rows], made.shape[1], made.dtype)
    return Case(
        stage.name, "forward", "reduce-scatter", stage.schedule.scatter, lambda: stage.fprop([rows]), lambda: stage.scatter(made),
        lambda: [stage.scatter(stage.fprop([rows]))], lambda: [stage.on.fprop([rows], stage.fprop, [])],
        stage.scattered_bytes(made), choice, _crossing("scatter", stage, sizes),
    )  # fmt: skip


def _gathered_product(
    stage: Stage, direction: str, part: Operand, whole: Operand, multiply: Product, columns: Operand | None
) -> Case:
    """A product of all ranks' tokens. columns: another copy of the tokens, which wgrad needs."""
    travelling = [part] if columns is None else [part, columns]

    def sequential() -> list[Tensor]:
        gathered = stage.gather(*travelling)
        return [multiply([gathered[0]]), *_data(gathered[1:])]

    def overlapped() -> list[Tensor]:
        if direction == "forward":
            return [stage.on.fprop([part], multiply, [])]
        if columns is None:
            return [stage.on.dgrad([part], multiply)[0]()]
        later = Later(lambda: stage.on.begin_columns([columns]))
        out, _ = stage.on.dgrad([part], multiply, later.begin)
        return [out(), *_data(later())]

    engine = stage.chooser()
    choice = engine.choose_gather([part], multiply.features)
    sizes = gathered_product([part], multiply.features, stage.setting.size)
    return Case(
        stage.name, direction, "all-gather" if columns is None else "all-gather, twice", stage.schedule.gather,
        lambda: multiply([whole]), lambda: stage.gather(*travelling), sequential, overlapped,
        stage.gathered_bytes(*travelling), choice, _crossing("gather", stage, sizes),
    )  # fmt: skip


def _crossing(collective: str, stage: Stage, sizes: Sizes) -> int | None:
    method = stage.schedule.gather if collective == "gather" else stage.schedule.scatter
    transport = transport_of(stage.setting.group, stage.setting.transport, stage.setting.device)
    machine = machine_of(stage.setting.device.type, None if transport is None else transport.link())
    return None if method == "none" else crossing(collective, method, sizes, stage.setting.size, machine)
