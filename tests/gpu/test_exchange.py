"""Plain values between ranks over NCCL, whose sockets stay on the loopback; a write through a view of a weight on a GPU."""

from __future__ import annotations

import subprocess
import sys

import torch

import ottava
from ottava import recipe
from ottava.quant.weight import Weight
from ottava.quant.weight_state import fresh, note_made

RANK = """
import os
import torch
import torch.distributed as dist
from ottava import exchange
from ottava.train.listen import serve_store
from ottava.train.world import Place, World

store = serve_store()
with World(Place(0, 1, 0, 1, "127.0.0.1", store.port), timeout=60.0) as world:
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo" and "nccl" in dist.get_backend_config()
    assert exchange.all_gather(("a", torch.float32), None, "cuda") == [("a", torch.float32)]
    assert world.share({"a": [1]}) == {"a": (1,)} and world.sum([2.0]) == [2.0]
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]
print("done")
"""


def test_values_travel_over_nccl_on_the_loopback():
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr


def test_a_write_through_a_view_of_a_master_is_seen():
    for write in (lambda w: w.__setitem__((3, 5), 2.0), lambda w: w[3].fill_(2.0), lambda w: w.T[5].mul_(3.0)):
        weight = Weight.mastered("w", torch.randn(32, 32, device="cuda"))
        weight.memory.data = {"rowwise": torch.zeros(1, device="cuda")}  # as if bytes had been made
        note_made(weight)
        assert fresh(weight)
        write(weight)
        assert not fresh(weight)
    with ottava.autocast(recipe=recipe.Float8CurrentScaling()):  # the module that holds such weights still runs
        assert ottava.Linear(32, 32, device="cuda")(torch.randn(32, 32, device="cuda")).isfinite().all()
