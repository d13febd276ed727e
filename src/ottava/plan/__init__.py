"""What fits where, before anything is launched."""

from ottava.plan.cluster import Cluster
from ottava.plan.memory import RankMemory, estimate
from ottava.plan.planner import Candidate, NothingFits, Plan, plan_run

__all__ = ["Candidate", "Cluster", "NothingFits", "Plan", "RankMemory", "estimate", "plan_run"]
