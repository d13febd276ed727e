"""`ottava doctor`: checks this machine, or, under a launcher, all ranks. Exit code 0: sound; 1: a problem was found."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava doctor`."""
    parser.add_argument("--run", default=".", dest="folder", help="folder that the run will write to (default: here)")
    parser.add_argument("--space-gib", type=float, default=1.0, help="that must be free there (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds until a silent rank is missing (default 20)"
    )
    parser.add_argument("--nccl-log", help="a log made with NCCL_DEBUG=INFO, to see what NCCL chose")
    parser.add_argument(
        "--config", help="of the run, TOML or preset: does it suit these machines (default: the run folder's own)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ottava.doctor import Options, examine
    from ottava.train.world import Place

    if not 0 < options.timeout < math.inf or not 0 <= options.space_gib < math.inf:
        print(
            f"ottava doctor: --timeout is above 0 s and --space-gib 0 GiB or more, got {options.timeout:g} and {options.space_gib:g}.",
            file=sys.stderr,
        )
        return 2
    try:
        place = Place.from_torchrun()
    except ValueError as error:
        print(
            f"ottava doctor: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are whole numbers: {error}",
            file=sys.stderr,
        )
        return 2
    asked = Options(
        options.folder, options.space_gib, options.timeout, nccl_log=options.nccl_log, config=options.config
    )
    report = examine(asked, place)
    alone_missing = any(f.check == "ranks" and f.status == "problem" for f in report.findings)
    if place is None or place.rank == 0 or (alone_missing and place.rank != 0):
        print(json.dumps(report.as_json(), indent=1) if options.json else report.as_text(), flush=True)
    code = 0 if report.sound else 1
    if alone_missing:  # threads of a group whose ranks have gone may never end
        sys.stdout.flush()
        os._exit(code)
    return code
