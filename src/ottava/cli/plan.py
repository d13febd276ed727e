"""`ottava plan CONFIG --gpus N ...`: what fits where, how fast, and the configuration of the best. Exit code 2 where nothing runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from ottava.cli.streams import refuse

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava plan`."""
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG", help="a TOML file of `ottava train`, or the name of a preset")
    add("--gpus", type=int, help="GPUs of the run")
    add("--per-node", type=int, default=8, help="GPUs that NVLink joins: mostly those of a node (default 8)")
    add("--gpu", default="h200", help="their kind (default h200)")
    add("--link", default="ib400", help="between nodes: ib400, ethernet100, ..., or a rate a GPU: 46GB/s, 400Gb/s,8us")
    add("--tokens", help="to train on, such as 15T (default: what the configuration's steps have)")
    add("--document-length", type=float, help="mean tokens of a document, where attention stays within documents")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the configuration first")
    add("--table", action="append", default=[], metavar="FILE", help="more GPUs, or what `ottava bench gemm` wrote")
    add("--output", type=Path, metavar="FILE", help="write the best layout as TOML for `ottava train`")
    add("--html", type=Path, metavar="FILE", help="write a page with the picture of the mesh")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--calibrate", type=Path, metavar="FILE", help="measure this GPU and write it into FILE, a table for --table")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    try:
        if options.calibrate is not None:
            _calibrate(options.calibrate)
            if options.config is None:
                return 0
        return _find(options)
    except (ValueError, OSError) as error:
        return refuse("ottava plan", error)


def _find(options: argparse.Namespace) -> int:
    from ottava.plan import show
    from ottava.plan.cluster import Cluster
    from ottava.plan.planner import plan_run
    from ottava.train.arguments import parse, to_toml
    from ottava.train.override import override

    if options.config is None or options.gpus is None:
        raise ValueError("it needs a configuration and --gpus: ottava plan llama3-8b --gpus 64.")
    config, _ = parse([options.config], prog="ottava plan")
    for text in options.set:
        config = override(config, text)
    tables = [*options.table, *([options.calibrate] if options.calibrate is not None else [])]
    cluster = Cluster.of(options.gpu, options.gpus, options.per_node, options.link, tables)
    tokens = None if options.tokens is None else number_of_tokens(options.tokens)
    found = plan_run(config, cluster, tokens, options.document_length)
    if options.output is not None:
        options.output.write_text(to_toml(found.winning_config()), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(show.as_html(found, f"{options.config} on {options.gpus} GPUs"), encoding="utf-8")
    print(json.dumps(show.as_json(found), indent=1) if options.json else show.as_text(found))
    return 0


def _calibrate(path: Path) -> None:
    import torch

    from ottava.plan.calibrate import calibrate
    from ottava.plan.devices import write_entry

    if not torch.cuda.is_available():
        raise ValueError("--calibrate measures a GPU, and this machine has none that torch can use.")
    key, gpu = calibrate(torch.device("cuda", torch.cuda.current_device()))
    write_entry(path, key, gpu)
    print(f"{gpu.name} is {key!r} in {path}: {gpu.gemm_tflops} TFLOP/s, copies {gpu.copy_tb_s} TB/s.", file=sys.stderr)


def number_of_tokens(text: str) -> float:
    """A number with a unit.

    >>> number_of_tokens("1.5T")
    1500000000000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower().replace(",", ""))
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--tokens {text!r} is no number of tokens: write 15T, 300B, 1.5M, 1e12 or 1000000.")
    return float(match[1]) * UNITS[match[2]]
