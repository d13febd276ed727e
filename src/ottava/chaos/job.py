"""`python -m ottava.chaos.job CONFIG FOLDER`: `ottava train CONFIG` under the faults that lie in FOLDER. `ottava chaos` starts it."""

from __future__ import annotations

import sys
from functools import partial

from ottava.chaos.arm import arm
from ottava.train.arguments import parse
from ottava.train.launch import launch

if __name__ == "__main__":
    settings, _ = parse(sys.argv[1:2])
    sys.exit(launch(settings, prepare=partial(arm, sys.argv[2], str(settings.run_folder))))
