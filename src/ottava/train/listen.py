"""Ports that a run opens: on the loopback unless it is told that its ranks are on several machines.

torch's store listens on every interface by itself, and gloo on that of the machine's name. What ranks tell each other there is neither
signed nor encrypted, so nobody else should reach it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ottava.notices import warn_once

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where gloo and NCCL are told which interface to use; what a user has set stays."""


def serve_store(
    host: str = LOOPBACK, port: int = 0, timeout: timedelta | None = None, local: bool = True
) -> dist.TCPStore:
    """A store that is served by this process, on the address of `host` alone. port 0: any free one.

    local: whether all who look for it are on this machine; otherwise a name that means the loopback here means all interfaces.

        >>> serve_store().port
        35011
    """
    listener = _listener(host, port, local)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    number = listener.getsockname()[1]
    descriptor = listener.detach()
    return dist.TCPStore(host, number, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, **options)


def _listener(host: str, port: int, local: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    alone = ipaddress.ip_address(address[0]).is_loopback
    if alone and not local:  # Debian's /etc/hosts has 127.0.1.1 for a machine's own name
        return _on_all_interfaces(f"{host} is {address[0]} on this machine", port)
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # A name that leads here by a detour (a service, a NAT) is no address that can be listened on.
        return _on_all_interfaces(f"{host} is {address[0]}, no address of this machine", port)


def _on_all_interfaces(reason: str, port: int) -> socket.socket:
    warn_once(f"ottava: {reason}: the store where ranks meet listens on all interfaces.")
    return socket.create_server(("", port))


def stay_on_this_machine() -> None:
    """For ranks that all run on one machine: gloo and NCCL meet on the loopback. Before the process group is made."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        for variable in INTERFACES:
            os.environ.setdefault(variable, loopback)
