"""`RankLog`: what a rank has to say, in the run's folder: RUN/logs/rank-N.log, whoever has started it and on whatever machine.

    --- start {"rank": 3, "size": 8, "host": "node-1", "pid": 4711, "time": 1763260000.1, "restart": 0, "launcher": "..."}
    2026-11-16 03:30:00 WARNING ottava: ...                       what is logged in this rank
    --- error 1763260060.2                                        and then the traceback
    --- end

A run that is started again adds a section. A crash in C leaves its stacks there too (faulthandler). `ottava logs RUN` reads it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ottava.untrusted.files import open_to_append

FOLDER = "logs"
START, ERROR, END = "--- start ", "--- error ", "--- end"

_current: RankLog | None = None


def begin() -> None:
    """The run is this rank's: its section begins now, in the log that is open."""
    if _current is not None:
        _current.begin()


class RankLog(logging.Handler):
    """A `with` block around a rank. Nothing is written before `begin`, or an error: a start that is refused (a run that is taken, a wrong
    configuration) is told on the console and leaves the run as it is.

        >>> with RankLog(Path("runs/debug"), place):
        ...     train(config, world)
    """

    def __init__(self, run: Path, place: Any, variables: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self.path = run / FOLDER / f"rank-{place.rank}.log"
        self._place, self._variables = place, variables
        self._file: TextIO | None = None
        self._catches_crashes = False
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def begin(self) -> None:
        """Opens the file and writes the first line of a section. A disk that is full is no reason to stop."""
        with suppress(OSError):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_to_append(self.path, errors="backslashreplace")
                if not faulthandler.is_enabled():
                    faulthandler.enable(self._file)
                    self._catches_crashes = True
            self._write(START + json.dumps(self._who()))

    def _who(self) -> dict[str, Any]:
        place = self._place
        # torchrun keeps what a process prints beside this file, by its number on the machine: which rank that was is known here alone.
        beside = self._variables.get("TORCHELASTIC_ERROR_FILE")
        return {
            "rank": place.rank,
            "size": place.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "restart": int(self._variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "launcher": None if beside is None else str(Path(beside).parent),
        }

    def emit(self, record: logging.LogRecord) -> None:
        """A line; and what Python would have done with it if nobody had listened."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                self._write(self.format(record))
        if not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def _write(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._file.flush()

    def __enter__(self) -> RankLog:
        global _current
        _current = self
        logging.getLogger("ottava").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        global _current
        _current = None
        logging.getLogger("ottava").removeHandler(self)
        if error is not None and self._file is None and not isinstance(error, ValueError):
            self.begin()
        if self._file is None:
            return
        with suppress(OSError):
            if error is not None:
                self._write(f"{ERROR}{time.time()}\n{''.join(traceback.format_exception(error)).rstrip()}")
            self._write(END)
        if self._catches_crashes:
            faulthandler.disable()  # its file goes
        with suppress(
            OSError
        ):  # what could not be written is tried once more: a disk that is full or read-only does not end the run
            self._file.close()
