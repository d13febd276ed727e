"""Runs a script as `python SCRIPT` would, after `transformer_engine` was replaced by Ottava."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from ottava.compat.cuda import answer_for_cpu, set_capability
from ottava.compat.environment import tell_of_variables
from ottava.compat.process_groups import make_groups_of_gloo
from ottava.compat.seeds import follow_seeds
from ottava.compat.stand_in import install

USAGE = """usage: python -m ottava.compat SCRIPT [ARGS...]
       python -m ottava.compat -m MODULE [ARGS...]
       python -m ottava.compat --capability MAJOR.MINOR SCRIPT [ARGS...]
"""
HELP = f"""{USAGE}
Runs a program that was written for transformer_engine with Ottava in its place:
transformer_engine, transformer_engine.pytorch, transformer_engine.common.recipe
and their submodules are Ottava's. Arguments, exit code and traceback are the
program's own. On several ranks: torchrun --nproc-per-node 8 -m ottava.compat SCRIPT.

--capability: without a GPU, what torch.cuda.get_device_capability() answers, for
programs that ask for a GPU of at least 9.0 or 10.0 (0.0 unless it is given).
"""
WRONG_USAGE = 2


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    if arguments[:1] == ["--capability"]:
        given = re.fullmatch(r"(\d+)\.(\d+)", "".join(arguments[1:2]))
        if given is None:
            return _refuse("--capability needs a number such as 9.0")
        set_capability(int(given[1]), int(given[2]))
        arguments = arguments[2:]
    if not arguments:
        return _refuse("a script is missing")
    first, rest = arguments[0], arguments[1:]
    if first in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if first == "-m":
        return run_module(rest[0], rest[1:]) if rest else _refuse("-m needs the name of a module")
    if first == "--":
        return main(["./" + rest[0] if rest[0].startswith("-") else rest[0], *rest[1:]]) if rest else main([])
    if first.startswith("-"):
        return _refuse(f"unknown option {first!r}; options of the script come after it")
    return run_script(first, rest)


def _refuse(why: str) -> int:
    print(f"{USAGE}python -m ottava.compat: {why}", file=sys.stderr)
    return WRONG_USAGE


def run_script(path: str, arguments: list[str]) -> int:
    """Runs the file (or the folder or zip archive with a __main__.py) at `path` as `__main__`."""
    try:
        if os.path.isfile(path):
            open(path, "rb").close()
        else:
            os.listdir(path)
    except OSError as error:
        return _refuse(f"cannot open {path!r}: {error.strerror}")
    sys.argv[:] = [path, *arguments]
    _prepare()
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        return _guarded(lambda: runpy.run_path(path, run_name="__main__"))
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # `python -m` put the current folder there
    return _guarded(lambda: _execute(os.path.abspath(path)))


def run_module(name: str, arguments: list[str]) -> int:
    """Runs the module `name` as `__main__`, as `python -m` does."""
    _prepare()
    sys.argv[:] = ["-m", *arguments]
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of its parent
        found = None
    if found is None:
        return _refuse(f"no module named {name!r}")
    return _guarded(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _prepare() -> None:
    """Everything that the program will find changed."""
    install()
    answer_for_cpu()
    make_groups_of_gloo()
    follow_seeds()
    tell_of_variables()


def _execute(path: str) -> None:
    # Not runpy.run_path: it would write its path over argv[0] and take `__main__` away at the end, which pickling needs.
    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)


def _guarded(run: Callable[[], object]) -> int:
    """Runs; an uncaught exception is shown as python shows it, without the frames of this file. Exits and interrupts pass."""
    try:
        run()
    except Exception as error:
        trace = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen "):
            break
        trace = trace.tb_next
    return trace
