"""`ottava launch CONFIG --on SCHEDULER`: writes what a scheduler takes, and submits it if asked.

Exit codes: 0 written or submitted; 2 wrong usage, or a run that cannot be; 69 the scheduler refused, or does not answer. Where the run
itself is waited for (local, ssh, ray), its own.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.cli.streams import refuse

if TYPE_CHECKING:
    from ottava.launch.job import Job
    from ottava.train.config import Config

SCHEDULERS = ("local", "ssh", "slurm", "ray", "kubernetes", "skypilot", "torchrun")
BELONGS: dict[str, tuple[str, ...]] = {
    "hosts": ("ssh",),
    "sbatch": ("slurm",),
    "sweep": ("slurm",),
    "concurrent": ("slurm",),
    "time": ("slurm",),
    "address": ("ray",),
    "image": ("kubernetes",),
    "volume": ("kubernetes", "skypilot"),
    "namespace": ("kubernetes",),
    "kind": ("kubernetes",),
    "cpus": ("slurm", "kubernetes"),
    "memory": ("kubernetes",),
    "accelerator": ("skypilot",),
    "python": ("local", "ssh", "slurm", "ray", "torchrun"),
    "grace": ("local", "ssh", "slurm", "kubernetes", "skypilot", "torchrun"),
}
"""Options that only some schedulers have a use for."""
BY_HAND = {"torchrun": "on every node", "skypilot": "with `sky jobs launch`"}
"""What nobody here can submit, and how it is started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `ottava launch`."""
    add = parser.add_argument
    add("words", nargs="+", metavar="CONFIG", help="a TOML file of `ottava train`, or the name of a preset")
    add("--on", choices=SCHEDULERS, help="who starts the ranks (default local)")
    add("--print", action="store_true", dest="show", help="show what would be submitted; write nothing")
    add("--submit", action="store_true", help="submit it, or on local, ssh and ray: run it")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the configuration first")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where files go (default RUN/launch; kubernetes, skypilot: launch/NAME)",
    )
    shape = parser.add_argument_group("how much")
    add = shape.add_argument
    add("--nodes", type=int, help="nodes (default: what the configuration's mesh needs, or 1)")
    add("--per-node", type=int, help="ranks of a node, one a GPU (default 8; on local what it has)")
    add("--min-nodes", type=int, help="go on with as few after a loss, if the plan can (default: --nodes)")
    add("--device", choices=("cuda", "cpu"), help="what ranks run on (default cuda; on local what it has)")
    add("--restarts", type=int, default=3, help="starts after failures (default 3)")
    add("--grace", type=int, metavar="SECONDS", help="that ranks have to save after a signal (default 180)")
    env = parser.add_argument_group("the ranks' environment")
    add = env.add_argument
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the ranks")
    add("--interface", help="network between nodes, such as eth0 (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)")
    add("--hca", help="InfiniBand cards that NCCL uses (NCCL_IB_HCA)")
    add("--python", help="command that runs Python on the nodes (default: the one that runs this)")
    _add_scheduler_options(parser)
    parser.set_defaults(run=_launch)


def _add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("by scheduler")
    add = group.add_argument
    add("--name", help="of the job (default: the run's folder)")
    add("--hosts", help="ssh: machines, as a,b,c")
    add("--sbatch", action="append", metavar="OPTION", help="slurm: one more option, as --sbatch=--partition=gpu")
    add("--time", help="slurm: longest time, as 12:00:00 or 2-00:00:00; before it ends the run saves and is requeued")
    add("--sweep", action="append", metavar="SECTION.KEY=A,B", help="slurm: an array with a run for each value")
    add("--concurrent", type=int, metavar="N", help="slurm: runs of a sweep at a time")
    add("--address", help="ray: host:port, auto or local (default auto)")
    add("--image", help="kubernetes: container image with Ottava in it")
    add("--volume", metavar="CLAIM:/FOLDER", help="kubernetes, skypilot: claim or storage for the run and its data")
    add("--kind", choices=("trainjob", "jobset"), help="kubernetes: default trainjob, with its TrainingRuntime")
    add("--namespace", help="kubernetes: default that of kubectl")
    add("--cpus", help="slurm, kubernetes: cores of a node, for all its ranks")
    add("--memory", help="kubernetes: memory of a node's pod, as 512Gi")
    add("--accelerator", help="skypilot: kind of GPU, as H200")


def _launch(options: argparse.Namespace) -> int:
    from ottava.launch.commands import Refused
    from ottava.launch.policy import REFUSED

    try:
        _read_words(options)
        launcher, job = _launcher(options), _job(options)
        folder, files = job.folder, launcher.files(job)
        if options.show:
            print(next(iter(files.values())), end="")
            return 0
        _write(folder, files)
        if options.submit:
            return launcher.submit(job, folder)
        how = f"Start it {BY_HAND[options.on]}." if options.on in BY_HAND else "Submit it with --submit."
        print(f"Wrote {', '.join(str(folder / name) for name in files)}. {how}")
        return 0
    except Refused as error:
        print(f"ottava launch: {error}", file=sys.stderr)
        return REFUSED
    except (ValueError, OSError) as error:
        return refuse("ottava launch", error)


def _read_words(options: argparse.Namespace) -> None:
    """`CONFIG --on slurm`, or `slurm CONFIG`. Options that mean nothing to the scheduler are errors."""
    words = list(options.words)
    if len(words) == 2 and words[0] in SCHEDULERS and options.on in (None, words[0]):
        options.on = words.pop(0)
    if len(words) != 1:
        raise ValueError(f"it takes one configuration, got {' '.join(words)}: ottava launch run.toml --on slurm")
    options.config, options.on = words[0], options.on or "local"
    if options.config in SCHEDULERS:
        raise ValueError(f"{options.config} starts a run; which one? ottava launch {options.config} run.toml")
    if options.python == "":
        raise ValueError("--python '': write the command that runs Python on the nodes, or leave it out.")
    for name, schedulers in BELONGS.items():
        if getattr(options, name) is not None and options.on not in schedulers:
            raise ValueError(f"--{name} is for --on {' or '.join(schedulers)}; it does nothing on {options.on}.")
    if options.show and options.submit:
        raise ValueError("--print shows, --submit submits: choose one.")
    if options.submit and options.on in BY_HAND:
        raise ValueError(
            f"--on {options.on} is started by hand, {BY_HAND[options.on]}: take --print, or leave --submit out."
        )


def _job(options: argparse.Namespace) -> Job:
    from ottava.launch import environment
    from ottava.launch.job import Job, absolute
    from ottava.launch.sweep import sweep
    from ottava.train.arguments import parse
    from ottava.train.override import override

    config, _ = parse([options.config], prog="ottava launch")
    for text in options.set:
        config = override(config, text)
    if options.on not in ("kubernetes", "skypilot"):  # there, paths are those of the pods or the cloud's machines
        config = absolute(config)
    name = options.name or _name(config)
    device, per_node = _ranks(options, config)
    variables = environment.variables(device, options.interface, options.hca, environment.assignments(options.env))
    return Job(
        config,
        name,
        nodes=_nodes(options, config, per_node),
        per_node=per_node,
        least_nodes=options.min_nodes,
        device=device,
        restarts=options.restarts,
        grace_s=180 if options.grace is None else options.grace,
        time=options.time,
        variables=variables,
        python=options.python or ("python" if options.on in ("kubernetes", "skypilot") else sys.executable),
        sweep=sweep(config, options.sweep or []),
        output=_output(options, name),
    )


def _output(options: argparse.Namespace, name: str) -> Path | None:
    """The run's folder is not here where machines are somebody else's."""
    if options.output is not None:
        return options.output.expanduser().absolute()
    return Path("launch", name).absolute() if options.on in ("kubernetes", "skypilot") else None


def _name(config: Config) -> str:
    """From the run's folder."""
    found = re.sub(r"[^a-z0-9]+", "-", config.run_folder.name.lower()).strip("-")[:40].strip("-")
    return found if re.match(r"[a-z]", found) else f"run-{found}".strip("-")[:40].strip("-")


def _ranks(options: argparse.Namespace, config: Config) -> tuple[str, int]:
    """(device, ranks of a node)."""
    if options.on == "local":
        import torch

        from ottava.train.world import local_ranks

        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return device, options.per_node if options.per_node is not None else local_ranks(config.parallel.ranks)
    device = options.device or "cuda"
    usual = 8 if device == "cuda" else config.parallel.ranks or 1
    return device, options.per_node if options.per_node is not None else usual


def _nodes(options: argparse.Namespace, config: Config, per_node: int) -> int:
    if options.nodes is not None:
        return options.nodes
    if options.on == "ssh" and options.hosts:
        return len(options.hosts.split(","))
    plan = config.plan()
    ranks = math.prod(plan.shape)
    if options.on == "local" or not plan.is_resolved or per_node < 1 or ranks % per_node:
        return 1
    return ranks // per_node


def _launcher(options: argparse.Namespace) -> Any:
    """By name; only the one that is named is imported."""
    if options.on == "ssh":
        from ottava.launch.ssh import Ssh

        return Ssh(tuple(options.hosts.split(",")) if options.hosts else ())
    if options.on == "slurm":
        from ottava.launch.slurm import Slurm

        return Slurm(tuple(options.sbatch or ()), options.cpus, options.concurrent)
    if options.on == "ray":
        from ottava.launch.ray import Ray

        return Ray(options.address or "auto")
    if options.on == "kubernetes":
        from ottava.launch.kubernetes import Kubernetes

        if options.image is None or options.volume is None:
            raise ValueError(
                "--on kubernetes needs --image, with Ottava in it, and --volume CLAIM:/FOLDER, which the run and its data are on."
            )
        given = (options.kind or "trainjob", options.namespace, options.cpus, options.memory)
        return Kubernetes(options.image, _volume(options.volume), *given)
    if options.on == "skypilot":
        from ottava.launch.skypilot import SkyPilot

        if options.volume is None:
            raise ValueError(
                "--on skypilot needs --volume STORAGE:/FOLDER, such as s3://bucket:/runs, which outlives the machines."
            )
        return SkyPilot(_volume(options.volume), options.accelerator)
    if options.on == "torchrun":
        from ottava.launch.torchrun import Torchrun

        return Torchrun()
    from ottava.launch.local import Local

    return Local()


def _volume(text: str) -> tuple[str, str]:
    what, _, folder = text.rpartition(":")
    return what, folder


def _write(folder: Path, files: dict[str, str]) -> None:
    """Each whole or not at all."""
    from ottava.train.metrics import write_whole

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the folder {folder} cannot be made: {error.strerror}. Choose another with --output."
        ) from error
    for name, text in files.items():
        write_whole(folder / name, text)
