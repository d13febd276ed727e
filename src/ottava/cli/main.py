"""`ottava ...`, also as `python -m ottava ...`. Exit codes: 0 done, 2 wrong usage; `ottava train` has more (docs/training.md)."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
from typing import NoReturn

from ottava import __version__
from ottava.bench import BENCHMARKS
from ottava.checkpoint.stop import SIGNALS
from ottava.cli.streams import complete, give_up, refuse, settle
from ottava.notices import did_you_mean

COMMANDS = {
    "train": "train a language model; `ottava train --help` explains every option",
    "plan": "what fits on how many GPUs, how fast, and the configuration of the best",
    "doctor": "are these machines sound? on one machine, or under a launcher on all ranks",
    "launch": "start a run on this machine, over ssh, or on Slurm, Ray or Kubernetes",
    "chaos": "run a job under faults, and see what it survives",
    "status": "how a run is doing: steps, speed, time left, last checkpoint, errors",
    "logs": "logs of a run's ranks, the first error first",
    "explain": "the story of a run's bad steps: which tensor, which rank, what was done",
    "data": "make token files from text",
    "report": "one HTML page about one run or several",
    "checkpoint": "look at checkpoints",
}
"""Each is a module of this package. Only the one that is named is imported."""


class Parser(argparse.ArgumentParser):
    """Names the choice that may have been meant, of this parser and of all below it."""

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        choices = [word.strip("'") for word in wrong[2].split(", ")] if wrong else []
        meant = did_you_mean(wrong[1], choices) if wrong else ""
        super().error(f"{message}.{meant}" if meant else message)


def _parser(words: list[str]) -> Parser:
    parser = Parser(prog="ottava", description="FP8 transformer training for PyTorch, in plain Python.")
    parser.add_argument("--version", action="version", version=f"ottava {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=f"{about}.")
        if name != "train" and name in words[:1]:
            importlib.import_module(f"ottava.cli.{name}").add_arguments(sub)
    bench = commands.add_parser("bench", help="measure something; outputs are checked first")
    if "bench" in words[:1]:
        _add_benchmarks(bench, words[1:2])
    return parser


def _add_benchmarks(bench: argparse.ArgumentParser, named: list[str]) -> None:
    """Only the one that is named is imported: `bench step` needs the packages of the trainer, `bench layer` torch alone."""
    names = bench.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, about in BENCHMARKS.items():
        sub = names.add_parser(name, help=about, description=f"{about}.")
        if name not in named:
            continue
        try:
            module = importlib.import_module(f"ottava.bench.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("ottava"):
                raise
            print(f"ottava bench {name} needs more packages: pip install 'ottava[train]' ({error}).", file=sys.stderr)
            raise SystemExit(2) from error
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    complete()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["train"]:  # its options come from the configuration's classes, not from argparse
        try:
            from ottava.cli.train import run

            return run(words[1:])  # whose ranks have told, by their exit code, what became of them
        except BrokenPipeError:  # of --help or --dry-run; training goes on without a console
            return give_up()
        except KeyboardInterrupt:  # before there is a run that could save
            return 128 + signal.SIGINT
        finally:
            if arguments is None:  # the process ends now, with this exit code, which one more Ctrl-C must not change
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            settle()
    try:
        try:
            return _command(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return give_up()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # of a console that takes nothing, or of a file that the command cannot write
        give_up()
        return refuse("ottava", error)


def _command(words: list[str]) -> int:
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(parser, words, unknown)
    return options.run(options)


def _refuse(parser: argparse.ArgumentParser, words: list[str], unknown: list[str]) -> NoReturn:
    """Ends with exit code 2, the usage of the command that was named, and the option that may have been meant."""
    for word in words:
        commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = next((action.choices[word] for action in commands if word in action.choices), parser)
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    meant = did_you_mean(unknown[0].split("=")[0], known).replace("'", "")
    parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")


if __name__ == "__main__":
    sys.exit(main())
