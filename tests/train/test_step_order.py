"""In which order the host does what a step needs: what a GPU would wait for is launched while it still has work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ottava.distributed import fsdp
from ottava.train.loop import Loop
from ottava.train.optimizer import Numbers
from ottava.train.world import Place, World
from train.runs import tiny


def test_fp8_copies_and_the_next_batch_come_before_the_host_waits_for_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noting(name: str, owner: Any, attribute: str) -> None:
        original = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, call)

    config = tiny(
        tmp_path,
        train={"steps": 3, "global_batch": 4, "micro_batch": 4},
        precision={"recipe": "Float8CurrentScaling"},
        optimizer={"name": "fused_adam"},
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources:
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=60.0))
        loop = Loop(config, world, resources)
        noting("refresh", fsdp, "renew")
        noting("take", type(loop.batches), "take_early")
        noting("wait", Numbers, "read")
        noting("forward", type(loop.model.module), "forward")
        for _ in range(2):
            assert loop._step() is not None
    assert order.index("wait") == 6  # of the first step, when the second one is launched
    assert order[:6] == ["forward", "refresh", "take"] * 2
