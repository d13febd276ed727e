"""Ray Train: a TorchTrainer whose workers are the ranks. Ray starts them, starts them again when one is lost, and is told what happens.

Metrics of rank 0 go to `ray.train.report`, and with them pointers to the run's checkpoints: those stay where they are, in RUN/checkpoints,
and every start goes on from the newest. Workers see the run's folder and the data under the same path.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.launch import policy
from ottava.launch.commands import Refused, call
from ottava.launch.job import Job, why_not
from ottava.launch.torchrun import config_files
from ottava.train import exits

if TYPE_CHECKING:
    from ottava.train.config import Config
    from ottava.train.metrics import StepMetrics
    from ottava.train.world import Place

POINTER = "ottava-checkpoint.json"
ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/:]+:[0-9]{1,5}")
_CONNECT = """
import json, socket, sys, ray
host, _, port = sys.argv[1].removeprefix("ray://").rpartition(":")
if host:
    socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself would try for long
if sys.argv[1] != "local":
    ray.init(address=sys.argv[1], log_to_driver=False)
    print(json.dumps(ray.cluster_resources()))
"""


@dataclass(frozen=True)
class Ray:
    """address: of the cluster: "auto" for the one that this machine belongs to, host:port, or "local" for one of its own."""

    address: str = "auto"

    def __post_init__(self) -> None:
        if not ADDRESS.fullmatch(self.address):
            raise ValueError(
                f"--address {self.address!r}: write host:port, such as head:6379; auto for the cluster that this machine belongs to; "
                "local for one of its own."
            )

    def files(self, job: Job) -> dict[str, str]:
        """ray_train.py is the driver: people who know Ray Train can change it."""
        return {"ray_train.py": _script(job, self.address)} | config_files(job)

    def submit(self, job: Job, folder: Path) -> int:
        """Connects first; then the driver runs here until the end."""
        self._connect(job)
        return subprocess.call([job.python, str(folder / "ray_train.py")])

    def _connect(self, job: Job) -> None:
        missing = "it should run Python."
        try:
            said = call([job.python, "-c", _CONNECT, self.address], missing, seconds=120.0)
        except Refused as error:
            last = str(error).strip().splitlines()[-1]
            if "No module named 'ray'" in last:
                raise Refused(f"{job.python} has no Ray: pip install 'ottava[ray]'.") from error
            raise Refused(f"no Ray cluster answers at {self.address!r}: {last}") from error
        if self.address == "local":
            return
        kind = "GPU" if job.device == "cuda" else "CPU"
        has, wants = json.loads(said.splitlines()[-1]).get(kind, 0), job.nodes * job.per_node
        if has < wants:
            print(f"The cluster has {has:.0f} {kind}s now; Ray waits until it has {wants}.", file=sys.stderr)


def _workers(job: Job) -> str:
    """`num_workers`. Ray leaves out single workers, not nodes, so every number of ranks between must be possible."""
    most, least = job.nodes * job.per_node, job.least * job.per_node
    if least == most:
        return str(most)
    for ranks in range(least, most):
        if reason := why_not(job.config, ranks):
            raise ValueError(
                f"--min-nodes {job.least}: Ray may go on with any number of workers from {least} to {most}, but not with {ranks}: {reason}"
            )
    return f"({least}, {most})"


def _script(job: Job, address: str) -> str:
    gpus = job.device == "cuda"
    resource = json.dumps({"GPU" if gpus else "CPU": 1})
    return f'''"""{job.name}: {job.nodes} nodes x {job.per_node} workers. Written by `ottava launch`; it runs where Ray is."""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ottava.launch.ray import exit_code, train_loop_per_worker

ray.init(address={json.dumps(address)}, runtime_env={{"env_vars": {json.dumps(dict(job.variables))}}})
trainer = TorchTrainer(
    train_loop_per_worker,
    train_loop_config={{"config": Path(__file__).with_name("config.toml").read_text(), "report_every": 10}},
    torch_config=TorchConfig(backend="gloo"),  # for the ranks to meet; Ottava then connects them over NCCL where there are GPUs
    scaling_config=ScalingConfig(num_workers={_workers(job)}, use_gpu={gpus}, resources_per_worker={resource}),
    run_config=RunConfig(
        name={json.dumps(job.name)},
        storage_path={json.dumps(str(job.config.run_folder / "ray"))},
        failure_config=FailureConfig(max_failures={job.restarts}),
    ),
)
sys.exit(exit_code(trainer.fit()))
'''


# ------------------------------------------------------------------------------------------------------------- in a worker


def train_loop_per_worker(options: dict[str, Any]) -> dict[str, Any]:
    """What a worker of Ray Train runs: one rank of `ottava train`. Returns how it ended, for `exit_code`.

    options: "config", the text of a configuration; "report_every", steps between two reports.

    >>> TorchTrainer(train_loop_per_worker, train_loop_config={"config": Path("run.toml").read_text()}, ...)
    """
    from ottava.train.launch import run_rank
    from ottava.train.signals import RankSignals

    config = _parse(options["config"])
    reports = Reports(config, options.get("report_every", 10))
    # Signals belong to Ray, which runs this in a thread; so nothing is entered here.
    code, text = run_rank(config, _meet(), RankSignals(), reports.step)
    if code and code not in policy.FINAL:
        raise RuntimeError(f"ottava train: exit code {code}. {text}")  # Ray starts all workers again
    reports.end(code, text)
    return {"exit_code": code, "message": text}


def exit_code(result: Any) -> int:
    """Of the run, from what `TorchTrainer.fit` returns: what rank 0 returned. `result.metrics` are those of the last report that had a
    checkpoint with it, which the end of a run has not."""
    ended = getattr(result, "return_value", None)
    if not isinstance(ended, dict) or "exit_code" not in ended:
        print(
            f"ottava launch: Ray does not say how the run ended: its result has {ended!r}, and rank 0 returns an exit code. "
            "Ray 2.60 passes it on; is this one older?",
            file=sys.stderr,
        )
        return exits.FAILED
    if ended.get("message"):
        print(f"ottava train: {ended['message']}", file=sys.stderr)
    return int(ended["exit_code"])


class Reports:
    """What Ray is told: every `every` steps, after a checkpoint, and at the end; by all ranks at the same steps, as Ray wants it."""

    def __init__(self, config: Config, every: int, report: Callable[..., None] | None = None) -> None:
        self._folder = config.run_folder / "checkpoints"
        self._every, self._saves = max(every, 1), config.checkpoint.every
        self._report = report or _report
        self._told: int | None = None
        self._last: dict[str, Any] = {}

    def step(self, step: int, metrics: StepMetrics | None) -> None:
        """One step; metrics in rank 0 only."""
        if metrics is not None:
            self._last = {key: value for key, value in asdict(metrics).items() if value is not None}
        if step % self._every == 0 or (self._saves and step > 1 and (step - 1) % self._saves == 0):
            self._send(self._last or {"step": step})

    def end(self, code: int, text: str) -> None:
        """The last one has the exit code."""
        self._send(self._last | {"exit_code": code} | ({"message": text} if text else {}))

    def _send(self, metrics: dict[str, Any]) -> None:
        """Rank 0, which has metrics, also says where the newest checkpoint is, once."""
        from ottava.checkpoint.names import step_of

        committed = self._folder.glob("step-*/manifest.json") if self._last else ()
        newest, path = max(((step_of(file.parent.name) or 0, file.parent) for file in committed), default=(None, None))
        pointer = None
        if newest is not None and newest != self._told:
            self._told, pointer = newest, {"step": newest, "path": str(path)}
        self._report(metrics, pointer)


def _report(metrics: dict[str, Any], pointer: dict[str, Any] | None) -> None:
    """A checkpoint is many gigabytes that lie where all ranks see them: Ray gets a folder that says where."""
    import ray.train

    if pointer is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / POINTER).write_text(json.dumps(pointer), encoding="utf-8")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _parse(text: str) -> Config:
    from ottava.train.arguments import parse

    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return parse([file.name])[0]


def _meet() -> Place:
    """Where this worker stands. Ray's process group serves once, to tell all where rank 0 serves the store of ours."""
    import ray.train
    import ray.util
    import torch.distributed as dist

    from ottava import exchange
    from ottava.train.listen import serve_store
    from ottava.train.world import Place

    context = ray.train.get_context()
    rank, size, local_size = context.get_world_rank(), context.get_world_size(), context.get_local_world_size()
    told = None
    if rank == 0:
        host = ray.util.get_node_ip_address()
        _served.append(serve_store(host, local=local_size == size))
        told = [host, _served[-1].port]
    host, port = exchange.broadcast(told)
    dist.barrier()
    dist.destroy_process_group()
    return Place(rank, size, context.get_local_rank(), local_size, host, port)


_served: list[Any] = []
"""Stores of this process: they live as long as it does."""
