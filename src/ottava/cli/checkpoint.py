"""`ottava checkpoint ls|verify|reshard|export|import`. Exit code 2: wrong usage; 4: a checkpoint is there and cannot be used, or none is.

All of them run in one CPU process and hold a block or a tensor at a time, so a checkpoint may be larger than the memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ottava.cli.streams import refuse

SOURCE = "one checkpoint (step-00000100); or a run or its checkpoints, whose newest that can be used is taken"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, work, about in (
        ("ls", _look, "list the checkpoints of a run, or the tensors of one checkpoint"),
        ("verify", _look, "read every file and compare it with its checksum"),
        ("reshard", _reshard, "write a checkpoint anew in another number of files"),
        ("export", _export, "write the Llama of a checkpoint as a directory that Hugging Face's transformers loads"),
        ("import", _import, "make a checkpoint of a Llama from a Hugging Face directory"),
    ):
        sub = actions.add_parser(name, help=about, description=f"{about}.")
        sub.set_defaults(run=_reported, work=work)
        if work is _look:
            sub.add_argument("path", help="a run, its checkpoints, or one checkpoint (step-00000100); folder or URL")
        elif work is _import:
            sub.add_argument("source", help="a directory with config.json and safetensors")
        else:
            sub.add_argument("source", help=SOURCE)
        if work in (_reshard, _import):
            sub.add_argument("target", help="directory (or URL) of checkpoints that gets the new one")
            sub.add_argument("--shards", type=_count, default=1, help="files of the new checkpoint (default: 1)")
        if work is _import:
            sub.add_argument("--step", type=_step, default=0, help="of the new checkpoint (default: 0)")
            sub.add_argument(
                "--pad-vocab-to", type=_count, default=128, help="as model.pad_vocab_to of the run (default: 128)"
            )
        if work is _export:
            sub.add_argument("out", help="directory to be made")
            sub.add_argument(
                "--dtype",
                choices=("bfloat16", "float32", "fp8"),
                default="bfloat16",
                help="of the weights; fp8: E4M3 with a scale for each 128x128 block (default: bfloat16)",
            )
            sub.add_argument("--max-shard-gib", type=_gib, default=5.0, help="size of a file, at most (default: 5)")


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 2**20:
        raise argparse.ArgumentTypeError(f"{text:.30} is not from 1 to {2**20:,}")
    return number


def _step(text: str) -> int:
    number = int(text)
    if not 0 <= number < 10**18:
        raise argparse.ArgumentTypeError(f"{text:.30} is not a step from 0")
    return number


def _gib(text: str) -> float:
    number = float(text)
    if not 0 < number < 2**20:
        raise argparse.ArgumentTypeError(f"{text:.30} is not a size in GiB, above 0")
    return number


def _reported(options: argparse.Namespace) -> int:
    """Runs the action; an error becomes a message and an exit code."""
    from ottava.checkpoint import CheckpointError

    try:
        return options.work(options)
    except CheckpointError as error:
        return refuse(f"ottava checkpoint {options.action}", error, 4)
    except (ValueError, OSError) as error:
        return refuse(f"ottava checkpoint {options.action}", error)


def _of_a_run(path: str) -> str | Path:
    """The directory of checkpoints of a run; anything else as it is."""
    if "://" in path:
        return path
    inside = Path(path) / "checkpoints"
    found = inside if inside.is_dir() else Path(path)
    if not found.is_dir():
        raise ValueError(f"there is no folder {path}.")
    return found


def _free(target: str) -> str:
    """A directory of checkpoints that no run writes into now: each clears what it takes for remains of interrupted saves."""
    if "://" not in target:
        from ottava.train.lock import in_use

        for folder in (Path(target), Path(target).absolute().parent):
            if holder := in_use(folder):
                raise ValueError(f"{folder} is in use by {holder}: choose another target.")
    return target


def _newest(path: str) -> str | Path:
    """The checkpoint that a SOURCE names."""
    from ottava.checkpoint import newest

    return newest(_of_a_run(path))


def _look(options: argparse.Namespace) -> int:
    from ottava.checkpoint import ls, verify

    path = _of_a_run(options.path)
    rows = []
    for row in (ls if options.action == "ls" else verify)(path):
        print(row, flush=True)
        rows.append(row)
    if not rows:
        print(f"ottava checkpoint {options.action}: there is no checkpoint in {path}.", file=sys.stderr)
    return 0 if rows and all(row.good for row in rows) else 4


def _reshard(options: argparse.Namespace) -> int:
    from ottava.checkpoint import reshard

    print(reshard(_newest(options.source), _free(options.target), shards=options.shards))
    return 0


def _export(options: argparse.Namespace) -> int:
    from ottava.models.hf_files import export_hf

    most = int(options.max_shard_gib * 2**30)
    print(export_hf(_newest(options.source), options.out, dtype=options.dtype, max_shard_bytes=most))
    return 0


def _import(options: argparse.Namespace) -> int:
    from ottava.models.hf_files import import_hf

    made = import_hf(
        options.source,
        _free(options.target),
        step=options.step,
        shards=options.shards,
        pad_vocab_to=options.pad_vocab_to,
    )
    print(made)
    return 0
