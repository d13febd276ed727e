"""What a schedule would take, so that the engine can leave out one that loses.

    sequential   t(C) + p(M)                                    a collective, then a product of M tokens
    ring         p(m) + (size - 1) * max(t(c), p(m))            m, c: one rank's tokens and bytes
    pipeline     own tokens hide pieces, and pieces one another
    p(m) = start + m * operations / rate,  t(c) = latency + c / bandwidth

`start` is what every product costs whatever its size: its launch, and on a CPU that emulates FP8 the unpacking of the weight. It is why
few tokens lose: a chunk saves at most the time of one message. The choice follows from sizes, and on a CPU from a link that all ranks
have measured and agreed on; never from a clock of one rank, so that all ranks make the same one.

Nor is a gather cut where chunks of a GPU's product could have other bits than the whole (`bits.py`), unless a limit was set by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ottava.overlap.bits import ANY, chunk_rows, inexact_because
from ottava.overlap.pipeline import pieces_of
from ottava.overlap.transport import Link


@dataclass(frozen=True)
class Machine:
    """Rates of a device and its links, per rank."""

    operations_per_second: float
    """Of a large unquantized product."""
    quantized_per_second: float
    bytes_per_second: float
    """Of a link, one way."""
    latency_s: float
    """Of one message."""
    start_s: float
    """Of one product."""
    unpack_s: float = 0.0
    """Of one byte of a quantized weight, where products are emulated: again for every product."""


# A CPU core: float32 products by halves, FP8 by emulation, gloo between processes of one machine. Measured on two cores of an EPYC
# (Zen 4): 45 GFLOP/s, 1.1 GB/s, 0.12 ms a message; 1.6 ns to unpack and scale a byte.
CPU = Machine(45e9, 45e9, 1.1e9, 1.2e-4, 1.0e-4, 1.6e-9)
# An H200 on NVLink: rates that large products reach, 400 GB/s each way of the 450 that there are.
HOPPER = Machine(6.5e14, 1.1e15, 4e11, 8e-6, 6e-6)


WORTH = 0.995  # of the sequential time: an estimate that promises less than half a percent promises nothing


def machine_of(device_type: str, link: Link | None = None) -> Machine:
    """The rates that the engine reckons with. link: what messages take, where it is known."""
    machine = HOPPER if device_type == "cuda" else CPU
    if link is None:
        return machine
    return replace(machine, bytes_per_second=link.bytes_per_second, latency_s=link.latency_s)


@dataclass(frozen=True)
class Product:
    """A product and the collective beside it: y[tokens, features] of a contraction; bytes of all tokens that travel."""

    tokens: int
    """Of all ranks."""
    contraction: int
    features: int
    bytes: int
    """Of all ranks' tokens: a rank sends (size - 1) / size of them."""
    quantized: bool
    exact_chunks: str = ANY
    """Which chunks of it have the bits of the whole: see `bits.py`."""


@dataclass(frozen=True)
class Choice:
    """What the engine does with one collective."""

    method: str
    sequential_s: float
    overlapped_s: float
    why: str
    inexact: str | None = None
    """Why the chunks of this method may have other bits than the whole product; None: they have the same."""

    @property
    def overlaps(self) -> bool:
        """Whether anything is hidden."""
        return self.method != "none"


def product_s(machine: Machine, product: Product, tokens: float) -> float:
    """Seconds of a product of `tokens` of its tokens."""
    rate = machine.quantized_per_second if product.quantized else machine.operations_per_second
    weight = product.contraction * product.features * (machine.unpack_s if product.quantized else 0.0)
    return machine.start_s + weight + 2.0 * tokens * product.contraction * product.features / rate


def message_s(machine: Machine, count: float) -> float:
    """Seconds of one message of `count` bytes."""
    return machine.latency_s + count / machine.bytes_per_second


def collective_s(machine: Machine, product: Product, size: int) -> float:
    """Seconds of the collective by itself."""
    return message_s(machine, product.bytes * (size - 1) / size)


def sequential_s(machine: Machine, product: Product, size: int) -> float:
    """Seconds of the collective and the product, one after the other."""
    return collective_s(machine, product, size) + product_s(machine, product, product.tokens)


def overlapped_s(machine: Machine, product: Product, size: int, collective: str, method: str, splits: int) -> float:
    """Seconds of both by `method`. collective: "gather" (before the product) or "scatter" (after it)."""
    own = product_s(machine, product, product.tokens / size)
    part = product.bytes / size
    if method == "ring":
        return own + (size - 1) * max(message_s(machine, part), own)
    pieces = (size - 1) * pieces_of(splits, size)
    piece = product_s(machine, product, product.tokens * (size - 1) / size / pieces)
    message = message_s(machine, product.bytes * (size - 1) / size / pieces)
    clock, link = (own, 0.0) if collective == "gather" else (0.0, 0.0)
    for _ in range(pieces):
        if collective == "gather":
            link += message
            clock = max(clock, link) + piece
        else:
            clock += piece
            link = max(clock, link) + message
    return clock if collective == "gather" else max(clock + own, link)


@lru_cache(maxsize=4096)
def choose(
    collective: str,
    method: str,
    product: Product,
    size: int,
    machine: Machine,
    splits: int = 4,
    minimum_tokens: int | None = None,
) -> Choice:
    """The method for one collective of a product: `method`, the best ("auto"), or "none" where chunks would lose.

    minimum_tokens: of all ranks, where somebody has said from how many on to cut; the estimate is not asked then.

    >>> few = Product(tokens=512, contraction=4096, features=4096, bytes=512 * 4096, quantized=True)
    >>> choose("gather", "ring", few, 8, machine_of("cuda")).method
    'none'
    """
    known = ("ring", "pipeline") if collective == "gather" else ("pipeline",)
    sequential = sequential_s(machine, product, size)
    asked = [name for name in (known if method == "auto" else (method,)) if name in known]
    times = {name: overlapped_s(machine, product, size, collective, name, splits) for name in asked}
    if not times:
        return Choice("none", sequential, sequential, "nothing was asked for")
    inexact = {name: _inexact_because(collective, name, product, size, splits) for name in asked}
    if minimum_tokens is not None:
        best = min(times, key=lambda name: times[name])
        if product.tokens >= minimum_tokens:
            why = f"{product.tokens} tokens are at least {minimum_tokens}"
            return Choice(best, sequential, times[best], why, inexact[best])
        return Choice("none", sequential, times[best], f"{product.tokens} tokens are fewer than {minimum_tokens}")
    # A method whose chunks are exact comes first, however long it takes.
    best = min(times, key=lambda name: (inexact[name] is not None, times[name]))
    if times[best] >= WORTH * sequential:
        why = (
            f"{product.tokens} tokens in chunks would take {times[best] * 1e3:.3g} ms and in one {sequential * 1e3:.3g} ms "
            "(an estimate from their sizes; overlap_minimum_tokens sets the limit by hand)"
        )
        return Choice("none", sequential, times[best], why)
    if inexact[best] is not None:
        why = f"{inexact[best]}, and a gather has the bits of no overlap (overlap_minimum_tokens cuts it all the same)"
        return Choice("none", sequential, times[best], why)
    return Choice(best, sequential, times[best], "the estimate is shorter")


def _inexact_because(collective: str, method: str, product: Product, size: int, splits: int) -> str | None:
    """Why chunks may have other bits than the whole. Sums over ranks promise none."""
    if collective != "gather":
        return None
    rows = chunk_rows(product.tokens // size, size, method, pieces_of(splits, size))
    return inexact_because(product.exact_chunks, rows, product.tokens, product.features)


def crossing(
    collective: str, method: str, product: Product, size: int, machine: Machine, splits: int = 4
) -> int | None:
    """The fewest tokens, in powers of two, from which on `choose` overlaps; None: never up to 2**24. `product` gives the other sizes."""
    for exponent in range(24):
        tokens = size << exponent
        scaled = replace(product, tokens=tokens, bytes=product.bytes * tokens // product.tokens)
        if choose(collective, method, scaled, size, machine, splits).overlaps:
            return tokens
    return None
