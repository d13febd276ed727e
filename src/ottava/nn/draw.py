"""First values of weights, by parameter name and global index: a model starts the same on 1 rank and on 1,024.

A matrix is drawn in slabs of 64 rows of the FULL matrix, each slab from a generator keyed by (parameter name, slab, seed). Whoever
asks for a part (rows, columns, both) draws the slabs that the part touches and keeps its share: the bits do not depend on which
part is asked for, by whom, or in which order, and torch's own random streams neither matter nor move.

    >>> whole = draw("head.weight", (1000, 64), Normal(std=0.02))
    >>> part = draw("head.weight", (1000, 64), Normal(std=0.02), rows=slice(250, 500))
    >>> torch.equal(part, whole[250:500])
    True

Numbers are drawn on the CPU in float32 and rounded to the dtype asked for, also for a GPU: bf16 weights are the float32 ones,
rounded. Bits are equal between machines whose CPUs run the same torch kernels (all AVX2 or better, say); an x86 and an Arm
machine may differ in the last bit of a normal number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private

SLAB_ROWS = 64
DEFAULT_STD = 0.023  # TransformerEngine's default
InitMethod = Callable[[Tensor], Any]

# ----------------------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Normal:
    """Normal numbers.

    >>> draw("w", (4, 8), Normal(std=0.02)).shape
    torch.Size([4, 8])
    """

    mean: float = 0.0
    std: float = DEFAULT_STD

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Draws one slab."""
        slab.normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Uniform numbers in [low, high).

    >>> draw("w", (4, 8), Uniform(-1, 1)).shape
    torch.Size([4, 8])
    """

    low: float = 0.0
    high: float = 1.0

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Draws one slab."""
        slab.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Constant:
    """One value everywhere.

    >>> draw("gain", (4,), Constant(1.0))
    tensor([1., 1., 1., 1.])
    """

    value: float = 0.0

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Fills one slab."""
        slab.fill_(self.value)


@dataclass(frozen=True)
class Elementwise:
    """A user's `init_method` that treats all elements alike, so that it may be given 64 rows at a time.

    >>> draw("w", (4, 4), Elementwise(lambda w: w.normal_().mul_(0.02))).shape
    torch.Size([4, 4])
    """

    function: InitMethod

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Runs the function on one slab; it draws from torch's default stream, which is `generator`'s meanwhile."""
        with default_stream(generator.get_state()):
            self.function(slab)


@dataclass(frozen=True)
class Whole:
    """A user's `init_method` that looks at the whole matrix (`orthogonal_`, or anything that asks for the shape).

    The full matrix is drawn in float32 on the CPU, cut, and thrown away: one weight at a time is held whole.

    >>> draw("w", (8, 4), Whole(torch.nn.init.orthogonal_), rows=slice(0, 2)).shape
    torch.Size([2, 4])
    """

    function: InitMethod


@dataclass(frozen=True)
class ZeroRows:
    """`method`, but rows `start` to `stop` are 0: padding of a vocabulary, or a padding token.

    >>> draw("embedding.weight", (8, 4), ZeroRows(Normal(), start=6))[6:].any()
    tensor(False)
    """

    method: Any
    start: int
    stop: int | None = None


@dataclass(frozen=True)
class InitSlice:
    """A parameter that is a part of a larger matrix and is not a DTensor that would say so: a shard over a tensor-parallel group.

    shape: of the full matrix; start: where the parameter's first element lies in it.

    >>> InitSlice(Normal(std=0.02), shape=(1024, 64), start=(512, 0))  # the second of two ranks
    InitSlice(method=Normal(mean=0.0, std=0.02), shape=(1024, 64), start=(512, 0))
    """

    method: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """Values that are there already, of the full shape."""

    tensor: Tensor


_METHODS = (Normal, Uniform, Constant, Elementwise, Whole, ZeroRows, InitSlice, Given)
_ELEMENTWISE = "ottava_elementwise"
_TORCH_ELEMENTWISE = tuple(
    getattr(nn.init, name) for name in ("normal_", "uniform_", "trunc_normal_", "constant_", "zeros_", "ones_")
)


def elementwise(function: InitMethod) -> InitMethod:
    """Marks an `init_method` whose elements are drawn alike and independently, so that a rank need not draw the whole matrix.

    >>> @elementwise
    ... def small(weight):
    ...     torch.nn.init.normal_(weight, std=0.01)
    >>> layer = ottava.Linear(64, 64, init_method=small, device="meta")
    """
    setattr(function, _ELEMENTWISE, True)
    return function


def as_method(init_method: Any) -> Any:
    """What a module's `init_method` argument means: None is the default, torch's `normal_` and `uniform_` are `Normal` and `Uniform`, a
    marked function or another of torch's elementwise ones (also in a `functools.partial`) is `Elementwise`, any other function is `Whole`.

    >>> as_method(functools.partial(torch.nn.init.trunc_normal_, std=0.02)).__class__.__name__
    'Elementwise'
    """
    if init_method is None:
        return Normal()
    if isinstance(init_method, _METHODS):
        return init_method
    if not callable(init_method):
        raise ValueError(
            f"An init method must be a function of a tensor, or Normal, Uniform, Constant, ...; got {init_method!r}."
        )
    known = _as_known(init_method)
    if known is not None:
        return known
    inner = init_method
    while isinstance(inner, functools.partial):
        if getattr(inner, _ELEMENTWISE, False):
            return Elementwise(init_method)
        inner = inner.func
    if getattr(inner, _ELEMENTWISE, False) or inner in _TORCH_ELEMENTWISE:
        return Elementwise(init_method)
    return Whole(init_method)


def _as_known(init_method: Any) -> Normal | Uniform | None:
    """torch's `normal_` and `uniform_`, also in a partial with names: the same numbers, without torch's one default stream."""
    function, given = init_method, {}
    if isinstance(init_method, functools.partial) and not init_method.args:
        function, given = init_method.func, init_method.keywords
    if function is nn.init.normal_ and given.keys() <= {"mean", "std"}:
        return Normal(given.get("mean", 0.0), given.get("std", 1.0))
    if function is nn.init.uniform_ and given.keys() <= {"a", "b"}:
        return Uniform(given.get("a", 0.0), given.get("b", 1.0))
    return None


# ----------------------------------------------------------------------------------------------------------------- drawing


def draw(
    name: str,
    shape: tuple[int, ...],
    method: Any = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """Rows `rows` and columns `columns` of the matrix of `shape` that (name, seed) stands for: the same bits whatever is asked for.

    method: `Normal`, `Uniform`, `Constant`, `Elementwise`, `Whole`, `ZeroRows`, or a function as for `as_method`.

        >>> draw("layers.0.fc1.weight", (256, 64), Normal(std=0.02), torch.bfloat16, rows=slice(64, 128)).shape
        torch.Size([64, 64])
    """
    box = []
    for size, asked in zip(shape, (rows, columns)):
        start, stop, step = asked.indices(size)
        if step != 1:
            raise ValueError(f"draw({name!r}) gives contiguous parts, got {asked}: index the result instead.")
        box.append((start, max(stop - start, 0)))
    if len(shape) < 2 and columns != slice(None):
        raise ValueError(f"{name!r} of shape {tuple(shape)} has no columns, got columns={columns}.")
    box += [(0, size) for size in shape[2:]]
    out = torch.empty([count for _, count in box], dtype=dtype, device=device)
    _draw_into(out, name, tuple(shape), as_method(method), seed, [start for start, _ in box])
    return out


@torch.no_grad()
def _draw_into(out: Tensor, name: str, shape: tuple[int, ...], method: Any, seed: int, start: list[int]) -> None:
    """Fills `out` with the box of its size that starts at `start` in the full matrix."""
    if out.numel() == 0:
        return
    if isinstance(method, ZeroRows):
        _draw_into(out, name, shape, as_method(method.method), seed, start)
        stop = shape[0] if method.stop is None else method.stop
        first, last = max(method.start - start[0], 0), min(stop - start[0], out.shape[0])
        if first < last:
            out[first:last] = 0
        return
    if isinstance(method, Constant):
        out.fill_(method.value)
        return
    if not shape:  # a single number
        out.copy_(_whole(name, (1,), method, seed)[0])
        return
    tail = tuple(slice(s, s + n) for s, n in zip(start[1:], out.shape[1:]))
    top, bottom = start[0], start[0] + out.shape[0]
    if isinstance(method, Whole):
        out.copy_(_whole(name, shape, method, seed)[(slice(top, bottom), *tail)])
        return

    def fill(slab: int) -> None:
        first = slab * SLAB_ROWS
        values = torch.empty((min(SLAB_ROWS, shape[0] - first), *shape[1:]), dtype=torch.float32, device="cpu")
        method.fill_(values, _generator(name, slab, seed))
        a, z = max(top, first), min(bottom, first + SLAB_ROWS)
        out[a - top : z - top].copy_(values[(slice(a - first, z - first), *tail)])

    slabs = range(top // SLAB_ROWS, -(-bottom // SLAB_ROWS))
    threads = (
        torch.get_num_threads() if isinstance(method, Normal | Uniform) else 1
    )  # others use torch's one default stream
    if threads == 1 or len(slabs) == 1:
        for slab in slabs:
            fill(slab)
        return
    with ThreadPoolExecutor(threads) as pool:  # torch draws a slab with one thread
        list(pool.map(fill, slabs))


def _whole(name: str, shape: tuple[int, ...], method: Any, seed: int) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = _generator(name, "whole", seed)
    (Elementwise(method.function) if isinstance(method, Whole) else method).fill_(values, generator)
    return values


def _generator(name: str, slab: int | str, seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch_private.generator_state(f"{seed}\0{slab}\0{name}".encode()))
    return generator


@contextmanager
def default_stream(state: Tensor) -> Iterator[None]:
    """torch's default CPU stream is at `state` inside, and where it was outside."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def draw_(parameter: Tensor, name: str, method: Any = None, seed: int = 0) -> None:
    """Draws, in place, what this rank holds of `parameter`: of a DTensor its shard, else all, or the place that an `InitSlice` names.

    >>> weight = torch.nn.Parameter(torch.empty(8, 4))
    >>> draw_(weight, "head.weight", Normal(std=0.02))
    """
    part = as_method(method)
    if not isinstance(part, InitSlice):
        part = InitSlice(part, tuple(parameter.shape), (0,) * parameter.dim())
    start, held, local = list(part.start), tuple(parameter.shape), parameter
    with torch.no_grad():
        if is_dtensor(parameter):
            held, offset = torch_private.local_box(parameter)
            start = [a + b for a, b in zip(start, offset)]
            local = parameter.to_local()  # type: ignore[attr-defined]
        if len(part.shape) != parameter.dim() or any(s + n > full for s, n, full in zip(start, held, part.shape)):
            raise ValueError(
                f"{name} of shape {held} starting at {tuple(start)} does not lie inside its full shape {part.shape}."
            )
        plain = type(local) in (Tensor, nn.Parameter)
        # A subclass, such as a quantized tensor, takes its whole value at once.
        values = local.detach() if plain else torch.empty(held, dtype=torch.float32, device="cpu")
        _fill_box(values, name, part.shape, as_method(part.method), seed, start)
        if not plain and local.numel():
            local.copy_(values.to(local.device))


def _fill_box(out: Tensor, name: str, shape: tuple[int, ...], method: Any, seed: int, start: list[int]) -> None:
    """The box of the full matrix that starts at `start`: drawn, or cut from values that are given."""
    if isinstance(method, Given):
        out.copy_(method.tensor[tuple(slice(s, s + n) for s, n in zip(start, out.shape))])
    else:
        _draw_into(out, name, shape, method, seed, start)


def is_dtensor(tensor: Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def check_local(tensor: Tensor, what: str) -> None:
    """Raises if an input is a DTensor: modules take what this rank has."""
    if torch.compiler.is_compiling() or not is_dtensor(tensor):
        return
    raise ValueError(
        f"{what} is a DTensor {tuple(tensor.placements)}, "  # type: ignore[attr-defined]
        "but modules take this rank's tensor (input.to_local()) and do the collectives themselves: leave them out of torch's "
        "parallelize_module, and use set_device_mesh and sequence_parallel=True, or split_tensors."
    )
