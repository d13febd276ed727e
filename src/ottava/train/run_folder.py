"""The folder of a run: config.toml, metrics.jsonl, fp8.jsonl, summary.json, checkpoints/, stalls/.

A run that is there already is continued, and has to be the same run: `check_same` names what would make it another.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.metrics import FILE, finite, read_metrics, write_whole

CONFIG_FILE = "config.toml"
SUMMARY_FILE = "summary.json"

SAME: dict[str, tuple[str, ...]] = {
    "model": (),
    "data": ("files", "weights", "tokenizer", "length", "validation_fraction", "document_mask"),
    "optimizer": ("name",),
    "precision": ("weights", "fp8_weights"),
    "train": ("seed", "global_batch"),
}
"""Keys that a resumed run may not change, by section; () is all of it. They decide what the weights are and which sample comes next."""


def prepare(config: Config) -> None:
    """Makes the folder, or checks that it holds this run; writes the configuration. For the leading rank."""
    folder = config.run_folder
    if (folder / CONFIG_FILE).is_file() and any((folder / "checkpoints").glob("step-*")):
        if config.checkpoint.load == "none":
            raise ValueError(
                f"{folder} has a run already, and checkpoint.load is none: choose another train.run, or remove the folder."
            )
        check_same(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG_FILE, to_toml(config))


def check_same(config: Config, folder: Path) -> None:
    """Raises ValueError with every key that makes this another run than the one in `folder`."""
    then = tomllib.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    now = tomllib.loads(to_toml(config))
    differences = [
        f"{section}.{key} was {then.get(section, {}).get(key)!r}, now {now[section].get(key)!r}"
        for section, keys in SAME.items()
        for key in keys or sorted({*then.get(section, {}), *now[section]})
        if then.get(section, {}).get(key) != now[section].get(key)
    ]
    if differences:
        raise ValueError(
            f"{folder} holds another run: {'; '.join(differences)}. Choose another train.run, or go on with its settings."
        )


def next_attempt(folder: Path) -> int:
    """Which start of the run this is: 0 for the first."""
    if not (folder / FILE).is_file():
        return 0
    lines = list(read_metrics(folder / FILE))
    return int(lines[-1].get("attempt", 0)) + 1 if lines else 0


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json."""
    write_whole(folder / SUMMARY_FILE, json.dumps(_plain(summary), indent=2) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return finite(value)
