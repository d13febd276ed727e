"""Which ports are open, and to whom: those of ranks on one machine to that machine alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ottava.train import listen
from ottava.train.listen import LOOPBACK, serve_store
from ottava.train.world import Place

ALL_INTERFACES = {"00000000", "0" * 32}


def listening(pid: int | str = "self", ports: bool = False) -> set[str]:
    """Addresses, as /proc writes them, of all sockets on which a process listens. ports: with their ports."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1] if ports else words[1].partition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    return address.endswith("7F") or address in ("0" * 24 + "01000000", "0000000000000000FFFF00000100007F")


def test_a_store_listens_where_it_is_told():
    before = listening(ports=True)
    store = serve_store()
    opened = {each.partition(":")[0] for each in listening(ports=True) - before}
    assert opened and all(map(is_loopback, opened)) and store.port
    store.set("a", "b")
    with socket.create_connection((LOOPBACK, store.port)):
        pass


@pytest.mark.parametrize(
    ("local", "address", "everywhere"),
    [(True, "127.0.1.1", False), (False, "127.0.1.1", True), (False, "192.0.2.1", True), (True, LOOPBACK, False)],
    ids=["own name", "Debian's name, others elsewhere", "a name that leads here by a detour", "loopback"],
)
def test_a_name_that_cannot_be_listened_on_is_said(monkeypatch, capsys, local, address, everywhere):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    warned: list[str] = []
    monkeypatch.setattr(listen, "warn_once", warned.append)
    with listen._listener("node-0", 0, local) as listener:
        assert (listener.getsockname()[0] == "0.0.0.0") == everywhere == bool(warned)


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(OSError, match="in use"):
        serve_store(port=taken.getsockname()[1])


RANK = """
import sys
from ottava.train.listen import serve_store
from ottava.train.world import Place, World
store = serve_store()
with World(Place(0, 1, 0, 1, "127.0.0.1", store.port), timeout=60.0) as world:
    world.sum([1.0])
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_rank_alone_listens_on_the_loopback():
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        opened = listening(rank.pid)
        rank.communicate("\n", timeout=60)
    assert rank.returncode == 0 and len(opened) >= 1 and all(map(is_loopback, opened)), opened


def test_what_a_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    listen.stay_on_this_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7" and os.environ["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")
    assert Place(0, 4, 0, 4).local and not Place(0, 8, 0, 4).local
