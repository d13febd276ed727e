"""This machine: torchrun with restarts, in the foreground."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ottava.launch.job import Job
from ottava.launch.torchrun import config_files, log_options, shell, torchrun


@dataclass(frozen=True)
class Local:
    """All ranks on this machine."""

    def files(self, job: Job) -> dict[str, str]:
        """local.sh is the command with its environment."""
        if job.nodes != 1:
            raise ValueError(
                f"--on local is this machine alone, but --nodes is {job.nodes}: take --on ssh or a scheduler."
            )
        exports = "\n".join(f"export {name}={shell([value])}" for name, value in job.variables.items())
        text = f"""#!/bin/bash
# {job.name}: {job.per_node} ranks on this machine. A rank that is lost is started again, with all the others, up to {job.restarts} times.
{exports}
exec {shell(self._words(job))}
"""
        return {"local.sh": text} | config_files(job)

    def submit(self, job: Job, folder: Path) -> int:
        """This process becomes torchrun's: its signals and its exit code are those of the run."""
        words = self._words(job)
        sys.stdout.flush()
        os.execvpe(words[0], words, os.environ | dict(job.variables))

    def _words(self, job: Job) -> list[str]:
        # Port 0: any free one, so that several runs share a machine.
        return torchrun(
            job,
            "1",
            "localhost:0",
            str(job.folder / "config.toml"),
            rdzv_id=job.name,
            **log_options(job.config.run_folder),
        )
