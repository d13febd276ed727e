"""The environment that ranks are started with: in the file that is submitted, each variable with its reason, and not in people's heads.

Nothing here changes what Ottava does (no environment variable does); these are read by NCCL, gloo, OpenMP and torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CARDS = re.compile(r"[=^]{0,2}[A-Za-z0-9_.:@-]+(,[A-Za-z0-9_.:@-]+)*")
"""As NCCL takes them: a list, perhaps with ^ (all but these) or = (exactly these) before it."""
OWNED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
}  # fmt: skip
"""Variables that the launchers set themselves."""


def variables(
    device: str, interface: str | None = None, hca: str | None = None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Name -> value, for ranks on a kind of device. interface: of the network between nodes. hca: cards, as NCCL_IB_HCA has them.

    >>> variables("cpu", interface="eth0")["GLOO_SOCKET_IFNAME"]
    'eth0'
    """
    for option, value in (("interface", interface), ("hca", hca)):
        if value is not None and not CARDS.fullmatch(value):
            raise ValueError(
                f"--{option} {value!r}: write the name of a card, or of several, such as eth0 or mlx5_0,mlx5_1."
            )
    found = {"OMP_NUM_THREADS": "1"}
    if device == "cuda":
        found |= {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if interface is not None:
        found["GLOO_SOCKET_IFNAME"] = interface
        if device == "cuda":
            found["NCCL_SOCKET_IFNAME"] = interface
    if hca is not None:
        if device != "cuda":
            raise ValueError(f"--hca {hca} is for NCCL, which ranks on a CPU do not use: leave it out.")
        found["NCCL_IB_HCA"] = hca
    return found | dict(more or {})


WHY = {
    "OMP_NUM_THREADS": "ranks share the cores of a node; more threads than cores only take turns",
    "NCCL_DEBUG": "NCCL's own warnings are in the log; INFO shows what it chose (ottava doctor --nccl-log)",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "a collective that fails ends its rank, so that the run can start again",
    "GLOO_SOCKET_IFNAME": "the network that ranks agree over",
    "NCCL_SOCKET_IFNAME": "the network that NCCL connects over",
    "NCCL_IB_HCA": "the cards that NCCL uses",
}


def assignments(words: list[str]) -> dict[str, str]:
    """`--env NAME=VALUE` as a dict.

    >>> assignments(["NCCL_DEBUG=INFO"])
    {'NCCL_DEBUG': 'INFO'}
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not NAME.fullmatch(name):
            raise ValueError(f"--env {word!r} is not of the form NAME=VALUE.")
        if name in OWNED:
            raise ValueError(f"--env {name}: the launcher sets {name} itself. Leave it out.")
        if "\n" in value:
            raise ValueError(f"--env {name}: a value has one line.")
        found[name] = value
    return found
