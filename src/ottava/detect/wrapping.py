"""How a model is wrapped: by whom, and whether its blocks are.

FSDP gathers what one unit holds at once. A model whose root alone is a unit is gathered whole: its peak of memory is that of no sharding,
and nothing is left to gather while something else computes.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ottava.detect.finding import Finding


def check_wrapping(model: nn.Module) -> list[Finding]:
    """Two kinds of FSDP in one model, blocks that nobody wrapped, parameters that nobody reduces.

    >>> check_wrapping(fully_shard(model))
    [Finding(level='warning', message='only the root is wrapped, ...')]
    """
    from torch.distributed.fsdp import (  # here: it would double the time of `import ottava`
        FSDPModule,
        FullyShardedDataParallel,
    )

    first = [name for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    second = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if first and second:
        return [
            Finding(
                "error",
                f"FSDP1 and FSDP2 in one model: {_shown(first)} by FullyShardedDataParallel, {_shown(second)} by fully_shard. "
                "Each would gather and reduce what the other manages: use one of them.",
                "FSDP1 and FSDP2 mixed",
            )
        ]
    wrapped = first or second
    return _only_the_root(model, wrapped) or (_outside(model, wrapped) if wrapped and "" not in wrapped else [])


def _only_the_root(model: nn.Module, wrapped: list[str]) -> list[Finding]:
    """One unit around everything, or around everything but an embedding or a head: none of the blocks has a unit of its own."""
    outermost = [name for name in wrapped if not any(_inside(name, other) for other in wrapped)]
    if len(outermost) != 1:
        return []
    root = outermost[0]
    blocks = [f"{root}.{name}".lstrip(".") for name in _blocks(model.get_submodule(root))]
    if not blocks or any(unit == block or _inside(unit, block) for unit in wrapped for block in blocks):
        return []
    if any(_inside(block, unit) for unit in wrapped if unit != root for block in blocks):
        return []  # the blocks are parts of a unit: it is the block
    return [
        Finding(
            "warning",
            f"only the root is wrapped, so all weights are gathered at once and stay for the whole forward: "
            f"wrap each of the {len(blocks)} blocks ({_shown(blocks)}) first, then the root.",
            "only the root wrapped",
        )
    ]


def _inside(name: str, other: str) -> bool:
    """Whether module `name` lies below module `other`."""
    return name != other and (other == "" or name.startswith(other + "."))


def _outside(model: nn.Module, wrapped: list[str]) -> list[Finding]:
    """Trainable parameters that no wrapped module manages, while others are managed."""
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        return []
    inside = tuple(name + "." for name in wrapped)
    left = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(inside)]
    if not left:
        return []
    return [
        Finding(
            "error",
            f"blocks are wrapped and the root is not, so nobody reduces the gradients of {_shown(left)}: wrap the root last.",
        )
    ]


def _blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks: the longest list of modules with weights."""
    lists = [
        [f"{name}.{child}".lstrip(".") for child, block in m.named_children() if _has_weights(block)]
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    ]
    longest = max(lists, key=len, default=[])
    return longest if len(longest) > 1 else []


def _has_weights(block: nn.Module) -> bool:
    """FSDP1 takes a module's parameters away and leaves views of the same name, so a `weight` counts too."""
    return next(block.parameters(), None) is not None or any(hasattr(m, "weight") for m in block.modules())


def _shown(names: list[str], most: int = 3) -> str:
    names = [name.replace("_fsdp_wrapped_module.", "") or "the root" for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
