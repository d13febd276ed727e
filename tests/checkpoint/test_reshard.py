"""`reshard`, `ls` and `verify` from one process, in less memory than the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint.sharded_state import canonical
from ottava.checkpoint import Checkpoints, InvalidCheckpoint, Reader, reshard, verify


def test_every_cut_holds_the_same_tensors(tmp_path: Path) -> None:
    source = Checkpoints(tmp_path / "source", config={"lr": 1}).save(3, {"model": canonical(), "lr": 0.5})
    for shards, block in ((1, 1 << 20), (3, 64), (9, 1)):
        path = reshard(source, tmp_path / str(shards), shards, block_bytes=block)
        assert path == tmp_path / str(shards) / "step-00000003"
        assert all(row.good for row in verify(path))
        assert len(list(path.glob("*.distcp"))) == shards
        state = {"model": {n: torch.ones_like(t) for n, t in canonical().items()}, "lr": 0.0}
        loaded = Checkpoints(tmp_path / str(shards)).load(state)
        assert loaded is not None and loaded.config == {"lr": 1} and state["lr"] == 0.5
        for name, tensor in canonical().items():
            assert torch.equal(state["model"][name], tensor), name


def test_a_reader_reads_boxes(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, {"w": torch.arange(12).view(4, 3), "n": 2})
    reader = Reader(path)
    assert reader.read("w", ((1, 1), (2, 2))).tolist() == [[4, 5], [7, 8]]
    assert reader.values == {"n": 2} and reader.manifest.step == 1
    with pytest.raises(ValueError, match="no tensor 'v'"):
        reader.read("v")


def test_a_damaged_source_is_not_copied(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "source").save(1, {"w": torch.ones(1000)})
    shard = path / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match="__0_0.distcp"):
        reshard(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    with pytest.raises(ValueError, match="shards=0"):
        reshard(Checkpoints(tmp_path / "good").save(1, {"w": torch.ones(3)}), tmp_path / "target", 0)


IN_LITTLE_MEMORY = """
import resource, sys
import torch
from ottava.checkpoint import ls, reshard, verify
source, target = sys.argv[1:]
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
assert all(row.good for row in verify(source)) and list(ls(source))
path = reshard(source, target, 4, block_bytes=8 << 20)
assert all(row.good for row in verify(path))
print(peak() - before)
"""


def test_a_checkpoint_larger_than_the_memory(tmp_path: Path) -> None:
    """300 MB, of which one tensor has 200; the process may grow by 64 MB."""
    state = {"large": torch.zeros(50 << 20, dtype=torch.int32).view(-1, 1024), "small": torch.ones(25, 1 << 20)}
    source = Checkpoints(tmp_path / "source").save(1, state)
    del state
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(source), str(tmp_path / "target")]
    grown = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 64, f"{grown} MB"


def test_a_checkpoint_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    source = Checkpoints(tmp_path / "run").save(1, {"w": torch.ones(3)})
    for target in ("run", "other"):
        if target == "other":
            reshard(source, tmp_path / target)
        with pytest.raises(ValueError, match="step-00000001 exists, and is not replaced"):
            reshard(source, tmp_path / target, shards=2)
    assert all(row.good for row in verify(tmp_path / "run")) and [p.name for p in (tmp_path / "run").iterdir()] == [
        "step-00000001"
    ]
