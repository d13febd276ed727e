"""Other people's programs: asked, with a time limit, and not missed where they are not."""

from __future__ import annotations

import shutil
import subprocess


def run_command(words: list[str], seconds: float = 15.0) -> str | None:
    """What a program prints; None if it is not here, fails, or takes too long.

    >>> run_command(["no-such-program"]) is None
    True
    """
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
