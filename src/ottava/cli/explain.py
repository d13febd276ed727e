"""`ottava explain RUN`: the story of a run's bad steps, in words."""

from __future__ import annotations

import argparse
from pathlib import Path

from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava explain`."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, help="this step alone")
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    from ottava.train.explain import explain
    from ottava.untrusted.files import shown

    try:
        print(shown(explain(options.folder, options.step)))
    except (ValueError, OSError) as error:
        return refuse("ottava explain", error)
    return 0
