"""The rate-limited link between two namespaces: made, used and gone; and where it cannot be, the benchmark says why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slow_link = load("slow_link")
WHY_NOT = slow_link.why_not()

SCRIPT = f"""
import subprocess, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import slow_link
slow_link.enter()
with slow_link.SlowLink(megabits=200) as link:
    card = "$GLOO_SOCKET_IFNAME"
    link.run(["sh", "-c", f"echo rank $RANK of $WORLD_SIZE: $(ip -o -4 addr show dev {{card}}) $(tc qdisc show dev {{card}})"], 30)
    link.limit(50)
    link.run(["sh", "-c", "tc qdisc show dev $GLOO_SOCKET_IFNAME"], 30)
    try:
        link.run(["sh", "-c", "test $RANK = 0 || exit 9; sleep 60"], 30)
    except RuntimeError as error:
        print(error)
print("left:", subprocess.run(["ip", "-o", "link", "show", "type", "veth"], capture_output=True, text=True).stdout.strip() or "nothing")
"""


@pytest.mark.skipif(WHY_NOT is not None, reason=f"no slow link: {WHY_NOT}")
def test_two_ranks_have_a_card_each_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank, address in enumerate(slow_link.ADDRESSES):
        assert f"rank {rank} of 2: " in done.stdout and address in done.stdout
    assert done.stdout.count("rate 200Mbit") == 2 and done.stdout.count("rate 50Mbit") == 2
    assert "rank 1 ended with exit code 9" in done.stdout
    assert "left: nothing" in done.stdout


@pytest.mark.skipif(WHY_NOT is not None, reason=f"no slow link: {WHY_NOT}")
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nimport slow_link\nslow_link.enter()\n"
        "with slow_link.SlowLink(megabits=200) as link:\n    link.run(['sh', '-c', 'echo $$; exec sleep 600'], 600)\n"
    )
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as conductor:
        assert conductor.stdout is not None
        ranks = [int(conductor.stdout.readline()) for _ in range(2)]
        conductor.kill()
    for _ in range(200):
        left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"ranks {left} outlive the process that started them")


def test_a_machine_without_the_tools_is_told_what_is_missing(tmp_path: Path) -> None:
    """In a process of its own, whose PATH has nothing: the benchmark stops with an exit code of its own before it starts any rank."""
    env = os.environ | {"PATH": str(tmp_path)}
    command = [sys.executable, str(BENCHMARKS / "overlap_cpu.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 77
    assert "unshare and nsenter and setpriv and ip and tc not found (packages util-linux and iproute2)" in done.stderr


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        slow_link.SlowLink(megabits=0)
