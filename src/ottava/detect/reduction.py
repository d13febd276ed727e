"""In which type gradients are summed over ranks: said before a run, and measured while it runs.

bfloat16 has 8 bits: of a sum whose terms differ by more than 256, the small ones are lost. What that costs depends on the run, so
`ReductionProbe` measures it: on a step that is looked at, the gradients of one unit are summed a second time, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava import torch_private
from ottava.detect.finding import Finding
from ottava.detect.units import Unit

LARGE = 2.0**-8
"""Relative error of a sum, one unit in bfloat16's last place: a float32 sum that is rounded once has about a third of it."""


def check_reduction(units: list[Unit]) -> list[Finding]:
    """Units whose gradients are summed over several ranks in fewer than 32 bits, told once.

    >>> check_reduction(units_of(model))
    [Finding(level='warning', message='gradients of 8 data-parallel ranks are summed in bfloat16, ...')]
    """
    for unit in units:
        if unit.reduce_dtype is not None and (found := reduced_in(unit.reduce_dtype, unit.ranks)):
            return found
    return []


def reduced_in(dtype: torch.dtype, ranks: int) -> list[Finding]:
    """What is said of a sum of `ranks` gradients in `dtype`; nothing if it is float32 or there is no sum."""
    if ranks == 1 or dtype.itemsize >= 4:
        return []
    return [
        Finding(
            "warning",
            f"gradients of {ranks} data-parallel ranks are summed in {_name(dtype)}, which loses small ones: leave "
            "reduce_dtype=torch.float32 unless the loss is shown to stay the same.",
            "bf16 gradient sum",
        )
    ]


class ReductionProbe:
    """Measures the error of a sum over ranks in few bits, of one unit's gradients.

    Nothing is installed but during `look()`; there the unit's gradients travel twice, once as floats. Every rank looks at the same step.

        >>> probe = ReductionProbe.of(model)  # None: gradients are summed in float32, or by DDP or FSDP1
        >>> with probe.look():
        ...     loss.backward()
        >>> float(probe.error())
        0.0017
    """

    def __init__(self, unit: nn.Module, dtype: torch.dtype, ranks: int) -> None:
        self.unit, self.dtype, self.ranks = unit, dtype, ranks
        self._squares: Tensor | None = None  # float32 [2]: of the error, and of the sum

    @classmethod
    def of(cls, model: nn.Module) -> ReductionProbe | None:
        """For the FSDP2 unit in the middle of the model, if its gradients are summed in few bits."""
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        found = []
        for module in modules:
            for shard, _, dtype in torch_private.fsdp2_groups(module):
                if len(shard) > 1 and dtype is not None and dtype.itemsize < 4:
                    found.append(cls(module, dtype, len(shard)))
        return found[len(found) // 2] if found else None

    @contextmanager
    def look(self) -> Iterator[None]:
        """In here the sums of the unit's gradients are made twice and compared."""
        self._squares = None
        with torch_private.around_reduce_scatter(self.unit, self._compare):
            yield

    def _compare(self, work: Any, output: Tensor, source: Tensor, group: Any, op: Any) -> Any:
        exact = source.float()  # before the sum: some libraries use their input as room
        result = work()
        summed = torch.empty(output.shape, dtype=torch.float32, device=output.device)
        reduce_scatter(summed, exact, group, op)
        squares = torch.stack([(output.float() - summed).square().sum(), summed.square().sum()])
        self._squares = squares if self._squares is None else self._squares + squares
        return result

    def error(self) -> float | None:
        """Of this rank's part of the sums, relative; None if nothing was summed. Waits for the device."""
        if self._squares is None:
            return None
        wrong, whole = self._squares.tolist()
        return (wrong / whole) ** 0.5 if whole > 0 else 0.0

    def finding(self, error: float) -> Finding | None:
        """What is said of an error that is too large."""
        if not error > LARGE:
            return None
        return Finding(
            "warning",
            f"gradients of {self.ranks} ranks, summed in {_name(self.dtype)}, are {error:.2%} off what a float32 sum gives (measured): "
            'sum them in float32 (precision.reduce = "float32", reduce_dtype=torch.float32).',
            "bf16 gradient sum",
        )


def reduce_scatter(output: Tensor, source: Tensor, group: Any, op: Any) -> None:
    """torch's reduce-scatter, whose name differs between 2.11 and 2.13."""
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, source, group=group, op=op)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
