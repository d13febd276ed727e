"""Where shards lie: weights are gathered for every layer, so their ranks should be joined by the fast links."""

from __future__ import annotations

from ottava.detect.finding import Finding
from ottava.detect.machine import Machine
from ottava.detect.units import Unit


def check_shards(units: list[Unit], machine: Machine) -> list[Finding]:
    """Units whose shards lie in several islands, told once for all that are alike.

    >>> check_shards(units_of(model), Machine(gpus_per_node=8, nodes=4))
    [Finding(level='warning', message='1-D FSDP over 32 ranks gathers every weight between islands of 8 GPUs. ...')]
    """
    found: dict[str, Finding] = {}
    for unit in units:
        islands = {rank // machine.island for rank in unit.shard}
        if unit.kind == "DDP" or len(islands) == 1:
            continue
        span = len(unit.shard)
        finding = beyond_island(f"{span} ranks", span, unit.replicas, machine.island, _advice(unit, machine))
        found.setdefault(finding.message, finding)
    return list(found.values())


def beyond_island(group: str, span: int, replicas: int, island: int, advice: str) -> Finding:
    """What is said of a shard group that does not lie in one island. group: what it is called; span: its ranks."""
    if span > island and replicas == 1:
        text = f"1-D FSDP over {group} gathers every weight between islands of {island} GPUs."
        return Finding("warning", text + advice, "1-D FSDP across nodes")
    if span > island:
        text = f"{group} is larger than the fast-link island of {island} GPUs, so weights are gathered over the slow links."
    else:
        text = f"{group} does not divide the fast-link island of {island} GPUs, so some weights are gathered over the slow links."
    return Finding("warning", text + advice, "shards beyond NVLink")


def _advice(unit: Unit, machine: Machine) -> str:
    if machine.world_size % machine.island or machine.island == 1:
        return ""
    sizes = f"({machine.world_size // machine.island}, {machine.island})"
    how = {
        "FSDP2": f'fully_shard with mesh=init_device_mesh("cuda", {sizes}, mesh_dim_names=("dp_replicate", "dp_shard"))',
        "FSDP1": f"ShardingStrategy.HYBRID_SHARD over a mesh of {sizes}",
    }[unit.kind]
    return f" If one island's memory holds the model, use HSDP: {how} gathers inside islands only."
