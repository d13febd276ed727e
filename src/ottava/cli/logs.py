"""`ottava logs RUN [--rank N]`: the first error of any rank, and the end of every rank's log. Exit code 2 where there are none."""

from __future__ import annotations

import argparse
from pathlib import Path

from ottava.bench.options import count
from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava logs`."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--rank", type=int, help="only of this rank")
    parser.add_argument("--lines", type=count, default=40, help="lines of each file (default 40)")
    parser.set_defaults(run=_logs)


def _logs(options: argparse.Namespace) -> int:
    from ottava.doctor.run_logs import as_text
    from ottava.untrusted.files import shown

    try:
        print(shown(as_text(options.folder, options.rank, options.lines)))
    except (ValueError, OSError) as error:
        return refuse("ottava logs", error)
    return 0
