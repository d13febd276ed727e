"""Many ranks, and what they share with one: plans and meshes, checks before a run, wrappers, random streams, recomputation."""

from typing import TYPE_CHECKING, Any

from ottava.distributed.plan import Meshes, ParallelPlan
from ottava.distributed.recompute import apply_recompute, checkpoint
from ottava.distributed.tensor_parallel import Column, Row, split_tensors
from ottava.nn.random_streams import CudaRNGStatesTracker, model_parallel_seed, use_tracker
from ottava.overlap.user_buffers import destroy_ub, initialize_ub

if TYPE_CHECKING:
    from ottava.distributed.fsdp import attach, refresh, shard_model
    from ottava.distributed.fsdp1 import ddp, prepare_te_modules_for_fsdp, shard_model_fsdp1
    from ottava.distributed.gradients import clip_grad_norm_, grad_norm_and_scale, gradient_sync
    from ottava.distributed.parallel_model import meshes_of, parallelize, prefetch_blocks, tracker_of
    from ottava.distributed.whole import whole_state

__all__ = [
    "Column",
    "CudaRNGStatesTracker",
    "Meshes",
    "ParallelPlan",
    "Row",
    "apply_recompute",
    "attach",
    "checkpoint",
    "clip_grad_norm_",
    "ddp",
    "destroy_ub",
    "grad_norm_and_scale",
    "gradient_sync",
    "initialize_ub",
    "meshes_of",
    "model_parallel_seed",
    "parallelize",
    "prefetch_blocks",
    "prepare_te_modules_for_fsdp",
    "refresh",
    "shard_model",
    "shard_model_fsdp1",
    "split_tensors",
    "tracker_of",
    "use_tracker",
    "whole_state",
]

# Where names live whose module imports torch's FSDP, which takes most of a second and `import ottava` does not need.
_LATER = {
    **dict.fromkeys(("ddp", "prepare_te_modules_for_fsdp", "shard_model_fsdp1"), "ottava.distributed.fsdp1"),
    **dict.fromkeys(("attach", "refresh", "shard_model"), "ottava.distributed.fsdp"),
    **dict.fromkeys(("clip_grad_norm_", "grad_norm_and_scale", "gradient_sync"), "ottava.distributed.gradients"),
    "whole_state": "ottava.distributed.whole",
    **dict.fromkeys(("meshes_of", "parallelize", "prefetch_blocks", "tracker_of"), "ottava.distributed.parallel_model"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
