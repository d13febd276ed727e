"""Tensor-parallel collectives under the products of one layer, on paper: bytes, times, and what stays exposed.

Ten collectives a layer and micro-batch, with tokens spread over the ranks. `gpu` has measured rates of products, and what one GPU sends
over NVLink. Times of a schedule follow from the order in which chunks are multiplied and sent ([Note: schedules]); `bound` is what no
schedule can beat, the longer of communication and product.

    >>> rows = layer_overlap(find_gpu("h200"), LLAMA3_8B, tokens=8192, tp=8)
    >>> f"{1e3 * total(rows).sequential:.2f} ms -> {1e3 * total(rows).bound:.2f} ms"
    '3.34 ms -> 2.22 ms'

[Note: schedules]
G: a product of all tokens; C: its collective, which sends (tp - 1) / tp of all bytes. A rank's own tokens need no communication.
  ring       tp turns of G / tp each; under all but the last one, C / (tp - 1) travels
  pipeline   all pieces set out at once and are multiplied as they come, the own tokens first; or, before a sum, pieces of other ranks are
             multiplied first and sent at once, the own tokens last
  bulk       G and C beside each other
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ottava.plan.devices import GpuKind
from ottava.plan.links import Fabric, Group, Link

LAUNCH_S = 4e-6
"""Before a product, and so before each chunk of one."""
ACTIVATION_BYTES = 2.0
"""Of an element in bf16: sums travel so, and activations without a recipe."""
SPLITS = 4


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer's four matrices, before they are split."""

    hidden: int
    qkv: int
    """Outputs of the first."""
    fc1: int
    """Outputs of the third; two for each input of the fourth where the MLP is gated."""
    ffn: int


LLAMA3_8B = LayerShape(hidden=4096, qkv=6144, fc1=28672, ffn=14336)


@dataclass(frozen=True)
class Hidden:
    """One collective and the product that it hides under. Seconds."""

    product: str
    direction: str
    collective: str
    method: str
    bytes_sent: float
    """By one rank."""
    communication: float
    gemm: float
    overlapped: float

    @property
    def sequential(self) -> float:
        """One after the other."""
        return self.communication + self.gemm

    @property
    def bound(self) -> float:
        """What no schedule can beat."""
        return max(self.communication, self.gemm)

    @property
    def exposed(self) -> float:
        """What the collective adds to the product."""
        return self.overlapped - self.gemm


@dataclass(frozen=True)
class Total:
    """Of all rows. Seconds."""

    communication: float
    gemm: float
    sequential: float
    bound: float
    overlapped: float
    exposed: float

    @property
    def hidden_share(self) -> float:
        """Of communication."""
        return 1 - self.exposed / self.communication if self.communication else 0.0


def ring_seconds(gemm: float, communication: float, ranks: int) -> float:
    """See [Note: schedules].

    >>> ring_seconds(4.0, 4.0, ranks=2)
    6.0
    """
    turn = gemm / ranks
    return (ranks - 1) * max(turn, communication / (ranks - 1)) + turn


def gathered_pipeline_seconds(gemm: float, communication: float, ranks: int, pieces: int) -> float:
    """pieces: of all other ranks' tokens.

    >>> gathered_pipeline_seconds(4.0, 4.0, ranks=2, pieces=4)
    4.5
    """
    now = gemm / ranks
    for piece in range(1, pieces + 1):
        now = max(now, piece * communication / pieces) + gemm * (ranks - 1) / ranks / pieces
    return now


def scattered_pipeline_seconds(gemm: float, communication: float, ranks: int, pieces: int) -> float:
    """pieces: of all other ranks' tokens.

    >>> scattered_pipeline_seconds(4.0, 4.0, ranks=2, pieces=4)
    4.5
    """
    now = free = 0.0
    for _ in range(pieces):
        now += gemm * (ranks - 1) / ranks / pieces
        free = max(now, free) + communication / pieces
    return max(now + gemm / ranks, free)


def pieces_of(splits: int, ranks: int) -> int:
    """Pieces of all other ranks' tokens together: at least one for each rank.

    >>> pieces_of(4, 2), pieces_of(4, 8)
    (4, 7)
    """
    return -(-splits // (ranks - 1)) * (ranks - 1)


def layer_overlap(
    gpu: GpuKind,
    shape: LayerShape,
    tokens: int,
    tp: int,
    kind: str = "bf16",
    gathered_bytes: float = ACTIVATION_BYTES,
    splits: int = SPLITS,
) -> list[Hidden]:
    """The ten collectives of a layer under `overlap="ring"`. tokens: of all ranks.

    kind: of the products' rate, as in the table of GPUs. gathered_bytes: of an element that is gathered, 1 where it travels in FP8.
    """
    if tp < 2:
        raise ValueError(f"layer_overlap: tp must be 2 or more, got {tp}: one rank has no collectives.")
    link = Link(gpu.nvlink_gb_s * 1e9, gpu.nvlink_latency_us * 1e-6)
    fabric, group = Fabric(link, link), Group(tp)
    whole = float(tokens * shape.hidden)

    def row(product: str, direction: str, collective: str, method: str) -> Hidden:
        element = ACTIVATION_BYTES if collective == "reduce-scatter" else gathered_bytes
        communication = fabric.all_gather(whole * element, group)
        chunks = {"ring": tp, "pipeline": pieces_of(splits, tp) + 1, "bulk": 1}[method]
        m, n, k = _sizes(shape, product, direction, tokens, tp)
        gemm = _seconds(gpu, kind, m, n, k)
        cut = chunks * _seconds(gpu, kind, max(m // chunks, 1), n, k) if chunks > 1 else gemm
        if method == "ring":
            overlapped = ring_seconds(cut, communication, tp)
        elif method == "pipeline":
            overlapped = scattered_pipeline_seconds(cut, communication, tp, chunks - 1)
        else:
            overlapped = max(gemm, communication)
        sent = whole * element * (tp - 1) / tp
        return Hidden(product, direction, collective, method, sent, communication, gemm, overlapped)

    return [row(*which) for which in COLLECTIVES]


COLLECTIVES = (
    ("qkv", "forward", "all-gather", "ring"),
    ("proj", "forward", "reduce-scatter", "pipeline"),
    ("fc1", "forward", "all-gather", "ring"),
    ("fc2", "forward", "reduce-scatter", "pipeline"),
    ("fc2", "dgrad", "all-gather", "ring"),
    ("fc1", "dgrad", "all-gather", "bulk"),
    ("fc1", "wgrad", "reduce-scatter", "bulk"),
    ("proj", "dgrad", "all-gather", "ring"),
    ("qkv", "dgrad", "all-gather", "bulk"),
    ("qkv", "wgrad", "reduce-scatter", "bulk"),
)
"""(product, direction, collective, method), in the order of a step."""
PRODUCTS_ALONE = (("fc2", "wgrad"), ("proj", "wgrad"))
"""Products of a layer that no collective hides under: gradients and inputs are there already."""


def _sizes(shape: LayerShape, product: str, direction: str, tokens: int, tp: int) -> tuple[int, int, int]:
    """(m, n, k) of out[m, n] = a[m, k] @ b[n, k].T on one rank."""
    outputs, inputs = {
        "qkv": (shape.qkv // tp, shape.hidden),
        "proj": (shape.hidden, shape.hidden // tp),
        "fc1": (shape.fc1 // tp, shape.hidden),
        "fc2": (shape.hidden, shape.ffn // tp),
    }[product]
    return {
        "forward": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (outputs, inputs, tokens),
    }[direction]


def _seconds(gpu: GpuKind, kind: str, m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / (gpu.product_tflops(kind, m, n, k) * 1e12) + LAUNCH_S


def total(rows: Iterable[Hidden]) -> Total:
    """Of all rows together."""
    found = list(rows)
    names = ("communication", "gemm", "sequential", "bound", "overlapped", "exposed")
    return Total(*(sum(getattr(row, name) for row in found) for name in names))


def table(rows: list[Hidden]) -> str:
    """The rows and their sum as a Markdown table."""
    head = (
        "GEMM",
        "collective",
        "method",
        "MB sent",
        "collective µs",
        "GEMM µs",
        "one after the other",
        "bound",
        "overlapped",
        "exposed",
    )
    lines: list[tuple[str, ...]] = [head, ("---", "---", "---", *("---:",) * 7)]
    for row in rows:
        times = (row.communication, row.gemm, row.sequential, row.bound, row.overlapped, row.exposed)
        cells = (f"{row.bytes_sent / 1e6:.1f}", *(f"{1e6 * seconds:.0f}" for seconds in times))
        lines.append((f"{row.product} {row.direction}", row.collective, row.method, *cells))
    whole = total(rows)
    times = (whole.communication, whole.gemm, whole.sequential, whole.bound, whole.overlapped, whole.exposed)
    sent = sum(row.bytes_sent for row in rows) / 1e6
    lines.append(("all ten", "", "", f"{sent:.1f}", *(f"{1e6 * seconds:.0f}" for seconds in times)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
