"""What fits where, before anything is launched."""

from ottava.plan.memory import RankMemory, estimate

__all__ = ["RankMemory", "estimate"]
