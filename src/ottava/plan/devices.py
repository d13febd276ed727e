"""`GpuKind`: what a kind of GPU does, measured: rates of products, attention and copies, memory, links. `devices.json` has the table.

Rates are what software reaches inside a training step, not a vendor's peaks. A kind that nobody has measured says so in `source`.
More comes from files: what `ottava plan --calibrate` writes, and what `ottava bench gemm` writes.

    >>> find_gpu("h200").memory_gib
    139.8
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ottava.notices import did_you_mean

RATE_OF_RECIPE = {
    "none": "bf16",
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
"""What a recipe's products are called in the table, and by `ottava bench gemm`."""
NEAR = math.log(4.0)
"""A measured product stands for others whose three sizes differ from its own by at most this factor, taken together."""


@dataclass(frozen=True, eq=False)
class GpuKind:
    """One kind of GPU. Equal to itself alone, so that what follows from it can be remembered."""

    name: str
    """As torch.cuda.get_device_name says it."""
    memory_gib: float
    copy_tb_s: float
    """Bytes that a copy reads and writes, in 1e12 a second."""
    elementwise_share: float
    """Of the copy's rate, what norms, activations, rotations and casts with one scale a tensor reach on average."""
    gemm_tflops: dict[str, float]
    """Of large products, by kind (`RATE_OF_RECIPE`). A kind that is missing would be emulated."""
    attention_tflops: dict[str, dict[str, float]]
    """By channels of a head: forward and backward, causal, counting the half that is computed; the same within packed documents."""
    host_ms_per_layer: float
    """What Python needs for a quantized layer, forward and backward: a floor under the GPU's time."""
    nvlink_gb_s: float
    """What one GPU sends inside a node in a collective, in 1e9 bytes a second."""
    nvlink_latency_us: float
    products: tuple[dict[str, Any], ...] = ()
    """Measured ones: {kind, m, n, k, tflops}."""
    source: str = ""

    @cached_property
    def _by_kind(self) -> dict[str, list[tuple[float, float, float, float]]]:
        found: dict[str, list[tuple[float, float, float, float]]] = {}
        for row in self.products:
            sizes = (math.log(row["m"]), math.log(row["n"]), math.log(row["k"]))
            found.setdefault(row["kind"], []).append((*sizes, float(row["tflops"])))
        return found

    def product_tflops(self, kind: str, m: int, n: int, k: int) -> float:
        """The rate of out[m, n] = a[m, k] @ b[n, k].T: of the nearest measured product, or of large ones."""
        rate, nearest = self.gemm_tflops[kind], NEAR
        for lm, ln, lk, tflops in self._by_kind.get(kind, ()):
            distance = abs(lm - math.log(m)) + abs(ln - math.log(n)) + abs(lk - math.log(k))
            if distance <= nearest:
                nearest, rate = distance, tflops
        return rate

    def attention(self, channels: int) -> dict[str, float]:
        """Rates for heads of `channels`: those of the nearest size that was measured."""
        nearest = min(self.attention_tflops, key=lambda known: abs(math.log(int(known) / channels)))
        return self.attention_tflops[nearest]


def read_gpu(entry: Mapping[str, Any], where: str) -> GpuKind:
    """An entry of the table. where: for the message if it is wrong."""
    known = {field.name for field in fields(GpuKind)}
    required = known - {"products", "source"}
    wrong = sorted(set(entry) ^ known if not required <= set(entry) else set(entry) - known)
    if wrong:
        raise ValueError(
            f"{where}: a GPU has the keys {', '.join(sorted(known))}; missing or unknown: {', '.join(wrong)}."
        )
    return GpuKind(**{**entry, "products": tuple(entry.get("products", ()))})


@cache
def packaged() -> dict[str, GpuKind]:
    """The table that comes with Ottava."""
    text = resources.files("ottava.plan").joinpath("devices.json").read_text(encoding="utf-8")
    return {key: read_gpu(entry, f"devices.json, {key}") for key, entry in json.loads(text).items()}


def known_gpus(files: Iterable[str | Path] = ()) -> dict[str, GpuKind]:
    """The packaged table and what `files` add to it or replace: tables like it, or what `ottava bench gemm` wrote.

    >>> sorted(known_gpus())
    ['a100', 'b200', 'h100', 'h200']
    """
    table = dict(packaged())
    for file in files:
        document = _read(Path(file))
        if document.get("benchmark") == "gemm":
            _add_products(table, document, Path(file))
        elif "benchmark" in document:
            raise ValueError(
                f"{file} is what `ottava bench {document['benchmark']}` wrote; a plan reads what `ottava bench gemm` writes."
            )
        else:
            table |= {str(key): read_gpu(entry, f"{file}, {key}") for key, entry in document.items()}
    return table


def find_gpu(name: str, files: Iterable[str | Path] = ()) -> GpuKind:
    """A kind by its short name."""
    table = known_gpus(files)
    if name.lower() not in table:
        meant = did_you_mean(name.lower(), table)
        raise ValueError(
            f"There is no GPU {name!r} in the table.{meant} Known are: {', '.join(sorted(table))}. `ottava plan --calibrate` on such "
            "a GPU writes an entry, which --table reads."
        )
    return table[name.lower()]


def write_entry(path: Path, key: str, gpu: GpuKind) -> None:
    """Adds `gpu` to the table in `path`, or replaces it there."""
    table = _read(path) if path.exists() else {}
    table[key] = {**asdict(gpu), "products": list(gpu.products)}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def short_name(device_name: str) -> str:
    """The key of a device: the first word of its name with a digit in it, in small letters.

    >>> short_name("NVIDIA H100 80GB HBM3"), short_name("NVIDIA A100-SXM4-80GB")
    ('h100', 'a100')
    """
    words = device_name.lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), "-".join(words) or "gpu")


def _add_products(table: dict[str, GpuKind], document: dict[str, Any], path: Path) -> None:
    for row in document["results"]:
        gpu = next((key for key, kind in table.items() if key == short_name(row["device"])), None)
        if gpu is None:
            raise ValueError(
                f"{path} is about {row['device']!r}, which is not in the table: {', '.join(sorted(table))}."
            )
        kept = {key: row[key] for key in ("kind", "m", "n", "k", "tflops")}
        rates = table[gpu].gemm_tflops
        if kept["kind"] not in rates:
            rates = rates | {kept["kind"]: kept["tflops"]}
        table[gpu] = replace(table[gpu], products=(*table[gpu].products, kept), gemm_tflops=rates)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object of GPUs by name, got a {type(found).__name__}.")
    return found
