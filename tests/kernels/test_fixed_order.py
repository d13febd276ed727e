"""A float32 product whose bits do not depend on the number of threads, on its neighbours, or on the maker of the CPU."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ottava.kernels import fixed_order
from ottava.kernels.cast import hadamard16
from ottava.kernels.fixed_order import matmul, sum_rows

ROOT = Path(__file__).parents[2]


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    """In [-1, 1) with up to 24 significant bits; integer arithmetic, so the same bits on every machine and with every torch."""
    mixed = (torch.arange(rows * columns) + seed * 7919) * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 3266489917 & 0xFFFFFFFF
    return ((mixed >> 8).float() * 2.0**-23 - 1.0).view(rows, columns)


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors)).hexdigest()[:12]


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
        matmul(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64))
    assert torch.get_num_threads() == 2


def test_operands_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(2, 3\)"):
        matmul(torch.ones(2, 3), torch.ones(2, 3))


# -------------------------------------------------------------------------------------- neighbours: what ranks hold of a product


@pytest.mark.strict
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_product_have_the_bits_of_the_whole(transposed: bool) -> None:
    """Columns over ranks, rows over ranks: numbers of columns like 10, and of rows like 1, take other BLAS kernels."""
    for m, k, n, parts in product((4, 16, 36, 128), (16, 24, 64, 128, 192), (8, 24, 40, 80, 128, 200), (2, 4)):
        a, b = numbers(m, k, 1), numbers(k, n, 2)
        b = b.t().contiguous().t() if transposed else b
        whole = matmul(a, b)
        columns = torch.cat([matmul(a, part) for part in b.chunk(parts, 1)], 1)
        rows = torch.cat([matmul(part, b) for part in a.chunk(parts, 0)], 0)
        assert torch.equal(whole, columns), (m, k, n, parts)
        assert torch.equal(whole, rows), (m, k, n, parts)
        if parts == 2 and k > fixed_order.LEAF:
            halves = [matmul(x, y) for x, y in zip(a.chunk(2, 1), b.chunk(2, 0))]
            assert torch.equal(whole, halves[0] + halves[1]), (m, k, n)


@pytest.mark.strict
def test_a_batch_has_the_bits_of_its_matrices() -> None:
    """Also with more than 64 matrices, which are no contraction."""
    for batch, m, k, n in ((2, 5, 8, 3), (80, 6, 64, 9), (3, 40, 200, 17)):
        a, b = numbers(2 * batch * m, k, 1).view(2, batch, m, k), numbers(2 * batch * k, n, 2).view(2, batch, k, n)
        together = matmul(a, b)
        assert all(torch.equal(together[i, j], matmul(a[i, j], b[i, j])) for i in range(2) for j in range(batch))


@pytest.mark.strict
def test_sums_of_rows_do_not_depend_on_the_columns_beside_them() -> None:
    for rows, columns in ((1, 5), (37, 40), (64, 72), (96, 200), (640, 40), (997, 33)):
        x = numbers(rows, columns, 3)
        whole = sum_rows(x)
        torch.testing.assert_close(whole.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
        assert torch.equal(whole, torch.cat([sum_rows(part) for part in x.split(10, 1)]))
        if rows % 2 == 0:
            assert torch.equal(whole, sum_rows(x[: rows // 2]) + sum_rows(x[rows // 2 :]))
    assert torch.equal(sum_rows(torch.ones(0, 3)), torch.zeros(3))
    one = torch.ones(1, 3)
    assert sum_rows(one).data_ptr() != one.data_ptr()  # an op must not return its input


@pytest.mark.strict
def test_a_rotation_does_not_depend_on_the_rows_beside_it() -> None:
    x = numbers(40, 48, 4)
    assert torch.equal(hadamard16(x), torch.cat([hadamard16(row) for row in x.split(1)]))


# ------------------------------------------------------------------------------------------ the order itself, and its record

# sha256 of products on an AMD EPYC (Zen 4) with torch 2.13; an Intel Xeon with torch 2.11 gave the same.
RECORDED = {
    "fused": "03962b643053",
    "rounded": "356200782ed9",
    "exact": "a1bb717e13c9",
}
SIZES = ((5, 64, 10), (33, 256, 48), (64, 1000, 17), (16, 997, 64), (1, 10, 1))


def has_fused_multiply_add() -> bool:
    """(1 + 2^-12)^2 - 1 is 2^-11 + 2^-24 if the square is not rounded before 1 is taken off."""
    x = 1.0 + 2.0**-12
    return matmul(torch.tensor([[-1.0, x]]), torch.tensor([[1.0], [x]])).item() == 2.0**-11 + 2.0**-24


@pytest.mark.strict
def test_products_have_the_recorded_bits() -> None:
    """A machine of another maker must give them too. Code without fused multiply-add has a record of its own."""
    products = [matmul(numbers(m, k, 1), numbers(k, n, 2)) for m, k, n in SIZES]
    assert digest(*products) == RECORDED["fused" if has_fused_multiply_add() else "rounded"]


@pytest.mark.strict
def test_products_of_short_numbers_have_the_recorded_bits_with_and_without_fused_multiply_add() -> None:
    """FP8 and bf16 values: a product of two is exact in float32."""
    products = [matmul(numbers(m, k, 1).bfloat16().float(), numbers(k, n, 2).bfloat16().float()) for m, k, n in SIZES]
    assert digest(*products) == RECORDED["exact"]


@pytest.mark.strict
def test_a_leaf_is_added_term_by_term_in_order() -> None:
    a, b = numbers(50, 64, 1), numbers(64, 70, 2)
    assert any(torch.equal(matmul(a, b), order(a, b)) for order in (fixed_order._fused, fixed_order._explicit))


@pytest.fixture
def unknown_blas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fixed_order, "PADDINGS", ())
    fixed_order._padding.cache_clear()
    yield
    fixed_order._padding.cache_clear()


@pytest.mark.strict
@pytest.mark.usefixtures("unknown_blas")
def test_a_blas_with_another_order_is_not_used_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    a, b = numbers(20, 200, 1), numbers(200, 30, 2)
    with caplog.at_level(logging.WARNING, logger="ottava"):
        whole = matmul(a, b)
        assert torch.equal(whole, torch.cat([matmul(a, part) for part in b.chunk(3, 1)], 1))
    assert len(caplog.records) == 1
    assert "order of its own" in caplog.text
    torch.testing.assert_close(whole.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_other_instructions_keep_all_of_this() -> None:
    """The strict tests above, with MKL's code for any CPU and with torch's for no vectors; all at once, a few seconds each."""
    settings = ({"MKL_CBWR": "COMPATIBLE"}, {"ATEN_CPU_CAPABILITY": "default"})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "strict", "-p", "no:cacheprovider", __file__]
    children = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | setting, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for setting in settings
    ]
    for setting, child in zip(settings, children):
        output, _ = child.communicate(timeout=200)
        assert child.returncode == 0, f"{setting}: {output.decode()}"
