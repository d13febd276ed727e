"""Products with their collectives as ops that a compiler takes as they are: what strategies call while `torch.compile` traces.

A compiled block has one node for a gather and its product; what happens inside, chunk by chunk, is the engine's. Collectives that travel
under another product are two nodes: one begins and gives a token, the other finishes. An op knows its strategy by a name (`register`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.registry import define
from ottava.nn.operand import Operand, token_dims
from ottava.nn.product import Product
from ottava.nn.strategy import Operands, Strategy
from ottava.quant.scheme import Scheme

_strategies: weakref.WeakValueDictionary[str, Strategy] = weakref.WeakValueDictionary()
_names = itertools.count()
_flights: dict[int, Callable[[], Any]] = {}
_tokens = itertools.count()

ops = torch.ops.ottava


def register(strategy: Strategy) -> str:
    """A name by which ops find `strategy`, as long as it lives."""
    name = f"{type(strategy).__name__} {next(_names)}"
    _strategies[name] = strategy
    return name


# ---------------------------------------------------------------------------------------------------- operands as arguments


def _tensors(operands: Operands) -> tuple[list[Tensor], list[Tensor], list[Tensor], str, str]:
    """data, scales and amaxes (empty tensors for None), scheme ("": none) and direction."""
    nothing = operands[0].data.new_empty(0)
    scales = [nothing if operand.scale_inv is None else operand.scale_inv for operand in operands]
    amaxes = [nothing if operand.amax is None else operand.amax for operand in operands]
    scheme = operands[0].scheme
    return [o.data for o in operands], scales, amaxes, "" if scheme is None else str(scheme), operands[0].direction


def _operands(data: list[Tensor], scales: list[Tensor], amaxes: list[Tensor], scheme: str, direction: str) -> Operands:
    if not scheme:
        return [Operand(part, direction=direction) for part in data]
    parsed = Scheme.parse(scheme)
    return [Operand(d, s, a, parsed, direction) for d, s, a in zip(data, scales, amaxes)]


def _replaced(operands: Operands, data: list[Tensor], scales: list[Tensor]) -> Operands:
    return [
        operand._replace(data=d, scale_inv=None if operand.scale_inv is None else s)
        for operand, d, s in zip(operands, data, scales)
    ]


def _begin(finish: Callable[[], Any]) -> Tensor:
    token = next(_tokens)
    _flights[token] = finish
    return torch.tensor(token, dtype=torch.int64)


def _arrive(token: Tensor) -> Any:
    return _flights.pop(int(token))()


def _separate(tensor: Tensor, *inputs: Tensor) -> Tensor:
    """An op's result may not be one of its arguments."""
    return tensor.clone() if any(tensor is given for given in inputs) else tensor


# --------------------------------------------------------------------------------------------------------------------- ops


def _fprop(
    name: str,
    data: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scheme: str,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    weight_amaxes: list[Tensor],
    weight_scheme: str,
    biases: list[Tensor],
    dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    operands = _operands(data, scales, amaxes, scheme, "rowwise")
    multiply = Product(
        _operands(weights, weight_scales, weight_amaxes, weight_scheme, "rowwise"), dtype, split_accumulator
    )
    return _strategies[name].fprop(operands, multiply, biases)


def _fprop_fake(
    name: str,
    data: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scheme: str,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    weight_amaxes: list[Tensor],
    weight_scheme: str,
    biases: list[Tensor],
    dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    rows = sum(_strategies[name].output_tokens(part.shape[0]) for part in data)
    return data[0].new_empty(rows, weights[0].shape[0], dtype=dtype)


def _dgrad(
    name: str,
    data: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scheme: str,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    weight_amaxes: list[Tensor],
    weight_scheme: str,
    weight_direction: str,
    extra: Tensor | None,
    dtype: torch.dtype,
    split_accumulator: bool,
    parts: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(a token of the input's gradient, the gradients of all tokens and their scales where those were gathered)."""
    grads = _operands(data, scales, amaxes, scheme, "rowwise")
    side = _operands(weights, weight_scales, weight_amaxes, weight_scheme, weight_direction)
    multiply = Product(side, dtype, split_accumulator, parts, extra)
    finish, whole = _strategies[name].dgrad(grads, multiply)
    if not _strategies[name].gathers_grad:
        return _begin(finish), [], []
    found = _tensors(whole)
    return (
        _begin(finish),
        [_separate(t, *data) for t in found[0]],
        [_separate(t, *scales, *found[0]) for t in found[1]],
    )


def _dgrad_fake(
    name: str,
    data: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scheme: str,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    weight_amaxes: list[Tensor],
    weight_scheme: str,
    weight_direction: str,
    extra: Tensor | None,
    dtype: torch.dtype,
    split_accumulator: bool,
    parts: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    token = torch.empty((), dtype=torch.int64, device="cpu")
    strategy = _strategies[name]
    if not strategy.gathers_grad:
        return token, [], []
    return (token, *_gathered_like(strategy.size, data, scales, scheme, "rowwise"))


def _gathered_like(
    size: int, data: list[Tensor], scales: list[Tensor], scheme: str, direction: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Empty tensors like the operands of all tokens."""
    dims = token_dims(_operands(data[:1], scales[:1], scales[:1], scheme, direction)[0])

    def longer(x: Tensor, dim: int | None) -> Tensor:
        shape = list(x.shape)
        if dim is not None:
            shape[dim] *= size
        return x.new_empty(shape)

    return [longer(x, dims.data) for x in data], [longer(x, dims.scale) for x in scales]


def _finish_dgrad(token: Tensor, like: Tensor, rows: int, features: int, dtype: torch.dtype) -> Tensor:
    """The gradient of the stage's input, [rows, features]."""
    return _arrive(token)


def _finish_dgrad_fake(token: Tensor, like: Tensor, rows: int, features: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(rows, features, dtype=dtype)


def _gather(
    name: str, data: list[Tensor], scales: list[Tensor], amaxes: list[Tensor], scheme: str, direction: str
) -> Tensor:
    """A token of the operands of all tokens."""
    strategy: Any = _strategies[name]
    return _begin(strategy.begin_gather_tokens(_operands(data, scales, amaxes, scheme, direction)))


def _gather_fake(
    name: str, data: list[Tensor], scales: list[Tensor], amaxes: list[Tensor], scheme: str, direction: str
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _finish_gather(
    token: Tensor, name: str, data: list[Tensor], scales: list[Tensor], scheme: str, direction: str
) -> tuple[list[Tensor], list[Tensor]]:
    """The operands of all tokens: their bytes and scales."""
    found = _tensors(_arrive(token))
    return [_separate(t, *data) for t in found[0]], [_separate(t, *scales, *found[0]) for t in found[1]]


def _finish_gather_fake(
    token: Tensor, name: str, data: list[Tensor], scales: list[Tensor], scheme: str, direction: str
) -> tuple[list[Tensor], list[Tensor]]:
    return _gathered_like(_strategies[name].size, data, scales, scheme, direction)


def _gather_one(name: str, x: Tensor, dim: int) -> Tensor:
    """See `Strategy.gather`."""
    return _strategies[name].gather(x, dim)


def _gather_one_fake(name: str, x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= _strategies[name].size
    return x.new_empty(shape)


def _sum_over_ranks(name: str, x: Tensor) -> Tensor:
    """The sum of x over the strategy's ranks."""
    strategy: Any = _strategies[name]
    return _separate(strategy.sum_over_ranks(x), x)


def _sum_over_ranks_fake(name: str, x: Tensor) -> Tensor:
    return torch.empty_like(x)


define("tp_fprop", _fprop, _fprop_fake)
define("tp_dgrad", _dgrad, _dgrad_fake)
define("tp_finish_dgrad", _finish_dgrad, _finish_dgrad_fake)
define("tp_gather", _gather, _gather_fake)
define("tp_finish_gather", _finish_gather, _finish_gather_fake)
define("tp_gather_one", _gather_one, _gather_one_fake)
define("tp_sum", _sum_over_ranks, _sum_over_ranks_fake)


# ------------------------------------------------------------------------------------------------ what strategies call


def fprop(name: str, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
    """`Strategy.fprop` as one node."""
    data, scales, amaxes, scheme, _ = _tensors(operands)
    weights, weight_scales, weight_amaxes, weight_scheme, _ = _tensors(multiply.weights)
    return ops.tp_fprop(
        name, data, scales, amaxes, scheme, weights, weight_scales, weight_amaxes, weight_scheme, biases,
        multiply.dtype, multiply.split_accumulator,
    )  # fmt: skip


def dgrad(strategy: Any, grads: Operands, multiply: Product, input_rows: int) -> tuple[Callable[[], Tensor], Operands]:
    """`Strategy.dgrad` as one node, and one that finishes. input_rows: of the input's gradient on this rank."""
    data, scales, amaxes, scheme, _ = _tensors(grads)
    weights, weight_scales, weight_amaxes, weight_scheme, weight_direction = _tensors(multiply.weights)
    token, whole, whole_scales = ops.tp_dgrad(
        strategy.handle, data, scales, amaxes, scheme, weights, weight_scales, weight_amaxes,
        weight_scheme, weight_direction, multiply.extra, multiply.dtype, multiply.split_accumulator, multiply.parts,
    )  # fmt: skip
    if strategy.gathers_grad:
        grads = _replaced(grads, whole, whole_scales)
    like, features, dtype = data[0], multiply.features, multiply.dtype
    return lambda: ops.tp_finish_dgrad(token, like, input_rows, features, dtype), grads


def gather(name: str, operands: Operands) -> Callable[[], Operands]:
    """The operands of all tokens, as a node that begins and one that finishes."""
    data, scales, amaxes, scheme, direction = _tensors(operands)
    token = ops.tp_gather(name, data, scales, amaxes, scheme, direction)

    def finish() -> Operands:
        whole, whole_scales = ops.tp_finish_gather(token, name, data, scales, scheme, direction)
        return _replaced(operands, whole, whole_scales)

    return finish


def gather_one(name: str, x: Tensor, dim: int) -> Tensor:
    """`Strategy.gather` as one node."""
    return ops.tp_gather_one(name, x, dim)


def sum_over_ranks(name: str, x: Tensor) -> Tensor:
    """The sum over the strategy's ranks, as one node."""
    return ops.tp_sum(name, x)
