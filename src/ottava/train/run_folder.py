"""The folder of a run: config.toml, data.json, lock, metrics.jsonl, fp8.jsonl, events.jsonl, summary.json,
checkpoints/, stalls/.

A run that is there already is continued, and has to be the same run: `check_same` names what would make it another.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from ottava.checkpoint import CheckpointError
from ottava.checkpoint.manifest import json_object, read_manifest, read_verified
from ottava.checkpoint.names import MAX_JSON_BYTES, STATE
from ottava.checkpoint.storage import storage_at
from ottava.notices import warn_once
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.metrics import FILE, finite, read_metrics, write_whole
from ottava.train.token_file import TokenFile, same
from ottava.untrusted.files import read_json, read_toml

CONFIG_FILE = "config.toml"
DATA_FILE = "data.json"
SUMMARY_FILE = "summary.json"

SAME: dict[str, tuple[str, ...]] = {
    "model": (),
    "data": ("files", "weights", "tokenizer", "length", "validation_fraction", "document_mask"),
    "optimizer": ("name",),
    "precision": ("weights", "fp8_weights"),
    "train": ("seed", "global_batch"),
}
"""Keys that a resumed run may not change, by section; () is all of it. They decide what the weights are and which sample comes next."""


def prepare(config: Config, data: Sequence[Mapping[str, Any]] = (), *, again: bool = False) -> None:
    """Makes the folder, or checks that it holds this run. For the leading rank.

    data: what the token files are (`Data.identity`).
    again: after a restart in place, when checkpoints are of this run even under checkpoint.load = "none".
    """
    folder = config.run_folder
    place = folder / "checkpoints"
    if os.path.lexists(place) and not place.is_dir():
        raise ValueError(
            f"{place} is not a folder, or a link that leads nowhere: bring back the disk or folder that it was, or remove it, and the "
            "run begins at step 0."
        )
    if any(place.glob("step-*")):
        if config.checkpoint.load == "none" and not again:
            raise ValueError(
                f"{folder} has a run already, and checkpoint.load is none: choose another train.run, or remove the folder."
            )
        check_same(config, folder)
        check_data(folder, data)
    folder.mkdir(parents=True, exist_ok=True)


def describe(config: Config, data: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes config.toml and data.json. For the leading rank, when the run is sure to begin: one that is refused, because its checkpoint
    does not fit either, leaves what it found. After a restart in place too: the rank that led before may have died before it came here."""
    folder = config.run_folder
    _write(folder / CONFIG_FILE, to_toml(config))
    _write(folder / DATA_FILE, json.dumps({"files": list(data)}, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Writes what is not there yet: a restart in place on a full disk has nothing to write."""
    content = text.encode()
    if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
        write_whole(path, content)


def check_same(config: Config, folder: Path) -> None:
    """Raises ValueError with every key that makes this another run than the one in `folder`."""
    differences = _differences(_configuration(folder), tomllib.loads(to_toml(config)))
    if differences:
        raise ValueError(
            f"{folder} holds another run: {'; '.join(differences)}. Choose another train.run, or go on with its settings."
        )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each key of `SAME` that two configurations tell differently."""
    return [
        f"{section}.{key} was {then.get(section, {}).get(key)!r}, now {now[section].get(key)!r}"
        for section, keys in SAME.items()
        for key in keys or sorted({*then.get(section, {}), *now[section]})
        if then.get(section, {}).get(key) != now[section].get(key)
    ]


def check_data(folder: Path, data: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError with the file if a run in `folder` was trained on other tokens under the same name."""
    path = folder / DATA_FILE
    if not path.exists():
        return  # a run from before there was one
    try:
        then = read_json(path)["files"]
        known = {file["path"]: file for file in then}
    except (ValueError, KeyError, TypeError, OSError) as error:
        warn_once(
            f"{path} is damaged ({error}): that the data are the same cannot be checked, and they are taken as they are."
        )
        return
    for now in data:
        before = known.get(now["path"])
        if before is None:
            continue
        if same(now, before):
            if now["modified"] != before.get("modified"):  # written to, or a copy: samples do not tell which
                TokenFile(now["path"]).verify_written()
        else:
            raise ValueError(
                f"{now['path']} is not the file that {folder} was trained on: it has {now['bytes']} bytes (then {before.get('bytes')}), or "
                "other tokens. Bring the old one back, or choose another train.run."
            )


def _configuration(folder: Path) -> dict[str, Any]:
    """What the run in `folder` was started with: its newest checkpoint that can be read tells, which is hashed; without one config.toml,
    which a full disk may have cut and people edit."""
    path = folder / CONFIG_FILE
    try:
        found = read_toml(path) if path.exists() else {}
        whole = all(isinstance(found.get(section), dict) for section in SAME)
        reason = "" if whole else "damaged (it lacks sections)" if found else "empty" if path.exists() else "missing"
    except (ValueError, OSError) as error:
        reason = f"damaged ({error})"
    for _, checkpoint in storage_at(folder / "checkpoints").candidates():
        with suppress(CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_verified(checkpoint, read_manifest(checkpoint), STATE, MAX_JSON_BYTES)
            kept = json_object(content, STATE)["config"]
            saved = tomllib.loads(tomli_w.dumps(_told({section: kept[section] for section in SAME})))
            if not reason and (changed := _differences(saved, found)):
                reason = f"not what the run was started with ({'; '.join(changed)})"
            if reason:
                warn_once(
                    f"{path} is {reason}: the configuration that {checkpoint.name} was saved with is taken for it."
                )
            return saved
    if not reason:
        return found
    raise ValueError(
        f"{path} is {reason}, and no checkpoint has the configuration: which run this is cannot be known. Write the configuration "
        "that it was started with to that file, or choose another train.run."
    )


def _told(value: Any) -> Any:
    """As config.toml tells it: what is None is left out."""
    return {k: _told(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def last_step(folder: Path) -> int:
    """The last step that has a line; 0: none."""
    path = folder / FILE
    return max((line["step"] for line in read_metrics(path)), default=0) if path.is_file() else 0


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
