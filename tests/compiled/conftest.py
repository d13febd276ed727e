"""Every kernel by Triton's compiler, for a Hopper that is not there: collected by `make test-kernels`, which has Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

COMPILES = os.environ.get("TRITON_INTERPRET") != "1" and importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if COMPILES and not torch.cuda.is_available() else ["test_*.py"]
