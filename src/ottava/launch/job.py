"""`Job`: what is to be started, on how many nodes, and with how many it can do if some are lost. Plain data, checked before anything is
written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from ottava.train.config import Config
from ottava.train.config_checks import check_data_parallel

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Of a job: what a Kubernetes object, a Slurm job and a Ray run can all be called, with room for what the schedulers add."""


@dataclass(frozen=True)
class Job:
    """A run, or the runs of a sweep, on `nodes` nodes with `per_node` ranks each: one a GPU.

    >>> Job(config, "llama", nodes=4, per_node=8, least_nodes=2).counts
    (2, 4)
    """

    config: Config
    name: str
    nodes: int = 1
    per_node: int = 8
    least_nodes: int | None = None
    """Nodes that a restart may do with. None: all of them."""
    device: str = "cuda"
    """What ranks run on: "cuda" or "cpu"."""
    restarts: int = 3
    """Starts after failures, of the ranks on a node and of the job."""
    grace_s: int = 180
    """Seconds that ranks have to save after a signal."""
    time: str | None = None
    """Longest time, as Slurm writes it: days-hours:minutes:seconds."""
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"
    """Command that runs Python on the nodes."""
    sweep: tuple[tuple[str, Config], ...] = ()
    """(what differs, configuration) of the runs of a sweep."""
    output: Path | None = None
    """Where its files go. None: RUN/launch."""

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}.")
        if self.restarts < 0 or self.grace_s < 1:
            raise ValueError(
                f"--restarts must be 0 or more and --grace at least 1 s, got {self.restarts} and {self.grace_s}."
            )
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"--name {self.name!r}: a job's name has at most 40 small letters, digits and dashes, and begins with a letter."
            )
        if not 1 <= self.least <= self.nodes:
            raise ValueError(f"--min-nodes must be from 1 to --nodes ({self.nodes}), got {self.least}.")
        for nodes in {self.nodes, self.least}:
            for _, config in self.runs:
                if reason := why_not(config, nodes * self.per_node):
                    raise ValueError(
                        f"{nodes} nodes x {self.per_node} ranks cannot run this configuration: {reason} Change --nodes or --per-node, "
                        "or the configuration with --set."
                    )

    @property
    def least(self) -> int:
        """Fewest nodes."""
        return self.nodes if self.least_nodes is None else self.least_nodes

    @property
    def runs(self) -> tuple[tuple[str, Config], ...]:
        """Those of the sweep, or the one."""
        return self.sweep or (("", self.config),)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of nodes, from the fewest, with which every run can go on."""
        possible = range(self.least, self.nodes + 1)
        return tuple(n for n in possible if not any(why_not(config, n * self.per_node) for _, config in self.runs))

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return self.config.run_folder / "launch" if self.output is None else self.output

    def elastic(self) -> str:
        """torchrun's `--nnodes`, where torchrun itself may leave nodes out. It may then start with any number between the two."""
        missing = sorted(set(range(self.least, self.nodes + 1)) - set(self.counts))
        if missing:
            reason = next(filter(None, (why_not(config, missing[0] * self.per_node) for _, config in self.runs)))
            raise ValueError(
                f"--min-nodes {self.least}: torchrun may go on with any number of nodes from there, but not with {missing[0]}: {reason} "
                f"Choose --min-nodes {missing[-1] + 1} or more."
            )
        return str(self.nodes) if self.least == self.nodes else f"{self.least}:{self.nodes}"


def why_not(config: Config, ranks: int) -> str | None:
    """Why `ranks` ranks cannot run a configuration; None if they can. What is known before there are ranks.

    >>> why_not(Config(train=TrainSection(global_batch=16, micro_batch=8)), 3)
    'train.global_batch (16) must be a multiple of train.micro_batch (8) times the 3 data-parallel ranks: 24 or ...'
    """
    try:
        plan = config.plan().resolve(ranks)
        data_ranks = plan.dp_replicate * plan.dp_shard
        check_data_parallel(config.on_ranks(data_ranks), data_ranks)
    except ValueError as error:
        return str(error)
    if config.train.cuda_graph and ranks > 1:
        return "train.cuda_graph needs one rank."
    return None


def absolute(config: Config) -> Config:
    """With paths that mean the same in any folder of a machine that sees the same files."""

    def whole(path: str) -> str:
        return path if "://" in path else str(Path(path).expanduser().absolute())

    data, checkpoint = config.data, config.checkpoint
    load = checkpoint.load if checkpoint.load in ("exact", "none") else whole(checkpoint.load)
    tokenizer = data.tokenizer if data.tokenizer == "byte" else whole(data.tokenizer)
    return replace(
        config,
        train=replace(config.train, run=whole(config.train.run)),
        data=replace(data, files=tuple(map(whole, data.files)), tokenizer=tokenizer, cache=whole(data.cache)),
        checkpoint=replace(checkpoint, load=load),
    )


def check_on(mount: str, config: Config, name: str) -> None:
    """For machines with disks of their own: the run has to lie on what all of them see, and files need whole paths.

    >>> check_on("/mnt/runs", config, "llama")
    """
    run, folder = PurePosixPath(config.train.run), PurePosixPath(mount)
    if not run.is_relative_to(folder):
        raise ValueError(
            f"train.run is {run}, which is not on the volume at {folder}: checkpoints would be lost with their machine. "
            f"Take --set train.run={folder / 'runs' / name}."
        )
    for path in config.data.files:
        if not path.startswith("/") and "://" not in path:
            raise ValueError(
                f"data.files has {path}, which means nothing there: give the whole path, on the volume at {folder}."
            )
