"""`Lasting`: what a rank keeps over restarts in place."""

from __future__ import annotations

from contextlib import ExitStack

from ottava.train.config import Config
from ottava.train.copies import Copies
from ottava.train.data import Data
from ottava.train.lock import RunLock
from ottava.train.recorder import Report
from ottava.train.signals import RankSignals
from ottava.train.tokenize import Tokenizer
from ottava.train.watchdog import Watchdog


class Lasting:
    """What a rank keeps when others die, and it meets those that are left: everything that no other rank has a part in."""

    def __init__(
        self,
        config: Config,
        resources: ExitStack,
        stop: RankSignals | None = None,
        watchdog: Watchdog | None = None,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        self.lock = RunLock(config.run_folder)
        resources.callback(self.lock.release)
        self.stop = stop or resources.enter_context(RankSignals())
        self.watchdog = watchdog or resources.enter_context(Watchdog(config, *ranks))
        self.data: tuple[Data, Data | None] | None = None
        self.tokenizer: Tokenizer | None = None
        self.copies = Copies(config.health.copies)
        self.report: Report | None = None
