"""Restart in place on a GPU: survivors keep their CUDA contexts, and the run has the bits of one that nothing happened to."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ottava import torch_private
from train.runs import lines, tiny
from train.test_launch import by_step, end, ranks_of, start, wait_for_step


@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_on_one_gpu_go_on_after_one_was_killed(tmp_path: Path, victim: int) -> None:
    config = tiny(
        tmp_path,
        model={"hidden_size": 128, "ffn_hidden_size": 256},
        train={"steps": 60, "evaluate_every": 0, "deterministic": True},
        checkpoint={"every": 25, "background": True},
        parallel={"ranks": 2},
        metrics={"fp8_every": 0},
    )
    whole = replace(config, train=replace(config.train, run=str(tmp_path / "whole")))
    code, output = end(start(whole))
    assert code == 0, output
    launcher = start(config)
    wait_for_step(config, 12, launcher)
    os.kill(ranks_of(launcher)[victim], signal.SIGKILL)
    code, output = end(launcher)
    assert code == 0 and "the others go on" in output and "Going on from the copies in memory" in output, output
    assert by_step(lines(config)) == by_step(lines(whole))
    assert any(line["attempt"] == 1 for line in lines(config))


def test_nccl_is_aborted_and_can_be_made_again() -> None:
    for _ in range(2):
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        numbers = torch.ones(8, device="cuda")
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        assert torch_private.abort_device_groups() >= 1
        dist.destroy_process_group()
    assert torch_private.abort_device_groups() == 0
