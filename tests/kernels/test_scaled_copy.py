"""`ottava::scaled_copy`."""

from __future__ import annotations

import pytest
import torch

ops = torch.ops.ottava


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    x, factor = torch.randn(33, 17), torch.tensor(0.3)
    assert torch.equal(ops.scaled_copy(x, factor, dtype), (x * factor).to(dtype))


def test_opcheck() -> None:
    torch.library.opcheck(ops.scaled_copy.default, (torch.randn(3, 5), torch.tensor(2.0), torch.bfloat16))
