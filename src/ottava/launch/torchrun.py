"""torchrun's command line for one node, as every launcher but Ray's uses it, and as plain lines for people to paste."""

from __future__ import annotations

import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path

from ottava.launch.job import Job
from ottava.train.arguments import to_toml

FIRST_PORT, PORTS = 29400, 1000
"""Where nodes that others use too may meet."""


def torchrun(job: Job, nnodes: str, endpoint: str, config: str, **more: str) -> list[str]:
    """Words that start the ranks of one node. config: the file. more: options of torchrun, such as rdzv_id="42".

    >>> " ".join(torchrun(job, "2", "node-0:29400", "run.toml", rdzv_id="llama"))
    'python -m ottava.launch.agent --grace=180 --bind-cpus --nnodes=2 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d ...'
    """
    words = [job.python, "-m", "ottava.launch.agent", f"--grace={job.grace_s}"]
    words += ["--bind-cpus"] if job.device == "cuda" else []
    words += [f"--nnodes={nnodes}"] if nnodes else []
    words += [f"--nproc-per-node={job.per_node}"]
    words += [f"--max-restarts={job.restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    return [*words, "-m", "ottava", "train", config]


def port_of(job: Job) -> int:
    """One that another run on the same nodes most likely does not have, and this one always."""
    return FIRST_PORT + zlib.crc32(str(job.config.run_folder).encode()) % PORTS


def shell(words: list[str], keep: tuple[str, ...] = ()) -> str:
    """A line of a script. keep: words that a shell is to read, such as "$ADDRESS".

    >>> shell(["python", "a b", "--address=$A"], keep=("--address=$A",))
    'python \\'a b\\' --address=$A'
    """
    return " ".join(word if word in keep else shlex.quote(word) for word in words)


def config_files(job: Job) -> dict[str, str]:
    """The configuration, or those of a sweep by number."""
    if not job.sweep:
        return {"config.toml": to_toml(job.config)}
    return {f"config-{number}.toml": to_toml(config) for number, (_, config) in enumerate(job.sweep)}


def log_options(folder: Path | str) -> dict[str, str]:
    """Logs of the ranks lie in the run's folder, where `ottava logs` looks, and are on the console too."""
    return {"log_dir": f"{folder}/logs", "redirects": "3", "tee": "3"}


@dataclass(frozen=True)
class Torchrun:
    """Lines to be started by hand, one on every node."""

    def files(self, job: Job) -> dict[str, str]:
        """torchrun.sh takes the first node's address: the same command on every node."""
        path = job.folder / "config.toml"
        more = {"rdzv_id": job.name} | log_options(job.config.run_folder)
        endpoint = f"$FIRST_NODE:{port_of(job)}"
        words = torchrun(job, job.elastic(), endpoint, str(path), **more)
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items())
        text = f"""#!/bin/bash
# {job.name}: {job.nodes} nodes x {job.per_node} ranks. On every node: bash torchrun.sh ADDRESS_OF_THE_FIRST_NODE
FIRST_NODE=${{1:?address of the first node}}
{exports}
exec {shell(words, keep=(f"--rdzv-endpoint={endpoint}",))}
"""
        return {"torchrun.sh": text} | config_files(job)
