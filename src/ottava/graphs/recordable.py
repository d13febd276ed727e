"""Which modules a graph can hold."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def check_module(module: Any, hooks: dict[str, dict] | None) -> None:
    """Names what cannot be recorded."""
    # take half a second, which `import ottava` does not have
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(module, nn.Module):
        raise ValueError(f"make_graphed_callables takes modules, got {type(module).__name__}: wrap it in one.")
    who = f"make_graphed_callables: {type(module).__name__}"
    if unknown := set(hooks or {}) - set(HOOKS):
        raise ValueError(
            f"make_graphed_callables: capture_time_hooks has {sorted(unknown)}; known: {', '.join(HOOKS)}."
        )
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(own):
        raise ValueError(f"{who} has hooks, which a graph would run once and never again: register them afterwards.")
    for child in module.modules():
        if isinstance(child, FSDPModule | FullyShardedDataParallel):
            kind = "FSDP2" if isinstance(child, FSDPModule) else "FSDP1"
            raise ValueError(
                f"{who} is sharded by {kind}, which gathers weights into memory that is not always the same."
            )
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{who} is wrapped by DistributedDataParallel, whose reduction a graph would begin once and never again: graph the modules "
                "inside, before they are wrapped."
            )
        if child.training and getattr(child, "get_rng_state_tracker", None) is not None and _drops(child):
            raise ValueError(
                f"{who} draws dropout from the streams of get_rng_state_tracker, whose states the host swaps in a forward: set dropout to "
                "0, or use torch's default stream."
            )


def _drops(module: nn.Module) -> bool:
    rates = (getattr(module, "attention_dropout", 0.0), getattr(module, "hidden_dropout", 0.0))
    return any(isinstance(rate, float | int) and rate > 0.0 for rate in rates)  # others call an nn.Dropout so
