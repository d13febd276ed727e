"""What a GPU would launch, by Triton's interpreter: collected by `make test-kernels`, which has Triton and sets TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]

if INTERPRETS:
    import triton_on_cpu

    triton_on_cpu.install()  # before any kernel is imported
