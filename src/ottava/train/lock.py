"""`RunLock`: one run, one writer. RUN/lock says which process writes there; a second one is refused and told who it is.

The file is made by a hard link (or, where there are none, by O_EXCL), which is atomic on network file systems too, and its holder
rewrites it every few seconds. A lock is stale when its process is dead, which can be seen on the same machine, or when it was not
rewritten for a while, which is measured with the clock of the process that waits: clocks of machines are never compared.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ottava.notices import warn_once
from ottava.train import exits
from ottava.train.console import tell
from ottava.untrusted.files import open_regular, printable

FILE = "lock"
RENEW_S = 5.0
"""Seconds between two beats of a holder."""
STALE_S = 60.0
"""A lock of another machine that has not changed for this long is nobody's."""
LIVING_BEATS = 3
"""Beats after which a holder on another machine counts as alive, and not as one that a scheduler is about to end."""
_BYTES = 1024
"""Of the file, always: a beat is written over the one before, and never found half written beside half of the other."""


@dataclass(frozen=True)
class Holder:
    """What the file says."""

    host: str
    pid: int
    started: str
    """UTC, ISO 8601. For people."""
    machine: str
    """Of the kernel and its numbering of processes: where it is ours, `pid` can be looked for."""
    born: str
    """When the kernel started the process, by its own clock: another process may have the number later."""
    token: str
    beat: int = 0

    @classmethod
    def myself(cls) -> Holder:
        """This process."""
        now, pid = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
        return cls(platform.node(), pid, now, machine(), born(pid), secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {printable(self.host, 80)}, started {printable(self.started, 40)}"

    def dead(self) -> bool:
        """Whether it is known not to run any more."""
        return self.machine == machine() and self.machine != "" and born(self.pid) != self.born

    def encode(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode().ljust(_BYTES - 1) + b"\n"


class RunLock:
    """The lock of a run's folder, from `take` to `release`.

    >>> lock = RunLock(Path("runs/debug"))
    >>> lock.take()      # ValueError: runs/debug is in use by process 4711 on node-3, started 2026-07-01T12:00:00+00:00
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self._mine: Holder | None = None
        self._over = threading.Event()

    def take(self) -> RunLock:
        """Waits only where it cannot be seen whether the holder lives. What this process holds already it keeps."""
        if self._mine is not None:
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            found = "a link that leads nowhere" if self.folder.is_symlink() else "a file"
            raise ValueError(
                f"train.run is {self.folder}, but there is {found} in its place: choose another folder."
            ) from error
        except OSError as error:
            raise ValueError(
                f"train.run is {self.folder}, which cannot be made ({error.strerror}): choose another folder."
            ) from error
        mine = Holder.myself()
        try:
            while not self._create(mine, self._judge()):
                pass
        except OSError as error:
            raise ValueError(
                f"train.run is {self.folder}, which cannot be written to ({error.strerror}): make room or give leave, or choose another "
                "folder."
            ) from error
        self._mine = mine
        threading.Thread(target=self._renew, name="ottava lock", daemon=True).start()
        return self

    def release(self) -> None:
        """Gives the folder back, if it is still ours."""
        self._over.set()
        mine, self._mine = self._mine, None
        found = read(self.path) if mine is not None else None
        if mine is not None and found is not None and found.token == mine.token:
            with suppress(OSError):
                self.path.unlink()

    def _create(self, mine: Holder, stale: Path | None) -> bool:
        """Whether the file is ours now; False: there is one. stale: what is left of another's, which takes no more space on a full disk."""
        draft = stale or self.path.with_name(f".{FILE}-{mine.token}")
        if stale is None:
            _write_new(draft, mine.encode())
        else:
            _write_over(draft, mine.encode())
        try:
            os.link(draft, self.path)
            return True
        except FileExistsError:
            return False
        except OSError:  # no hard links here
            try:
                _write_new(self.path, mine.encode())
                return True
            except FileExistsError:
                return False
        finally:
            draft.unlink()

    def _judge(self) -> Path | None:
        """Returns when there is no lock, or none any more: with what is left of a stale one. ValueError with its holder otherwise."""
        holder, beats, since = read(self.path), 0, time.monotonic()
        before, told = holder, False
        while holder is not None or os.path.lexists(self.path):
            if holder is not None and holder.machine == machine() != "":
                if not holder.dead():
                    raise self._refusal(holder)
                return self._remove(holder)
            if holder != before:
                before, beats, since = holder, beats + 1, time.monotonic()
            if holder is not None and beats >= LIVING_BEATS:
                raise self._refusal(holder)
            if holder is None and not _is_plain(self.path):
                raise ValueError(f"{self.path} is no lock that a run has made: look at what it is, and remove it.")
            if time.monotonic() - since > STALE_S:
                return self._remove(holder)
            if not told:
                told = True
                what = f"in use by {holder}" if holder is not None else f"locked, and {self.path} cannot be understood"
                tell(
                    f"ottava train: {self.folder} is {what}. Waiting for {STALE_S:.0f} s: a lock that is not renewed is taken over."
                )
            time.sleep(min(RENEW_S, STALE_S) / 5)
            holder = read(self.path)
        return None

    def _refusal(self, holder: Holder) -> ValueError:
        return ValueError(
            f"{self.folder} is in use by {holder}: end that one first, or choose another train.run. "
            f"(If it is certain that it does not run any more: remove {self.path}.)"
        )

    def _remove(self, stale: Holder | None) -> Path | None:
        """Where the stale lock is now. Of several who find it stale one moves it away; what that one finds in its hands must be what was
        judged."""
        aside = self.path.with_name(f".{FILE}-stale-{secrets.token_hex(4)}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return None
        found = read(aside)
        if found is not None and (stale is None or found.token != stale.token):
            with suppress(OSError):
                os.link(aside, self.path)  # another was quicker, and this is its new one
            aside.unlink()
            return None
        tell(
            f"ottava train: took over {self.folder} from {stale or 'an unreadable lock'}, which does not run any more."
        )
        return aside

    def _renew(self) -> None:
        """Until the lock is given back, whatever is raised: one that is not renewed is taken over, and nobody here would notice."""
        while True:
            try:
                mine = None if self._over.wait(RENEW_S) else self._mine
                if mine is None:
                    return
                self._beat(mine)
            except FileNotFoundError:
                self._put_back()
            except Exception as error:
                warn_once(f"{self.path} cannot be renewed: {error}.")

    def _put_back(self) -> None:
        """Somebody has removed the file of a run that goes on. If another process is quicker, the next beat finds its file."""
        mine = self._mine
        if mine is None:
            return
        warn_once(f"{self.path} was removed, but process {mine.pid} writes there: it is made again.")
        try:
            self._create(mine, None)
        except OSError as error:
            warn_once(f"{self.path} cannot be renewed: {error}.")

    def _beat(self, mine: Holder) -> None:
        """Opened and closed each time: that is when network file systems show it to others."""
        with self.path.open("r+b", buffering=0) as file:
            found = decode(file.read(_BYTES))
            if found is not None and found.token != mine.token and self._mine is not None:
                tell(f"ottava train: {self.folder} was taken over by {found}: this process stood still for too long.")
                os._exit(exits.FAILED)  # two writers would destroy the run
            self._mine = mine = replace(mine, beat=mine.beat + 1)
            file.seek(0)
            file.write(mine.encode())
            os.fsync(file.fileno())


def read(path: Path) -> Holder | None:
    """What a lock file says; None: there is none, or nothing that can be understood."""
    try:
        with open_regular(path) as file:  # a pipe would wait for a writer
            return decode(file.read(_BYTES + 1))
    except (OSError, ValueError):
        return None


def decode(content: bytes) -> Holder | None:
    """The content of a lock file."""
    try:
        found = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    return found if all(type(getattr(found, key)) is type(value) for key, value in _EXAMPLE.items()) else None


def in_use(folder: Path) -> Holder | None:
    """Who writes in a run's folder now, as far as can be seen at once."""
    holder = read(folder / FILE)
    return None if holder is None or holder.dead() else holder


def machine() -> str:
    """Names the kernel and the namespace in which process numbers mean something; empty where neither is known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def born(pid: int) -> str:
    """When a process was started, in ticks since the kernel was; empty: there is none, or only what is left of a dead one."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in ("Z", "X") else words[19]


def _is_plain(path: Path) -> bool:
    """Whether it is a file, or gone by now: neither a link, a folder nor a pipe."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _write_over(path: Path, content: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(content)
        file.truncate()
        os.fsync(file.fileno())


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        try:
            file.write(content)
            os.fsync(file.fileno())
        except OSError:  # a full disk: half a lock would be waited for
            path.unlink()
            raise


_EXAMPLE = asdict(Holder("", 0, "", "", "", ""))
