"""What a `Weight` holds: its state, the memory that all its views share, and whether its bytes are those of its master.

[Note: states of a weight] What a `Weight` holds (n: elements of the parameter, or of a tensor-parallel rank's box of it, its *unit*):

    state      who has it                                   high precision      FP8 bytes
    WHOLE      a parameter of `quantized_model_init`        -                   2n: rowwise, and columnwise for backward
      once somebody has asked for its state dict:           -                   1-D blocks: 3n (`WeightMemory.lay_rows_first`)
    SHARD      FSDP2's rows of it, on w ranks               -                   n/w (2n/w where the directions have bytes of their own)
      with a master (`shard_model`):                        the rows            the same, once a recipe is known
    GATHERED   FSDP2's all-gather, for one forward          -                   2n, freed after use
      before a recipe is known, or without one:             n                   -

With a master the parameter IS the master: an optimizer sees an ordinary high-precision tensor, and a state dict holds it. The bytes
beside it are made once a step (`weight_renew.renew`) and travel in its place. Without one the bytes are all there is: reading ops see the
dequantized values; ops that write dequantize, compute and quantize again, with the scales that one process would have, so every
rank has to run them. `optimizers.FusedAdam` keeps float32 masters of such weights and is what trains them well.

FSDP replaces and views a parameter's tensor object as it likes, on some ranks only where shards are uneven. So everything but the
master's values lives in the `WeightMemory`, which all those objects share.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ottava.quant.weight_memory import WeightMemory

if TYPE_CHECKING:
    from ottava.quant.weight import Weight


class State(enum.Enum):
    """[Note: states of a weight]"""

    WHOLE = enum.auto()
    SHARD = enum.auto()
    GATHERED = enum.auto()


class Cell:
    """Holds the memory of a weight for all its views. FSDP moves a shard by making a new one and copying into it."""

    def __init__(self, make: Callable[[], WeightMemory], new: bool = False) -> None:
        self._make = make
        self._memory: WeightMemory | None = None
        self.new = new
        """Just made by `new_zeros`: what is copied in moves in."""

    @property
    def memory(self) -> WeightMemory:
        """Made when first asked for: of the shards of a weight a rank keeps one."""
        if self._memory is None:
            self._memory = self._make()
        return self._memory

    def move_in(self, memory: WeightMemory) -> None:
        """Takes the place of the memory that was here."""
        self._memory, self.new = memory, False


# ------------------------------------------------------------------------------------- are the bytes those of the master?


def fresh(weight: Weight) -> bool:
    """Whether the bytes are those of the master's values."""
    memory, master = weight.memory, weight.master
    assert master is not None
    return bool(memory.data) and memory.made_from.get(_address(master)) == master._version


def note_made(weight: Weight) -> None:
    """The bytes were just made from the master's values."""
    weight.memory.made_from = {}
    note_same(weight)


def note_same(weight: Weight) -> None:
    """The master is other memory with the values that the bytes were made from."""
    assert weight.master is not None
    weight.memory.made_from[_address(weight.master)] = weight.master._version


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
