"""How ranks find each other, after a restart too, and what their process group is made with."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from ottava.train.world import Place, World, rendezvous


def test_a_rank_that_reads_an_old_address_waits_for_the_new_one():
    known = dist.HashStore()
    gone = rendezvous(known, "localhost", rank=0)
    stale = known.get("ottava/meeting")
    del gone  # its server ends
    found: list[dist.Store] = []
    other = threading.Thread(target=lambda: found.append(rendezvous(known, "localhost", rank=1)))
    other.start()
    time.sleep(0.5)
    assert not found and known.get("ottava/meeting") == stale
    served = rendezvous(known, "localhost", rank=0)
    other.join(timeout=30)
    served.set("from", "rank 0")
    assert found[0].get("from") == b"rank 0"


def test_a_server_with_another_secret_is_not_it():
    known, stranger = dist.HashStore(), dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stranger.set("secret", "its own")
    known.set("ottava/meeting", f"{stranger.port} expected")
    with pytest.raises(TimeoutError, match="rank 1 did not find rank 0"):
        rendezvous(known, "localhost", rank=1, seconds=1.0)


@pytest.mark.parametrize(
    "gpus, place, backend, bound",
    [
        (8, Place(11, 16, 3, 8), "cpu:gloo,cuda:nccl", torch.device("cuda", 3)),
        (1, Place(0, 1, 0, 1), "cpu:gloo,cuda:nccl", torch.device("cuda", 0)),
        (1, Place(1, 2, 1, 2), "cpu:gloo,cuda:gloo", None),  # two ranks on one GPU: gloo has nothing to bind
        (0, Place(1, 2, 1, 2), "gloo", None),
    ],
    ids=["two nodes of 8", "one GPU", "a shared GPU", "CPU"],
)
def test_nccl_is_bound_to_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, place: Place, backend: str, bound: torch.device | None
) -> None:
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append((backend, options)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    World(place, timeout=600.0)
    ((used, options),) = made
    assert used == backend and options.get("device_id") == bound
