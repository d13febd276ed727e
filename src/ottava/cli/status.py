"""`ottava status RUN`: how a run is doing. Exit code 2 where there is none."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava status`."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> int:
    from ottava.doctor.run_status import run_status
    from ottava.untrusted.files import shown

    try:
        found = run_status(options.folder)
    except (ValueError, OSError) as error:
        return refuse("ottava status", error)
    print(json.dumps(found.as_json(), indent=1) if options.json else shown(found.as_text()))
    return 0
