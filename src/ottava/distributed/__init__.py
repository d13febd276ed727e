"""Many ranks, and what they share with one: plans and meshes, checks before a run, random streams, recomputation."""

from ottava.distributed.plan import Meshes, ParallelPlan
from ottava.distributed.random import CudaRNGStatesTracker
from ottava.distributed.recompute import checkpoint

__all__ = ["CudaRNGStatesTracker", "Meshes", "ParallelPlan", "checkpoint"]
