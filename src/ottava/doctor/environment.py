"""Environment variables that decide how ranks communicate: equal in all ranks, and none that turns fast paths off."""

from __future__ import annotations

import os
from typing import Any

from ottava.doctor.finding import Check, Facts, Finding, differing, listed

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
OTHERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "UCX_TLS")
OFF = {
    "NCCL_P2P_DISABLE": "GPUs of a machine talk through its memory instead of NVLink",
    "NCCL_IB_DISABLE": "machines talk over sockets instead of InfiniBand or RoCE",
    "NCCL_SHM_DISABLE": "shared memory is not used inside a machine",
    "NCCL_NVLS_ENABLE": "sums in the NVLink switch are off",
}
"""Variables that turn something off: by the value 1, NVLS by 0."""
MAY_DIFFER = ("NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE")
NO_GPU_DIRECT = ("LOC", "0")


def measure(options: Any) -> Facts:
    """Those that are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES) or name in OTHERS}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """What differs is a problem, what turns fast paths off a warning."""
    found = []
    for name in sorted({name for fact in facts for name in fact} - set(MAY_DIFFER)):
        usual, odd = differing([fact.get(name, "not set") for fact in facts], names)
        for value, ranks in odd.items():
            who = listed([names[r] for r in ranks])
            found.append(
                Finding("environment", "problem", f"{who}: {name} is {value}; elsewhere {usual}", tuple(ranks))
            )
        off = "0" if name == "NCCL_NVLS_ENABLE" else "1"
        if name in OFF and usual == off:
            found.append(Finding("environment", "warning", f"{name}={usual}: {OFF[name]}"))
        if name == "NCCL_NET_GDR_LEVEL" and usual in NO_GPU_DIRECT:
            found.append(
                Finding("environment", "warning", f"{name}={usual}: network cards do not read GPU memory directly")
            )
    if not found:
        shown = ", ".join(f"{name}={value}" for name, value in facts[0].items()) or "nothing that matters is set"
        found.append(Finding("environment", "ok", shown))
    return found


CHECK = Check("environment", measure, judge)
