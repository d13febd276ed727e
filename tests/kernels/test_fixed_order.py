"""A float32 product whose bits do not depend on the number of threads."""

from __future__ import annotations

import pytest
import torch

from ottava.kernels.fixed_order import matmul


@pytest.mark.parametrize("m,n,k", [(1, 999, 64), (33, 300, 2048), (512, 128, 2048), (700, 128, 8192), (257, 1, 700)])
def test_same_bits_for_any_number_of_threads(m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k), torch.randn(n, k)
    results = []
    for threads in (1, 2, 3, 4, 8):
        torch.set_num_threads(threads)
        results.append(matmul(a, b.t()))
        assert torch.get_num_threads() == threads  # put back
    assert all(torch.equal(results[0], result) for result in results[1:])
    torch.testing.assert_close(results[0].double(), a.double() @ b.double().t(), rtol=1e-4, atol=1e-2)


def test_threads_are_put_back_after_an_error() -> None:
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError):
        matmul(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.get_num_threads() == 2
