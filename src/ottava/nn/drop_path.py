"""`DropPath`: stochastic depth."""

from __future__ import annotations

import torch
from torch import Tensor


class DropPath(torch.nn.Module):
    """Drops the whole branch of a sample with probability `drop_prob`, in training, and scales the others up.

    >>> DropPath(0.5, sample_dim=1).eval()(torch.ones(1, 2))
    tensor([[1., 1.]])
    """

    def __init__(self, drop_prob: float, sample_dim: int = 0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"drop_path_rate must lie in [0, 1), got {drop_prob}.")
        self.drop_prob, self.sample_dim = drop_prob, sample_dim

    def forward(self, x: Tensor) -> Tensor:
        """x with `sample_dim` counting samples."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        shape = [1] * x.dim()
        shape[self.sample_dim] = x.shape[self.sample_dim]
        kept = torch.rand(shape, dtype=torch.float32, device=x.device) >= self.drop_prob
        return torch.where(kept, x / (1.0 - self.drop_prob), x.new_zeros(()))

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return f"drop_prob={self.drop_prob}"
