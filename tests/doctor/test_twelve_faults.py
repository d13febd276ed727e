"""Twelve faults in real ranks of `ottava doctor`, each by itself and as it happens outside: by the command line, signals, mounts, limits,
namespaces. Each is found and its rank or link named. And twenty examinations of sound ranks report nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor import faulty_ranks as faulty
from doctor.test_checks import SOCKETS
from doctor.test_faults import problems, said
from ottava.doctor import Options

pytestmark = [pytest.mark.extra, pytest.mark.timeout(900)]

DOCTOR = "from ottava.cli.main import main; import sys; sys.exit(main(['doctor', *sys.argv[1:]]))"
TESTS = Path(__file__).resolve().parents[1]


class Started:
    """Ranks of `ottava doctor`, each a process of its own, with what is put before it (`unshare`, `taskset`, ...)."""

    def __init__(self, tmp_path: Path, size: int = 2) -> None:
        self.size, self.folder = size, tmp_path
        self.before: dict[int, list[str]] = {}
        self.variables: dict[int, dict[str, str]] = {}
        self.code: dict[int, str] = {}
        self.words: list[str] = []
        self.address = "127.0.0.1"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.size):
            known = {
                "RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": self.address, "MASTER_PORT": str(port),
            }  # fmt: skip
            words = [*self.before.get(rank, []), sys.executable, "-c", self.code.get(rank, "") + DOCTOR, "--json"]
            words += ["--run", str(self.folder), "--space-gib", "0.001", "--timeout", "40", *self.words]
            path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
            variables = os.environ | known | {"PYTHONPATH": path} | self.variables.get(rank, {})
            self.processes.append(
                subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )

    def report(self, rank: int = 0) -> dict[str, Any]:
        """What `rank` prints; and it exits with 0 exactly if it is sound."""
        if not self.processes:
            self.start()
        text, error = self.processes[rank].communicate(timeout=240)
        assert text, error
        found = json.loads(text)
        assert self.processes[rank].returncode == (0 if found["sound"] else 1)
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.end()


def found_slow(report: dict[str, Any], rank: int) -> bool:
    """As a problem; or, where the machine has much other work, as a warning that says so."""
    named = [f for f in report["findings"] if f["check"] == "speed" and f["ranks"] == [rank]]
    return bool(named) and "of its peers'" in named[0]["message"] and named[0]["status"] in ("problem", "warning")


def test_1_a_rank_that_runs_a_tenth_of_the_time(ranks: Started) -> None:
    """As under `cpulimit`: stopped and continued by signals, once it has imported what it needs."""
    ready = ranks.folder / "ready"
    ranks.code[1] = f"import ottava.doctor; open({str(ready)!r}, 'w').close(); "
    ranks.start()
    limited, over = ranks.processes[1], threading.Event()

    def limit() -> None:
        while limited.poll() is None and not over.is_set():
            if ready.exists():
                limited.send_signal(signal.SIGSTOP)
                time.sleep(0.18)
                limited.send_signal(signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        report = ranks.report()
        assert found_slow(report, 1), report
    finally:
        over.set()
        thread.join()


def idle(core: int, seconds: float = 1.0) -> float:
    """Share of the time that a core has nothing to do."""

    def ticks() -> list[int]:
        (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")]
        return [int(word) for word in line.split()[1:9]]

    before = ticks()
    time.sleep(seconds)
    passed = [now - then for now, then in zip(ticks(), before)]
    return passed[3] / max(sum(passed), 1)


def a_free_core(cores: list[int], seconds: float = 180.0) -> int:
    """One that has little to do, as soon as there is one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for core in cores:
            if idle(core) > 0.7:
                return core
    pytest.skip(f"all of the cores {cores} were busy for {seconds:.0f} s: where all are, nobody can say who is slow")


def test_1_a_rank_whose_core_is_busy(ranks: Started) -> None:
    """Seven loops that never end share its core, from when it has imported what it needs."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    free = a_free_core(cores)
    other = next(core for core in cores if core != free)
    ready = ranks.folder / "ready"
    ranks.code[1] = f"import ottava.doctor; open({str(ready)!r}, 'w').close(); "
    ranks.before = {0: ["taskset", "-c", str(free)], 1: ["taskset", "-c", str(other)]}
    ranks.start()
    wait_for(ready)
    loop = ["taskset", "-c", str(other), sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(7)]
    try:
        report = ranks.report()
        assert found_slow(report, 1), report
        (named,) = [f for f in report["findings"] if f["check"] == "speed"]
        assert named["status"] == "warning" or "something else has its cores" in named["message"], report
    finally:
        for process in busy:
            process.kill()
            process.wait()


def wait_for(path: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come in {seconds:.0f} s"
        time.sleep(0.05)


def test_2_a_slow_link_of_the_only_pair(ranks: Started) -> None:
    names, bridge = [f"ottava-{os.getpid()}-{n}" for n in "ab"], f"ot{os.getpid()}"
    lines = [f"ip netns add {name}" for name in names]
    lines += [f"ip link add {bridge} netns {names[0]} type veth peer name {bridge} netns {names[1]}"]
    for n, name in enumerate(names):
        lines += [
            f"ip -n {name} addr add 10.78.0.{n + 1}/24 dev {bridge}",
            f"ip -n {name} link set {bridge} up",
            f"ip -n {name} link set lo up",
        ]
    lines += [f"tc -n {names[1]} qdisc add dev {bridge} root tbf rate 50mbit burst 256kb latency 400ms"]
    try:
        for line in lines:
            made = subprocess.run(line.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces need root: {line}: {made.stderr.strip()}")
        ranks.before = {rank: ["ip", "netns", "exec", name] for rank, name in enumerate(names)}
        ranks.variables = {rank: {"GLOO_SOCKET_IFNAME": bridge} for rank in range(2)}
        ranks.address = "10.78.0.1"
        report = ranks.report()
        named = [f for f in report["findings"] if f["check"] == "links" and f["ranks"] == [0, 1]]
        assert named and "GB/s, and" in named[0]["message"] and "carries 1.25" in named[0]["message"], report
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_3_another_version(ranks: Started) -> None:
    ranks.code[1] = "import ottava; ottava.__version__ = '0.0.7'; "
    report = ranks.report()
    assert problems(report) == [("versions", [1])] and "ottava 0.0.7" in said(report, "versions")


def test_4_a_wrong_interface(ranks: Started) -> None:
    ranks.variables[1] = {"GLOO_SOCKET_IFNAME": "ib7"}
    report = ranks.report()
    assert ("network", [1]) in problems(report) and "GLOO_SOCKET_IFNAME=ib7 names no interface" in said(
        report, "network"
    )


def test_5_a_full_disk(ranks: Started) -> None:
    in_small = f'mount -t tmpfs -o size=1m none {ranks.folder} && exec "$@"'
    ranks.before[1] = unshare(in_small)
    report = ranks.report()
    assert problems(report) == [("disk", [1])] and "No space left" in said(report, "disk")


def unshare(script: str) -> list[str]:
    """A shell in a mount namespace of its own, that goes on with the words that follow."""
    words = ["unshare", "-m", "sh", "-c", script, "sh"]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace needs root")
    return words


def test_6_little_shared_memory(ranks: Started) -> None:
    ranks.before[1] = unshare('mount -t tmpfs -o size=64m none /dev/shm && exec "$@"')
    report = ranks.report()
    assert problems(report) == [("host", [1])] and "--shm-size" in said(report, "host")


def test_7_a_wrong_clock(ranks: Started) -> None:
    ranks.code[1] = "import time; real = time.time; time.time = lambda: real() - 30; "
    report = ranks.report()
    assert problems(report) == [("clock", [1])] and "behind the others" in said(report, "clock")


@pytest.mark.parametrize("when", ["at once", "midway"])
def test_8_a_stopped_rank(ranks: Started, when: str) -> None:
    ranks.size, ranks.words = 3, ["--timeout", "15" if when == "at once" else "30"]
    if when == "midway":  # as soon as the ranks measure links
        ranks.code[2] = (
            "import os, signal; from ottava.doctor import links; "
            "links.measure = lambda *given: os.kill(os.getpid(), signal.SIGSTOP); "
        )
    ranks.start()
    if when == "at once":
        ranks.processes[2].send_signal(signal.SIGSTOP)
    for rank in (0, 1):
        report = ranks.report(rank)
        assert ("ranks", [2]) in problems(report), report


def test_9_a_wrong_local_rank(ranks: Started) -> None:
    ranks.variables[1] = {"LOCAL_RANK": "7"}
    report = ranks.report()
    assert problems(report) == [("places", [1])] and "LOCAL_RANK is 7" in said(report, "places")


def test_10_two_ranks_on_one_gpu(ranks: Started) -> None:
    for rank in range(2):
        ranks.code[rank] = "from doctor.faulty_ranks import one_gpu_for_all; one_gpu_for_all(); "
    report = ranks.report()
    assert problems(report) == [("places", [0, 1])] and "drive one GPU" in said(report, "places")


def test_11_few_open_files(ranks: Started) -> None:
    ranks.before[1] = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh"]
    report = ranks.report()
    assert problems(report) == [("host", [1])] and "ulimit -n" in said(report, "host")


def test_12_nccl_on_sockets(ranks: Started, tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(SOCKETS)
    ranks.words = ["--nccl-log", str(log)]
    report = ranks.report()
    assert problems(report) == [("NCCL", [7, 8])] and "rank 7 to rank 8 (log of node-0)" in said(report, "NCCL")


@pytest.mark.timeout(3000)
def test_sound_ranks_are_sound_twenty_times(tmp_path: Path) -> None:
    """Also on a machine that has other work."""
    alarms = []
    for turn in range(20):
        report = faulty.reports(2 + turn % 2, {}, Options(run=str(tmp_path), timeout=60.0))[0]
        alarms += [(turn, f["check"], f["message"]) for f in report["findings"] if f["status"] == "problem"]
    assert alarms == []
