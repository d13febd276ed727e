"""`ottava checkpoint ls|verify PATH`. Exit code 4: something is there and cannot be used, or nothing is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, about in (
        ("ls", "list the checkpoints of a run, or the tensors of one checkpoint"),
        ("verify", "read every file and compare it with its checksum"),
    ):
        sub = actions.add_parser(name, help=about, description=f"{about}.")
        sub.add_argument("path", help="a run, its checkpoints, or one checkpoint (step-00000100)")
        sub.set_defaults(run=_look)


def _look(options: argparse.Namespace) -> int:
    from ottava.checkpoint import ls, verify

    path = Path(options.path)
    if (path / "checkpoints").is_dir():  # a run
        path = path / "checkpoints"
    if not path.is_dir():
        print(f"ottava checkpoint: there is no folder {path}.", file=sys.stderr)
        return 2
    rows = []
    for row in (ls if options.action == "ls" else verify)(path):
        print(row, flush=True)
        rows.append(row)
    if not rows:
        print(f"ottava checkpoint: there is no checkpoint in {path}.", file=sys.stderr)
    return 0 if rows and all(row.good for row in rows) else 4
