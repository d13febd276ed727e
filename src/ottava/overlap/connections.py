"""CUDA_DEVICE_MAX_CONNECTIONS: how many queues a GPU takes work from, and why communication beside products wants many.

The driver spreads the streams of a process over this many hardware queues: 8 if nobody says otherwise, at most 32. Streams that share
a queue wait for each other in the order of their launches, whatever they have to do with one another. A step with tensor parallelism
and FSDP2 has about a dozen streams: products, FSDP2's gathers, reductions and copies, NCCL's own, and the copies of this package. With 8
queues two of them meet now and then; with one queue all of them do, and a gather of FSDP2 stands behind a message of tensor parallelism.

TransformerEngine asks for one queue, so that its communication kernels reach the GPU before a product that fills it. Copy engines
need no place on the GPU's multiprocessors, so copies through symmetric memory do not need that order. NCCL's kernels do gain from it, where
nothing else communicates. CUDA reads the variable once, when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MANY = 32
"""As many as there are."""


def ask_for_connections(environment: MutableMapping[str, str]) -> None:
    """Sets the variable, unless somebody has. Before CUDA starts, in a process that hides communication.

    >>> ask_for_connections(os.environ)
    """
    environment.setdefault(VARIABLE, str(MANY))


def connections_advice(environment: Mapping[str, str], sharded: bool) -> str | None:
    """What is wrong with the variable for ranks that hide tensor-parallel communication; None: nothing.

    sharded: FSDP2 gathers and reduces beside it.

    >>> connections_advice({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, sharded=True)
    'CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams one queue ...'
    """
    value = environment.get(VARIABLE)
    if value is None:
        return None
    if not value.isdigit() or not 1 <= int(value) <= MANY:
        return f"{VARIABLE}={value} is not a number from 1 to {MANY}: CUDA takes 8 queues instead."
    if int(value) < 8 and sharded:
        queues = "one queue" if value == "1" else f"{value} queues"
        return (
            f"{VARIABLE}={value} gives all streams {queues}, in which FSDP2's gathers and tensor-parallel messages wait for each other: "
            f"unset it, or set it to {MANY} before the program starts."
        )
    return None
