"""`Nursery`: ranks that are there at once. A process that has imported everything waits, and forks one whenever a rank is wanted.

Importing torch takes seconds, and a fork milliseconds: after a death the new rank meets the others before they have noticed. The
nursery is forked itself, from a launcher that has neither threads nor a GPU yet, and never gets any: so what it forks is sound. A
rank becomes the child of the launcher (which is the subreaper of its descendants), not of the nursery: the launcher sees how it
ends, and a nursery that dies takes nobody with it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ottava.checkpoint.stop import SIGNALS
from ottava.train.console import tell
from ottava.train.signals import held_back

PR_SET_CHILD_SUBREAPER = 36
ANSWER_S = 10.0
"""What a nursery that has imported everything may take to answer: a fork takes milliseconds, also where many wait for the cores."""
END_S = 5.0
"""What the system gets to end one that was killed."""
Work = Callable[..., None]


class Child:
    """A process that was forked: the few methods of `multiprocessing.Process` that a launcher needs."""

    def __init__(self, pid: int, name: str) -> None:
        self.pid, self.name = pid, name
        self.sentinel = os.pidfd_open(pid)
        """Readable when the process has ended."""
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs; -n: it was ended by signal n."""
        if self._code is None:
            try:
                found = os.waitid(os.P_PIDFD, self.sentinel, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # somebody else has asked
                found, self._code = None, 1
            if found is not None:
                self._code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self._code

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exitcode is None

    def kill(self) -> None:
        """By its handle: its number may be another's by now."""
        if self.is_alive():
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)


class Nursery:
    """Made first of all in a launcher. modules: what is imported once for all ranks. start_s: seconds that this may take; None: any number.

    >>> nursery = Nursery("ottava.train.loop")
    >>> child = nursery.fork("rank 3", run, config, 3)
    >>> wait([child.sentinel])
    """

    def __init__(self, *modules: str, start_s: float | None = None) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._modules, self._start_s = modules, start_s
        self._line: socket.socket | None = None
        self._open()

    def fork(self, name: str, work: Work, *arguments: Any) -> Child:
        """A new process that calls work(*arguments) and ends. Both must be picklable. name: as `ps` and `top` show it."""
        request = pickle.dumps((name, work, arguments))
        for _ in range(2):
            try:
                assert self._line is not None
                _send(self._line, request)
                answer = self._answer(self._line)
                self._line.settimeout(ANSWER_S)  # from now on
                return Child(struct.unpack("!q", answer)[0], name)
            except OSError:  # the nursery was killed, or stands still: another one, which may take a moment
                self._open()
        raise RuntimeError("No process can be started: the nursery dies, or stands still, as soon as it is there.")

    def _answer(self, line: socket.socket) -> bytes:
        """The number of a process. One that is not told in time does not begin: [Note: a word before it begins]."""
        try:
            return _receive(line)
        except TimeoutError:
            tell(f"ottava train: the process that starts ranks has not answered for {line.gettimeout():.0f} s: killed.")
            handle = os.pidfd_open(self._pid)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            wait([handle], timeout=END_S)
            os.close(handle)
            return _receive(line)  # its last word, if it was only slow

    def _open(self) -> None:
        """Signals are blocked in it for good: those to a process group are not meant for it; ranks let them through."""
        if self._line is not None:
            self._line.close()
        self._line, theirs = socket.socketpair()
        self._line.settimeout(self._start_s)
        with held_back():
            self._pid = os.fork()
            if self._pid == 0:
                self._line.close()
                _alone(partial(_serve, theirs, self._modules))
        theirs.close()


def _serve(line: socket.socket, modules: tuple[str, ...]) -> None:
    """The nursery's process: until the launcher is gone.

    [Note: a word before it begins] A process that was forked waits until its number was sent to the launcher. If the nursery ends before
    that, it ends too: otherwise the launcher, which would start another, had two on one seat.
    """
    call_process("nursery")
    for handled in SIGNALS:
        if signal.getsignal(handled) != signal.SIG_IGN:
            signal.signal(handled, signal.SIG_DFL)
    for module in modules:
        __import__(module)
    while True:
        try:
            request = _receive(line)
        except OSError:
            return
        name, work, arguments = pickle.loads(request)  # from the launcher, which has forked us
        (told, telling), (begin, beginning) = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()  # its parent ends: it becomes the launcher's
            if pid == 0:
                for number in (line.detach(), told, telling, beginning):
                    os.close(number)
                call_process(name)
                if not os.read(begin, 1):
                    os._exit(1)
                os.close(begin)
                _alone(partial(work, *arguments))
            os.write(telling, struct.pack("!q", pid))
            os._exit(0)
        os.waitpid(between, 0)  # first: until then it is not the launcher's
        _send(line, os.read(told, 8))
        os.write(beginning, b".")
        for number in (told, telling, begin, beginning):
            os.close(number)


def call_process(name: str) -> None:
    """Names this process for `ps`, `top` and people, in the 15 letters that Linux keeps."""
    full = f"ottava {name}"
    with suppress(OSError):
        Path("/proc/self/comm").write_text(full if len(full) <= 15 else name)


def _alone(work: Callable[[], None]) -> None:
    """`work`, and then the process is over: nothing of the one that was forked may run on."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _send(line: socket.socket, content: bytes) -> None:
    line.sendall(struct.pack("!q", len(content)) + content)


def _receive(line: socket.socket) -> bytes:
    """OSError if the other side is gone."""
    count = struct.unpack("!q", _exactly(line, 8))[0]
    return _exactly(line, count)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = line.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise OSError("the other side is gone")
        parts += part
    return parts
