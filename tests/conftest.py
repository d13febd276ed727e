"""Every test starts from the same torch state. (tests/gpu has a conftest of its own: it is collected where a GPU is.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

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
