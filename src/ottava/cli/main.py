"""`ottava ...`, also as `python -m ottava ...`. Exit codes: 0 done, 2 wrong usage."""

from __future__ import annotations

import argparse
import importlib
import sys

from ottava import __version__
from ottava.bench import BENCHMARKS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ottava", description="FP8 transformer training for PyTorch, in plain Python."
    )
    parser.add_argument("--version", action="version", version=f"ottava {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure something; outputs are checked first")
    names = bench.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, about in BENCHMARKS.items():
        module = importlib.import_module(f"ottava.bench.{name}")
        sub = names.add_parser(name, help=about, description=f"{about}.")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
