"""`sever`: ends this process's connections to other ranks, so that nobody waits for anybody any more, here or there.

gloo has no abort: a rank that waits for one which is alive, and waits itself for a dead one, would wait until the timeout, and
closing a group leaves its connections open as long as a model holds the group. So the connections are shut down where they lie,
below gloo: whoever waits in one gets "Connection closed by peer", in every thread, on both ends.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress


def sever(kept: Collection[int] = (), cut: Collection[int] = ()) -> int:
    """Shuts down all TCP connections that are not Python's own (W&B, Prometheus) nor have a port of `kept` (the store's) at an end; of the
    latter those from our ports `cut` all the same. Returns how many they were. From any thread.

        >>> sever(kept=[store.port])
        6
    """
    count = 0
    for connection, ours, theirs in _connections():
        if ours in cut or not {ours, theirs} & set(kept):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def own_ports() -> set[int]:
    """Of the connections that `sever` may shut down: at our end."""
    return {ours for _, ours, _ in _connections()}


def _connections() -> Iterator[tuple[socket.socket, int, int]]:
    """TCP connections that are not Python's own, with the ports at our end and at theirs. What is yielded is closed after its turn, which
    the connection does not feel."""
    pythons = {s.fileno() for s in gc.get_objects() if issubclass(type(s), socket.socket)}
    for number in _sockets() - pythons:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            ends = connection.getsockname()[1], connection.getpeername()[1]  # OSError: it listens
            yield connection, *ends


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found
