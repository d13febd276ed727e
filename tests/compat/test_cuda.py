"""`python -m ottava.compat` without a GPU: `torch.cuda` functions that scripts call answer for the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ottava.compat import cuda

SCRIPT = """
import time
import torch
from transformer_engine.pytorch.utils import get_device_compute_capability

torch.cuda.set_device(3)
torch.cuda.synchronize()
assert torch.cuda.get_device_capability() == get_device_compute_capability() == (0, 0)
assert not torch.cuda.is_available()
before = torch.cuda.memory_allocated("cpu")
held = torch.ones(3, 1024, 1024)
grown = torch.cuda.memory_allocated() - before
del held
print(grown / 2**20, (torch.cuda.memory_allocated() - before) / 2**20)
torch.cuda.reset_peak_memory_stats()
low = torch.cuda.max_memory_allocated()
torch.ones(64, 1024, 1024).sum()
print((torch.cuda.max_memory_allocated() - low) / 2**20)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
time.sleep(0.02)
end.record()
end.synchronize()
print(start.elapsed_time(end))
assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
state = torch.cuda.get_rng_state()
first = torch.rand(4, device="cpu")
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(4), first)
import torch._dynamo  # keeps a table of torch's functions by identity
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux and glibc count")
def test_a_script_measures_its_memory_and_time_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "ottava.compat", "script.py"]
    env = {"PYTHONPATH": str(Path(cuda.__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown, left, peak, milliseconds = (float(x) for x in done.stdout.split())
    assert 12 <= grown < 12.5 and left < 0.5  # MiB
    assert 250 < peak < 300
    assert 20 <= milliseconds < 2000
    assert done.stderr.count("torch.cuda.memory_allocated answers for the CPU") == 1


def test_an_importing_program_keeps_torchs_functions() -> None:
    from ottava import compat

    before = torch.cuda.set_device
    with compat.installed():
        assert torch.cuda.set_device is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_programs_that_want_a_newer_gpu_can_be_told_of_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, torch\nprint(torch.cuda.get_device_capability(), sys.argv[1:])\n")
    env = {"PYTHONPATH": str(Path(cuda.__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "ottava.compat", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    done = run("--capability", "10.0", "script.py", "--capability", "9.0")
    assert (
        done.stdout == "(10, 0) ['--capability', '9.0']\n"
        and "get_device_capability answers for the CPU" in done.stderr
    )
    wrong = run("--capability", "script.py")
    assert wrong.returncode == 2 and "--capability needs a number such as 9.0" in wrong.stderr
