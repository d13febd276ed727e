"""`SlowLink`: two network namespaces joined by a pair of virtual cards whose rate is limited, for two ranks on one machine.

    refusal = why_not()                       # None where namespaces may be made
    enter()                                   # this program again, in a namespace of its own: returns only inside of it
    with SlowLink(megabits=240) as link:
        link.run(["python", "rank.py"])       # in both namespaces at once, with RANK, MASTER_ADDR and gloo's interface set
        link.limit(120)

Bytes between the ranks really pass the kernel's network stack and wait in a token bucket (`tc ... tbf`; netem is not in every kernel).
Namespaces and cards are gone with the process that made them, however it ends, and so are its ranks: nothing is left on the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

ADDRESSES = ("10.9.0.1", "10.9.0.2")
CARDS = ("slow0", "slow1")
_INSIDE = "OTTAVA_SLOW_LINK"  # of the environment: this process has a namespace of its own already
_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
# A bucket of 256 kB lets a burst through and no more; 2 s of queue hold what two collectives send, so that TCP never sees a loss.
_BUCKET = ("burst", "256kb", "latency", "2s")
_SETTINGS = {
    "tcp_wmem": "4096 16777216 16777216",  # bytes of TCP's buffers: smallest, first, largest
    "tcp_rmem": "4096 16777216 16777216",
    "tcp_slow_start_after_idle": "0",  # a product between two messages is no reason to begin slowly again
}


def _unshare() -> list[str]:
    """The command that gives a process a network of its own: root's, or that of a user who becomes root inside."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def why_not() -> str | None:
    """Why there can be no such link here, in words; None if there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages util-linux and iproute2)"
    trial = f"ip link add trial0 type veth peer name trial1 && tc qdisc add dev trial0 root tbf rate 1mbit {' '.join(_BUCKET)}"
    done = subprocess.run([*_unshare(), "sh", "-c", trial], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return f"network namespaces are not allowed here: {said[-1] if said else f'exit code {done.returncode}'}"
    return None


def enter() -> None:
    """Starts this program again, with its arguments, in a network namespace; returns where that has been done."""
    if os.environ.get(_INSIDE) is None:
        command = [*_unshare(), sys.executable, *sys.argv]
        os.execvpe(command[0], command, os.environ | {_INSIDE: "1"})


class SlowLink:
    """Two namespaces, this process's and another, and a link between them of `megabits` a second each way."""

    def __init__(self, megabits: float) -> None:
        if megabits <= 0:
            raise ValueError(f"SlowLink: megabits a second must be above 0, got {megabits}.")
        self.megabits = megabits
        self._holder: subprocess.Popen[bytes] | None = None
        self._runs = 0

    def __enter__(self) -> SlowLink:
        # The second namespace lives as long as a process in it; this one ends when nobody holds the other end of its input.
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        self._await_namespace()
        self._do(
            0, "ip", "link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1], "netns", str(self._holder.pid)
        )
        for side, (card, address) in enumerate(zip(CARDS, ADDRESSES)):
            self._do(side, "ip", "addr", "add", f"{address}/24", "dev", card)
            self._do(side, "ip", "link", "set", card, "up")
            self._do(side, "ip", "link", "set", "lo", "up")
            for name, value in _SETTINGS.items():
                self._do(side, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
        self.limit(self.megabits)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
        with contextlib.suppress(RuntimeError):  # it may have gone with the other namespace
            self._do(0, "ip", "link", "del", CARDS[0])

    def limit(self, megabits: float) -> None:
        """Another rate, each way."""
        self.megabits = megabits
        for side, card in enumerate(CARDS):
            rate = f"{max(round(megabits * 1000), 8)}kbit"
            self._do(side, "tc", "qdisc", "replace", "dev", card, "root", "tbf", "rate", rate, *_BUCKET)

    def run(self, command: Sequence[str], timeout: float) -> None:
        """`command` as rank 0 and rank 1, until both are done. A rank that fails, or takes longer than `timeout` seconds, ends both."""
        self._runs += 1
        shared = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(29500 + self._runs),
            "OMP_NUM_THREADS": "1",
        }
        ranks = []
        for side, card in enumerate(CARDS):
            env = os.environ | shared | {"RANK": str(side), "LOCAL_RANK": str(side), "GLOO_SOCKET_IFNAME": card}
            held = ["setpriv", "--pdeathsig", "KILL"]  # a rank ends when this process does
            ranks.append(subprocess.Popen([*self._inside(side), *held, *command], env=env, start_new_session=True))
        try:
            _wait_for(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()

    def _await_namespace(self) -> None:
        """`unshare` has to run before its process has another network than ours."""
        assert self._holder is not None
        ours = os.readlink("/proc/self/ns/net")
        for _ in range(500):
            if os.readlink(f"/proc/{self._holder.pid}/ns/net") != ours:
                return
            time.sleep(0.01)
        raise RuntimeError("SlowLink: the second network namespace did not come up in 5 s.")

    def _inside(self, side: int) -> list[str]:
        assert self._holder is not None
        return [] if side == 0 else ["nsenter", "--target", str(self._holder.pid), "--net"]

    def _do(self, side: int, *command: str) -> None:
        done = subprocess.run([*self._inside(side), *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"SlowLink: {' '.join(command)} failed: {done.stderr.strip() or done.returncode}")


def _wait_for(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    waiting = set(range(len(ranks)))
    while waiting:
        for rank in list(waiting):
            code = ranks[rank].poll()
            if code is None:
                continue
            if code:
                raise RuntimeError(f"SlowLink: rank {rank} ended with exit code {code}.")
            waiting.remove(rank)
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(f"SlowLink: ranks {sorted(waiting)} did not finish in time and were killed.")
        time.sleep(0.05)
