"""`Share`: of a tensor that is equal on all ranks of a group, the part that this rank keeps, and the way back.

For tensors that ARE equal: gathered weights and their FP8 copies over a data-parallel group, activations outside sequence-parallel
regions over a tensor-parallel group. A data-parallel rank's activations are its own; put together from shares they would be a
mixture of all ranks' samples, and nothing would say so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has a new name for this collective and warns about the old one, which is all that 2.11 has.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Share:
    """This rank's part of `tensor`. Every rank of `group` has to make its share, and all have to gather together.

    It is cut by bytes, so shape and dtype do not matter; the last ranks may hold a few bytes of padding.

        >>> share = Share(weight, group)  # 1/N of the bytes; the tensor may be freed
        >>> torch.equal(share.gather(), weight)
        True
    """

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self.group, self.dtype, self.shape = group, tensor.dtype, tensor.shape
        tensor = tensor.detach()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if extent != tensor.numel():  # gaps in memory: keep the values alone
            tensor = tensor.contiguous()
        self.stride = tensor.stride()
        content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self.nbytes = content.numel()
        part = -(-self.nbytes // group.size())  # bytes a rank
        start = min(group.rank() * part, self.nbytes)
        mine = content[start : start + part]
        self.part = mine.new_zeros(part)
        self.part[: mine.numel()].copy_(mine)

    def gather(self) -> Tensor:
        """The tensor, with the strides it had."""
        whole = self.part.new_empty(self.part.numel() * self.group.size())
        _ALL_GATHER(whole, self.part, group=self.group)
        return whole[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)
