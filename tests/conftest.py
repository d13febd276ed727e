"""Every test starts from the same torch state. (tests/gpu has a conftest of its own: it is collected where a GPU is.)"""

from __future__ import annotations

import getpass
import itertools
import os
import tempfile
from collections.abc import Iterator

# Threads of OpenMP spin while they wait for each other. With more of them than free cores a test can take 30 times as long, so every
# process of the tests has one; what is said about threads is tested with `torch.set_num_threads`.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Inductor keeps the C++ that it has written, and compiles it again for another ATEN_CPU_CAPABILITY, for which it may be wrong: a folder for
# each.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(), f"ottava_inductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability()}"
    ),
)

# The same examples on every machine and every run: a failure in CI is a failure on the desk.
settings.register_profile(
    "ottava",
    derandomize=True,
    database=None,
    deadline=None,  # the first example of a test may compile or fill caches
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ottava")


def pytest_report_header() -> str:
    """Says at the top of the report on what the tests ran."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only, so tests/gpu is left out"
    return f"ottava: torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"


# Folders whose tests wait (for faults, limits of time, other processes) more than they compute.
WAITING = {"chaos", "doctor", "launch", "train"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extras are extras because they take long: an hour each, where they do not say otherwise.

    Where processes share the files, one that waits comes after one that computes: cores are busy from the start, and what is left for
    the end is short.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
        waiting = [tests for tests in files if WAITING & set(tests[0].path.parts)]
        computing = [tests for tests in files if tests not in waiting]
        turns = itertools.zip_longest(waiting, computing, fillvalue=[])
        items[:] = [item for turn in turns for tests in turn for item in tests]
    for item in items:
        if item.get_closest_marker("extra") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Seeds torch before a test and undoes the global settings that the test changed."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    grad, deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
