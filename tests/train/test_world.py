"""How ranks find each other after a restart."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from ottava.train.world import meet


def test_a_rank_that_reads_an_old_address_waits_for_the_new_one():
    known = dist.HashStore()
    gone = meet(known, "localhost", rank=0)
    stale = known.get("ottava/meeting")
    del gone  # its server ends
    found: list[dist.Store] = []
    other = threading.Thread(target=lambda: found.append(meet(known, "localhost", rank=1)))
    other.start()
    time.sleep(0.5)
    assert not found and known.get("ottava/meeting") == stale
    served = meet(known, "localhost", rank=0)
    other.join(timeout=30)
    served.set("from", "rank 0")
    assert found[0].get("from") == b"rank 0"


def test_a_server_with_another_secret_is_not_it():
    known, stranger = dist.HashStore(), dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stranger.set("secret", "its own")
    known.set("ottava/meeting", f"{stranger.port} expected")
    with pytest.raises(TimeoutError, match="rank 1 did not find rank 0"):
        meet(known, "localhost", rank=1, seconds=1.0)
