"""`python -m ottava.compat` without a GPU: programs that ask for NCCL get gloo, and are told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ottava.compat import process_groups

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import new_group
assert dist.is_nccl_available()
dist.init_process_group(backend="nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cpu:0"))
groups = [dist.new_group(backend="nccl"), new_group([0], backend="NCCL"), dist.new_subgroups_by_enumeration([[0]], backend="nccl")[0]]
groups += [dist.new_group(backend="gloo"), dist.new_group()]
print(dist.get_backend(), *(dist.get_backend(group) for group in groups))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_program_for_nccl_talks_through_gloo(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {"PYTHONPATH": str(Path(process_groups.__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-m", "ottava.compat", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gloo"] * 6
    assert done.stderr.count("process groups are asked for by the backend 'nccl', and made of gloo") == 1
    assert done.stderr.count("process groups are not bound to a device") == 1


def test_backends_of_devices_are_replaced_one_by_one() -> None:
    assert process_groups.without_gpu("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:gloo"
    assert process_groups.without_gpu(None) is None
    assert process_groups.without_gpu("mpi") == "mpi"
