"""SkyPilot: a task for `sky jobs launch`, which brings a preempted job back. It is written, and started by people who have an account."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ottava.launch import policy
from ottava.launch.job import Job, check_on
from ottava.launch.torchrun import log_options, port_of, shell, torchrun
from ottava.launch.yaml_text import to_yaml
from ottava.train.arguments import to_toml

CONFIG = "~/ottava/config.toml"


@dataclass(frozen=True)
class SkyPilot:
    """volume: (storage, folder it is mounted at), for the run and its data. accelerator: as SkyPilot calls the GPU, such as H200."""

    volume: tuple[str, str]
    accelerator: str | None = None

    def __post_init__(self) -> None:
        storage, folder = self.volume
        if not re.fullmatch(r"[a-z0-9]+://[^\s]+", storage) or not folder.startswith("/"):
            raise ValueError(
                f"--volume {storage}:{folder}: write s3://BUCKET:/FOLDER, a storage and where it is mounted."
            )

    def files(self, job: Job) -> dict[str, str]:
        """sky.yaml and the configuration, which it copies to the nodes."""
        if job.device == "cuda" and self.accelerator is None:
            raise ValueError("--on skypilot needs --accelerator, such as H200: the kind of GPU that is asked for.")
        check_on(self.volume[1], job.config, job.name)
        resources: dict[str, Any] = {
            "job_recovery": {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [policy.SAVED]}
        }
        if job.device == "cuda":
            resources = {"accelerators": f"{self.accelerator}:{job.per_node}"} | resources
        task = {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": resources,
            "envs": dict(job.variables),
            "file_mounts": {
                CONFIG: str(job.folder / "config.toml"),
                self.volume[1]: {"source": self.volume[0], "mode": "MOUNT"},
            },
            "run": _run(job),
        }
        return {"sky.yaml": to_yaml(task) + "\n", "config.toml": to_toml(job.config)}


def _run(job: Job) -> str:
    address, conf = f"$first:{port_of(job)}", "is_host=$host"
    words = torchrun(
        job,
        "$SKYPILOT_NUM_NODES",
        address,
        CONFIG,
        rdzv_id=job.name,
        rdzv_conf=conf,
        **log_options(job.config.run_folder),
    )
    keep = tuple(word for word in words if "$" in word or word == CONFIG)
    return f"""first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
host=0; if [ "$SKYPILOT_NODE_RANK" = 0 ]; then host=1; fi
exec {shell(words, keep)}
"""
