"""`ottava report RUN ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; several are shown side by side")
    parser.add_argument("--output", help="the page (default: report.html in the first run's folder)")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from ottava.train.report import write_report

    try:
        print(write_report(options.runs, options.output or Path(options.runs[0]) / "report.html"))
    except (ValueError, OSError) as error:
        return refuse("ottava report", error)
    return 0
