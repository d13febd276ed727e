"""Which modules a graph can hold."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def check_module(module: Any, hooks: dict[str, dict] | None) -> None:
    """Names what cannot be recorded."""
    from torch.distributed.fsdp import FSDPModule  # takes half a second, which `import ottava` does not have

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
        if isinstance(child, FSDPModule):
            raise ValueError(
                f"{who} is sharded by FSDP2, which gathers weights into memory that is not always the same."
            )
        drops = max(getattr(child, "attention_dropout", 0.0) or 0.0, getattr(child, "hidden_dropout", 0.0) or 0.0)
        if child.training and drops > 0.0 and getattr(child, "get_rng_state_tracker", None) is not None:
            raise ValueError(
                f"{who} draws dropout from the streams of get_rng_state_tracker, whose states the host swaps in a forward: set dropout to "
                "0, or use torch's default stream."
            )
