"""`ottava chaos CONFIG`: a job under faults. Exit code 0: all was survived or ended as documented, and the bits are equal; 1: not."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ottava.bench.options import count
from ottava.cli.streams import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava chaos`."""
    from ottava.chaos.plan import KINDS, PHASES

    kinds = "; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items())
    parser.add_argument("config", metavar="CONFIG", help="configuration of a short run (train.run is not touched)")
    parser.add_argument("--faults", default="all", help=f"kinds, separated by commas, or all. {kinds}")
    parser.add_argument("--phases", default=",".join(PHASES), help="phases of a run in which they come (default: all)")
    parser.add_argument("--count", type=count, default=16, metavar="N", help="how many (default: 16)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="what is drawn is a function of it (default: 0)"
    )
    parser.add_argument("--ranks", default="2", help="ranks of the job, or several numbers, separated by commas")
    parser.add_argument("--launcher", default="ottava", help="ottava, torchrun, or both, separated by commas")
    parser.add_argument("--per-run", type=count, default=4, metavar="N", help="faults that one run gets (default: 4)")
    parser.add_argument("--output", type=Path, help="JSON file for what was found")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.set_defaults(run=_chaos)


def _chaos(options: argparse.Namespace) -> int:
    from ottava.bench.tables import chaos as table
    from ottava.chaos.campaign import Campaign
    from ottava.chaos.plan import KINDS, draw
    from ottava.chaos.result import failures, result, write
    from ottava.train.arguments import parse

    try:
        config, _ = parse([options.config], "ottava chaos")
        kinds = list(KINDS) if options.faults == "all" else options.faults.split(",")
        phases = options.phases.split(",")
        if not config.train.evaluate_every:
            phases = [phase for phase in phases if phase != "evaluation"]
        if not config.checkpoint.every:
            phases = [phase for phase in phases if phase != "save"]
        if wrong := [ranks for ranks in options.ranks.split(",") if not ranks.isdecimal() or not int(ranks)]:
            raise ValueError(f"--ranks {wrong[0]}: expected numbers of ranks, 1 or more, separated by commas.")
        places = [
            (launcher, int(ranks)) for launcher in options.launcher.split(",") for ranks in options.ranks.split(",")
        ]
        if bad := [launcher for launcher, _ in places if launcher not in ("ottava", "torchrun")]:
            raise ValueError(f"--launcher {bad[0]}: expected ottava or torchrun.")
        if options.output:  # hours before there is something to write
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.touch()
        found = []
        with tempfile.TemporaryDirectory(prefix="ottava-chaos-") as temporary:
            for i, (launcher, ranks) in enumerate(places):
                share = options.count // len(places) + (i < options.count % len(places))
                if not share:
                    continue
                runs = draw(kinds, share, options.seed + i, ranks, config.train.steps, phases, options.per_run)
                work = (options.work or Path(temporary)) / f"{launcher}-{ranks}"
                print(f"--- {share} faults on {ranks} ranks, {launcher}", flush=True)
                campaign = Campaign(replace(config), ranks, launcher, work, lambda text: print(text, flush=True))
                found.append((campaign, campaign.run(runs)))
    except (ValueError, OSError) as error:
        return refuse("ottava chaos", error)
    command = f"ottava chaos {Path(options.config).name} --count {options.count} --seed {options.seed} --ranks {options.ranks} "
    command += f"--launcher {options.launcher}" + (f" --faults {options.faults}" if options.faults != "all" else "")
    summary = result(found, options.seed, command)
    if options.output:
        write(summary, options.output)
    print(table(summary))
    ratio = summary["effective_training_time_ratio"]
    print(f"effective training time ratio: {ratio:.1%}" if ratio is not None else "no run came to its end")
    for problem in (problems := failures(summary)):
        print(f"NOT AS PROMISED: {problem}", file=sys.stderr)
    return 1 if problems else 0
