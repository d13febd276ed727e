"""Programs of schedulers: whether they are there, and what they say when they refuse."""

from __future__ import annotations

import shutil
import subprocess


class Refused(RuntimeError):
    """A scheduler cannot be reached, or does not want the job. Nothing was submitted."""


def call(words: list[str], missing: str, seconds: float = 120.0) -> str:
    """What a program prints. missing: what to do where there is none.

    >>> call(["sbatch", "--parsable", "job.sbatch"], missing="Slurm is not installed here.")
    '42'
    """
    if shutil.which(words[0]) is None:
        raise Refused(f"there is no `{words[0]}`: {missing}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"`{' '.join(words)}` did not answer in {seconds:.0f} s.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise Refused(f"`{' '.join(words)}` ended with exit code {done.returncode}: {said}")
    return done.stdout.strip()
