"""Names and interfaces: do hosts resolve, and are the interfaces that NCCL and gloo are told to use there and up."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Any

from ottava.doctor.finding import Check, Facts, Finding, listed

CHOSEN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_ETHTOOL, _GET_SETTINGS = 0x8946, 0x1  # SIOCETHTOOL, ETHTOOL_GSET


def measure(options: Any) -> Facts:
    """Of this machine."""
    names = {"own name": socket.gethostname(), "MASTER_ADDR": os.environ.get("MASTER_ADDR")}
    resolved = {what: _resolve(name) for what, name in names.items() if name}
    return {
        "resolved": {f"{what} {names[what]}": address for what, address in resolved.items()},
        "interfaces": {name: {"address": _address(name), "up": _is_up(name)} for _, name in socket.if_nameindex()},
        "chosen": {name: os.environ[name] for name in CHOSEN if os.environ.get(name)},
        "host": socket.gethostname(),
    }


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return None


def _address(interface: str) -> str | None:
    """Its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(host: str) -> Facts | None:
    """{"name", "address", "rate"} of the interface that packets to `host` leave by; rate in bytes a second, None where it has none.

    >>> interface_towards("node-0")
    {'name': 'eth0', 'address': '10.0.0.7', 'rate': 12500000000.0}
    """
    address = _resolve(host)
    if address is None or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:  # nothing is sent
        try:
            asked.connect((address, 9))
        except OSError:
            return None
        own = asked.getsockname()[0]
    name = next((name for _, name in socket.if_nameindex() if _address(name) == own), None)
    return None if name is None else {"name": name, "address": own, "rate": _rate(name)}


def _rate(interface: str) -> float | None:
    """What its driver says it carries, in bytes a second. Asked of the driver: /sys may belong to another network namespace."""
    command = array.array("B", struct.pack("I40x", _GET_SETTINGS))
    request = struct.pack("16sP", interface.encode()[:15], command.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            fcntl.ioctl(asked.fileno(), _ETHTOOL, request)
        except OSError:
            return None
    low, high = struct.unpack_from("H", command, 12)[0], struct.unpack_from("H", command, 28)[0]
    megabits = high << 16 | low
    return None if megabits in (0, 0xFFFF, 0xFFFFFFFF) else megabits / 8 * 1e6


def _is_up(interface: str) -> bool:
    """As the kernel says; loopback and some virtual ones say "unknown" and work."""
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() != "down"
    except OSError:
        return True


def chosen_interfaces(value: str, known: list[str]) -> list[str]:
    """Which of `known` a value of NCCL_SOCKET_IFNAME means: beginnings of names, "=" for whole names, "^" for all others.

    >>> chosen_interfaces("eth", ["eth0", "lo"]), chosen_interfaces("^lo", ["eth0", "lo"]), chosen_interfaces("=eth", ["eth0"])
    (['eth0'], ['eth0'], [])
    """
    others, exact = value.startswith("^"), "=" in value[:2]
    words = [word for word in value.lstrip("^=").split(",") if word]
    match = [n for n in known if any(n == word if exact else n.startswith(word) for word in words)]
    return [n for n in known if n not in match] if others else match


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """Names that do not resolve, and chosen interfaces that cannot work."""
    found = []
    several = len({f["host"] for f in facts}) > 1
    for rank, (fact, name) in enumerate(zip(facts, names)):
        wrong = [f"{asked} does not resolve" for asked, address in fact["resolved"].items() if address is None]
        for variable, value in fact["chosen"].items():
            wrong += _wrong_choice(variable, value, fact["interfaces"], several)
        found += [Finding("network", "problem", f"{name}: {what}", (rank,)) for what in wrong]
    if not found:
        up = [f"{n} {i['address']}" for n, i in facts[0]["interfaces"].items() if i["up"] and i["address"]]
        found.append(Finding("network", "ok", f"names resolve; {listed(up)}"))
    return found


def _wrong_choice(variable: str, value: str, interfaces: dict[str, Any], several: bool) -> list[str]:
    known = list(interfaces)
    meant = (
        chosen_interfaces(value, known) if variable.startswith("NCCL") else [n for n in known if n in value.split(",")]
    )
    if not meant:
        return [f"{variable}={value} names no interface of this machine, which has {', '.join(known)}"]
    if not any(interfaces[n]["up"] and interfaces[n]["address"] for n in meant):
        return [f"{variable}={value} means {', '.join(meant)}, which is down or has no address"]
    if several and all(n == "lo" for n in meant):
        return [f"{variable}={value} is the loopback interface, and there are several machines"]
    return []


CHECK = Check("network", measure, judge)
