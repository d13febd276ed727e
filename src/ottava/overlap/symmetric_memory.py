"""`SymmetricMemory`: messages between GPUs of one machine, by their copy engines. No kernel of ours or of NCCL takes part in a product's
multiprocessors, but for one warp that waits for a signal.

[Note: mailboxes] Every rank has one buffer that all ranks can write, allocated once (and again, on all ranks together, when a longer
message comes). It is two halves of one mailbox a sender. Exchanges take the halves in turn:

    sender      waits for "free" of the half's last exchange, copies into its mailbox at the receiver, signals "filled"
    receiver    waits for "filled", copies out of the mailbox, signals "free" after the last message of the exchange

Two streams do this, one for what is sent and one for what is received; events order them with the stream that multiplies. What is
received is queued behind what is sent of the same hop, on all ranks: so there is an order in which everything can run, even if all
streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), where nothing would overlap.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ottava import torch_private
from ottava.notices import warn_once_on_rank0
from ottava.overlap import connections
from ottava.overlap.point_to_point import backend_of
from ottava.overlap.transport import Exchange, Hop, Transport

ALIGNMENT = 256  # bytes between messages in a mailbox
HOPS = 14  # signals of "filled" in a half: a hop more than these takes one that an earlier hop has left
HALVES = 2
FREE = HALVES * HOPS
MOST = 72  # ranks of a group: torch has 32 channels for as many, all of an NVLink domain, and FREE + HALVES are used
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SMALLEST = 1 << 20  # bytes of a mailbox


def missing_because(group: Any, device: torch.device) -> str | None:
    """Why a group has no symmetric memory; None if it has. All ranks call it together, and get the same answer."""
    if device.type != "cuda":
        return f"tensors lie on {device.type}, and it is CUDA's"
    if not torch_private.has_symmetric_memory():
        return f"torch {torch.__version__} has none"
    places = _places(group, device)
    why = misplaced_because(places)
    if why is not None:
        return why
    gpus = [place.gpu for place in places]
    reach = torch.tensor([_reaches_all(device, gpus)], dtype=torch.int32, device=_where(group, device))
    dist.all_reduce(reach, op=dist.ReduceOp.MIN, group=group)
    return None if int(reach) else "not all of its GPUs can read one another's memory (no NVLink, no peer access)"


class Place(NamedTuple):
    """Where a rank is, as numbers that are equal where the places are the same; and whether it may share its GPU."""

    machine: int
    gpu: int
    may_share: int


def misplaced_because(places: Sequence[Place]) -> str | None:
    """Why ranks in these places have no symmetric memory; None: nothing speaks against it."""
    if len(places) > MOST:
        return f"the group has {len(places)} ranks, and its signals are enough for {MOST}"
    machines = {place.machine for place in places}
    if len(machines) > 1:
        return f"the group's ranks are on {len(machines)} machines"
    shared = len({place.gpu for place in places}) < len(places)
    if shared and not all(place.may_share for place in places):
        return f"several ranks share a GPU (torch allows it with {SHARING}=1, in all of them)"
    return None


def _places(group: Any, device: torch.device) -> list[Place]:
    """Of every rank."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    own = torch.tensor(
        [zlib.crc32(_machine().encode()), zlib.crc32(uuid.encode()), int(os.environ.get(SHARING) == "1")],
        dtype=torch.int64,
        device=_where(group, device),
    )
    all_of_them = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, own, group=group)
    return [Place(*place.tolist()) for place in all_of_them]


def _machine() -> str:
    """A name of this machine, or of the container in it. Many machines are called localhost, but none starts at the same time."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.uname().nodename + (boot.read_text() if boot.exists() else "")


def _where(group: Any, device: torch.device) -> torch.device:
    """Where the group can reduce a few numbers: the host, if it has a backend for it."""
    host = torch.device("cpu")
    return host if backend_of(group, host) == "gloo" else device


def _reaches_all(device: torch.device, gpus: list[int]) -> bool:
    """Whether this GPU can read the memory of those that this process can see; it may see its own alone."""
    own = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    for other in range(torch.cuda.device_count()):
        uuid = zlib.crc32(str(torch.cuda.get_device_properties(other).uuid).encode())
        if uuid in gpus and other != own.index and not torch.cuda.can_device_access_peer(own, other):
            return False
    return True


class Workspace(NamedTuple):
    """The buffers of all ranks as this one sees them, and its signals."""

    buffers: list[Tensor]
    """uint8 [HALVES * size * mailbox], one a rank."""
    signals: Any
    """put_signal(rank, channel, timeout_ms) and wait_signal(rank, channel, timeout_ms), on the current stream."""
    mailbox: int
    """Bytes of one sender's half."""
    owned: Any = None
    """What keeps this rank's buffer."""


class SymmetricMemory(Transport):
    """Copies into the mailboxes of other GPUs."""

    name = "symmetric memory, by copy engines"

    def __init__(self, group: Any, device: torch.device) -> None:
        self.of_group(group)
        self.device = device
        self.timeout_ms = int(1e3 * torch_private.group_timeout_s(group, device))
        self.lanes = Lanes(device)
        if os.environ.get(connections.VARIABLE) == "1":
            warn_once_on_rank0(
                f"ottava: overlap: {connections.VARIABLE}=1 puts all streams in one queue of the GPU, so that products wait for "
                "messages. TransformerEngine's userbuffers want it; here, leave it unset (or 8 and more)."
            )
        self._start()

    def _start(self) -> None:
        self.serial = 0
        self.workspace: Workspace | None = None
        self.broken: str | None = None
        """Why nothing can be exchanged any more."""
        self.unread: set[tuple[int, int]] = set()
        """(half, target) whose last exchange has not been answered with "free"."""

    def exchange(self, name: str, hops: Sequence[Hop]) -> Exchange:
        """See `Transport`."""
        if self.broken is not None:
            raise RuntimeError(f"{self.name}: {self.broken}: other ranks still wait for them. Start all ranks anew.")
        longest = max(_lengths(hops, "source").values(), default=0)
        if self.workspace is None or longest > self.workspace.mailbox:
            self._grow(longest)
        assert self.workspace is not None
        self.serial += 1
        return _MailExchange(self, self.workspace, self.serial % HALVES, name, hops)

    def _grow(self, longest: int) -> None:
        """A workspace for messages of `longest` bytes, on all ranks together; nothing may be on its way in the old one."""
        mailbox = max(SMALLEST, 1 << (longest - 1).bit_length())
        if self.workspace is not None:
            self.settle()
        self._start()
        self.workspace = self.allocate(mailbox)

    def settle(self) -> None:
        """Returns when all ranks have done what they have queued."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def allocate(self, mailbox: int) -> Workspace:
        """Buffers of all ranks; a collective."""
        count = HALVES * self.size * mailbox
        owned, handle = torch_private.symmetric_memory(count, self.device, self.group)
        buffers = [handle.get_buffer(rank, (count,), torch.uint8) for rank in range(self.size)]
        return Workspace(buffers, handle, mailbox, owned)


class Lanes:
    """The stream that sends and the one that receives, and events between them and the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.sending, self.receiving = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Any:
        """An event of all that the current stream has been given."""
        event = torch.cuda.Event()
        event.record()
        return event

    def follow(self, event: Any) -> None:
        """What the current stream is given from here on comes after `event`."""
        torch.cuda.current_stream().wait_event(event)

    @contextlib.contextmanager
    def lane(self, which: str, after: Any) -> Iterator[None]:
        """In here the current stream is "sending" or "receiving", which goes on after `after`."""
        stream = self.sending if which == "sending" else self.receiving
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield


class _MailExchange(Exchange):
    """[Note: mailboxes]."""

    def __init__(
        self, transport: SymmetricMemory, workspace: Workspace, half: int, name: str, hops: Sequence[Hop]
    ) -> None:
        super().__init__(name, hops)
        self.alive: list[Tensor] = []
        """What is being copied away; empty when it has been waited for."""
        self.transport, self.workspace, self.half, self.lanes = transport, workspace, half, transport.lanes
        self.opened = self.lanes.mark()  # `into` may be memory that the current stream still reads
        self.outgoing, self.incoming = _offsets(hops, "target"), _offsets(hops, "source")
        self.first = {hop.target: i for i, hop in reversed(list(enumerate(hops)))}
        self.last = {hop.source: i for i, hop in enumerate(hops)}
        self.arrived: dict[int, Any] = {}
        self.sent: Any = None
        self.unsent = set(range(len(hops)))

    def _mailbox(self, receiver: int, sender: int, start: int, count: int) -> Tensor:
        base = (self.half * self.transport.size + sender) * self.workspace.mailbox + start
        return self.workspace.buffers[receiver][base : base + count]

    def _send(self, hop: int, tensors: list[Tensor]) -> None:
        own, (target, source, into) = self.transport.rank, self.hops[hop]
        signals, timeout = self.workspace.signals, self.transport.timeout_ms
        channel, free = self.half * HOPS + hop % HOPS, FREE + self.half
        with self.lanes.lane("sending", self.lanes.mark()):
            if self.first[target] == hop and (self.half, target) in self.transport.unread:
                signals.wait_signal(target, free, timeout)
            start = self.outgoing[hop]
            for tensor in tensors:
                raw = tensor.view(-1).view(torch.uint8)
                self._mailbox(target, own, start, raw.numel()).copy_(raw)
                start += _aligned(raw.numel())
            signals.put_signal(target, channel, timeout)
            self.transport.unread.add((self.half, target))
            self.sent = self.lanes.mark()
        self.unsent.discard(hop)
        self.alive += tensors
        with self.lanes.lane("receiving", self.opened):
            signals.wait_signal(source, channel, timeout)
            start = self.incoming[hop]
            for tensor in into:
                raw = tensor.view(-1).view(torch.uint8)
                raw.copy_(self._mailbox(own, source, start, raw.numel()))
                start += _aligned(raw.numel())
            if self.last[source] == hop:
                signals.put_signal(source, free, timeout)
            self.arrived[hop] = self.lanes.mark()

    def _wait(self, hop: int) -> None:
        self.lanes.follow(self.arrived[hop])

    def _finish(self) -> None:
        for event in self.arrived.values():
            self.lanes.follow(event)
        if self.sent is not None:
            self.lanes.follow(self.sent)
        self.alive.clear()

    def _abandon(self, error: BaseException) -> None:
        if self.unsent:
            self.transport.broken = f"{self.name} ended in {type(error).__name__} before all of its messages were sent"
        self._finish()

    def __del__(self) -> None:
        # Never finished, because of an error elsewhere: its memory may be taken by others only behind the copies.
        if self.alive:
            with contextlib.suppress(Exception):
                self._finish()


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _room(hop: Hop) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in hop.into)


def _lengths(hops: Sequence[Hop], by: str) -> dict[int, int]:
    """Bytes of all hops with one target, or one source; as much goes out in a hop as comes in."""
    lengths: dict[int, int] = {}
    for hop in hops:
        peer = getattr(hop, by)
        lengths[peer] = lengths.get(peer, 0) + _room(hop)
    return lengths


def _offsets(hops: Sequence[Hop], by: str) -> list[int]:
    """Where each hop's bytes begin in the mailbox of its target, or of its source."""
    filled: dict[int, int] = {}
    offsets = []
    for hop in hops:
        peer = getattr(hop, by)
        offsets.append(filled.get(peer, 0))
        filled[peer] = offsets[-1] + _room(hop)
    return offsets
