"""From a preset, a TOML file and the command line to a `Config`; and a `Config` as TOML.

Command line over file over preset over defaults. A file's keys are turned into command-line options, so that both are read by the
same parser (tyro, which takes types, choices and help from the dataclasses) and fail with the same messages.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ottava.notices import did_you_mean
from ottava.train.config import Config
from ottava.train.config_checks import MOST
from ottava.train.presets import presets
from ottava.untrusted.files import printable, read_toml

DEFAULT_PRESET = "debug"


@dataclass(frozen=True)
class Command(Config):
    """Trains a language model.

    The first argument may be a TOML file, whose tables are the sections below, or the name of a preset: debug, llama3-1b, llama3-8b,
    llama3-70b or gpt2. Without one it is debug: a small model on text that is already here. A file may begin with preset = "gpt2" to
    change a preset. Options come after it and win.
    """

    dry_run: bool = False
    """Show the configuration, the mesh, the size of the model and what would run, and stop."""

    def __post_init__(self) -> None:
        """Not checked here, where the parser of options would tell of it as its own error, but when it becomes a `Config`."""


def parse(arguments: list[str], prog: str = "ottava train") -> tuple[Config, bool]:
    """([CONFIG.toml or a preset's name] [--section.key VALUE ...] [--dry-run]) -> (configuration, whether it is only to be shown).

    Prints what is wrong and exits with code 2 if something is; prints help and exits with 0 for --help.

        >>> config, dry_run = parse(["llama3-8b", "--parallel.tp", "2", "--train.steps", "5000"])
    """
    try:
        import tyro  # noqa: F401
    except ImportError as error:
        print(f"{prog} needs more packages: pip install 'ottava[train]' ({error}).", file=sys.stderr)
        raise SystemExit(2) from error
    source, rest = (
        (arguments[0], arguments[1:]) if arguments and not arguments[0].startswith("-") else (None, arguments)
    )
    try:
        base, from_file = _read(source)
    except ValueError as error:
        raise SystemExit(_complain(prog, str(error))) from error

    try:
        return _parsed(base, [*from_file, *rest], f"{prog} [CONFIG.toml | PRESET]" if _asks_for_help(rest) else prog)
    except ValueError as error:
        culprit = f"{source}: " if _is_refused(base, from_file) else ""
        raise SystemExit(_complain(prog, f"{culprit}{error}")) from error
    except SystemExit as stop:
        if stop.code and _is_refused(base, from_file):
            print(f"{prog}: this is in {source}.", file=sys.stderr)
        elif stop.code and source is None and (late := _late_configuration(rest)):
            print(f"{prog}: a configuration comes before the options: {prog} {late} ...", file=sys.stderr)
        raise


def _parsed(base: Config, options: list[str], prog: str) -> tuple[Config, bool]:
    """The configuration, and whether it is only to be shown. SystemExit for options that are wrong, ValueError for what they say."""
    import tyro

    known = {f.name: getattr(base, f.name) for f in fields(Config)}
    found = tyro.cli(Command, default=Command(**known), args=options, prog=prog)
    return Config(**{name: getattr(found, name) for name in known}), found.dry_run


def _is_refused(base: Config, options: list[str]) -> bool:
    """Whether these options are wrong by themselves. What is said about them has been said."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _parsed(base, options, "")
    except (SystemExit, ValueError):
        return True
    return False


def _asks_for_help(options: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(options)


def _late_configuration(options: list[str]) -> str | None:
    """A file or preset that stands among the options and is the value of none of them."""
    for before, word in zip(["", *options], options):
        is_value = before.startswith("--") and "." in before
        if (word.endswith(".toml") or word in presets()) and not is_value and not word.startswith("-"):
            return word
    return None


def _complain(prog: str, message: str) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return 2


def _read(source: str | None) -> tuple[Config, list[str]]:
    """(preset, options that the file stands for)."""
    if source is None:
        return presets()[DEFAULT_PRESET], []
    if (kept := Path(source) / "config.toml").is_file():
        raise ValueError(f"{source} is the folder of a run. Its configuration is {kept}.")
    if not source.endswith(".toml"):
        return preset(source), []
    path = Path(source)
    table = read_toml(path)
    base = Config()
    if "preset" in table:
        try:
            base = preset(str(table.pop("preset")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return base, list(_options(table, path))


def preset(name: str) -> Config:
    """A preset by its name.

    >>> preset("llama3-8b").model.heads
    32
    """
    known = presets()
    if name not in known:
        raise ValueError(f"There is no preset {name!r}.{_nearest(name, known)} A file's name must end in .toml.")
    return known[name]


def _options(table: dict[str, Any], path: Path) -> Iterable[str]:
    """Command-line options for the keys of a TOML file. Unknown keys are named with the file."""
    sections = {f.name: f.default_factory for f in fields(Config)}
    for section, keys in table.items():
        if section not in sections:
            raise ValueError(f"{path}: {_unknown_section(section, keys, sections)}")
        if not isinstance(keys, dict):
            raise ValueError(f"{path}: {section} is a section: write [{section}] and its keys below.")
        known = get_type_hints(sections[section])
        for key, value in keys.items():
            if key not in known:
                raise ValueError(f"{path}: section [{section}] has no key {key[:80]!r}.{_nearest(key, known)}")
            if type(value) is int and abs(value) > MOST:  # of thousands of digits, which Python refuses to write
                raise ValueError(f"{path}: {section}.{key} must be at most {MOST:,}, got more.")
            _check_kind(f"{path}: {section}.{key}", value, known[key])
            yield from _option(f"{section}.{key}".replace("_", "-"), value, path)


def _unknown_section(name: str, keys: Any, sections: dict[str, Any]) -> str:
    """What is wrong with a name at the top of a file that is no section."""
    shown = printable(name, 80)
    homes = [section for section, kind in sections.items() if any(f.name == name for f in fields(kind))]
    if homes and not isinstance(keys, dict):
        return f"{shown} stands before all sections: write it below {' or '.join(f'[{home}]' for home in homes)}."
    return f"there is no section [{shown}].{_nearest(name, sections)}"


def _check_kind(where: str, value: Any, hint: Any) -> None:
    """Raises if a key takes a list, true or false, or one value, and a file gives it another of these. (The parser of options would tell of
    an option too many, or of one without a value.)"""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    takes_list = any(get_origin(member) is tuple for member in members)
    given = printable(json.dumps(value) if isinstance(value, bool | list) else repr(value), 80)
    if isinstance(value, bool) != (bool in members):
        wanted = "true or false" if bool in members else "a list" if takes_list else "a value"
        raise ValueError(f"{where} is {given}, but it takes {wanted}.")
    if isinstance(value, list) and not takes_list:
        raise ValueError(f"{where} is the list {given}, but it takes one value.")


def _option(name: str, value: Any, path: Path) -> list[str]:
    if isinstance(value, bool):
        section, key = name.split(".")
        return [f"--{name}" if value else f"--{section}.no-{key}"]
    if isinstance(value, list):
        words = [str(v) for v in value]
        if dashed := [word for v, word in zip(value, words) if isinstance(v, str) and word.startswith("-")]:
            raise ValueError(f"{path}: {name} has {dashed[0]!r}, which looks like an option: write './{dashed[0]}'.")
        return [f"--{name}", *words]
    if isinstance(value, int | float | str):
        return [f"--{name}={value}"]  # with "=", a text may begin with "-"
    raise ValueError(f"{path}: {name} is {printable(repr(value), 80)}, which no key takes.")


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    return did_you_mean(name, known, cutoff=0.4) or f" There are: {', '.join(known)}."


def to_toml(config: Config) -> str:
    """The whole configuration as a TOML file that `parse` reads back to the same.

    >>> print(to_toml(Config()))
    """
    import tomli_w

    sections = {
        name: {key: list(v) if isinstance(v, tuple) else v for key, v in keys.items() if v is not None}
        for name, keys in asdict(config).items()
    }
    return tomli_w.dumps(sections)
