"""The decision chart, in a sentence: why a layout of this kind is the one for this run."""

from __future__ import annotations

from ottava.plan.cluster import Cluster
from ottava.plan.layouts import Layout
from ottava.plan.step_time import StepTime
from ottava.train.config import Config

SLOW_LINKS = 0.5
"""Of a step that is communication which nothing hides: above this, more GPUs do not help on such links."""


def advice(config: Config, cluster: Cluster, layout: Layout, time: StepTime, fits_one: bool, fits_domain: bool) -> str:
    """The chart's answer for the best layout. fits_one: the whole model trains on one GPU.
    fits_domain: it trains on the GPUs that NVLink joins.

    fits on one GPU -> plain, or DDP; fits on a node -> FSDP2; several nodes -> HSDP with the shard group inside the NVLink domain;
    a layer too large, or too few tokens a rank -> TP inside the node; slow links -> DiLoCo, which Ottava does not have yet.
    """
    sentences = [_mesh(cluster, layout, fits_one, fits_domain)]
    if layout.tp > 1:
        sentences.append(_tensor_parallel(config, cluster, layout))
    share = time.parts["communication"] / time.total
    if cluster.nodes > 1 and share > SLOW_LINKS:
        sentences.append(
            f"{share:.0%} of a step is communication that nothing hides: these links are too slow for a sum of gradients a step. Training "
            "with rare exchanges (DiLoCo) is made for such links, and Ottava does not do that yet; faster links or a larger global "
            "batch help."
        )
    return " ".join(sentences)


def _mesh(cluster: Cluster, layout: Layout, fits_one: bool, fits_domain: bool) -> str:
    inside = layout.shard * layout.tp <= cluster.island
    if layout.ranks == 1:
        return "The run fits on one GPU: plain training, nothing is spread."
    if layout.data_parallel == 1:
        return f"All {layout.ranks} GPUs split each layer; the data is not spread."
    if layout.shard == 1:
        whole = "one GPU" if layout.tp == 1 else f"{layout.tp} GPUs that split it"
        return f"The model fits on {whole}: {layout.replicate} copies of it (DDP), each with other data."
    could = " (a copy on every GPU would fit too, and is slower)" if fits_one else ""
    if layout.replicate == 1 and cluster.nodes == 1:
        return f"The model fits in a node: FSDP2 shards it over the {layout.shard} GPUs{could}."
    if inside and cluster.nodes == 1:
        return f"The model fits in a part of a node: {layout.replicate} copies, each sharded over {layout.shard} GPUs{could}."
    if inside:
        return (
            f"Several nodes: HSDP, shards over {layout.shard} GPUs inside the NVLink domain and {layout.replicate} copies between "
            f"nodes{could}."
        )
    beyond = f"{layout.shard * layout.tp} GPUs, {layout.shard * layout.tp // cluster.per_node} nodes"
    if fits_domain:
        return f"A copy in every NVLink domain would fit (HSDP) and is slower: it is sharded over {beyond}."
    return f"No copy fits into one NVLink domain with these types: it is sharded over {beyond}."


def _tensor_parallel(config: Config, cluster: Cluster, layout: Layout) -> str:
    sequences = config.train.global_batch
    if sequences < cluster.gpus:
        why = f"the global batch of {sequences} sequences is too small for {cluster.gpus} data-parallel ranks"
    else:
        why = "memory or communication of whole layers would cost more"
    return f"Tensor parallelism over {layout.tp} GPUs inside a node, because {why}."
