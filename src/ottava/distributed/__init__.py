"""Many ranks, and what they share with one: random streams that differ where they must, and recomputation."""

from ottava.distributed.random import CudaRNGStatesTracker
from ottava.distributed.recompute import checkpoint

__all__ = ["CudaRNGStatesTracker", "checkpoint"]
