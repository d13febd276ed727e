"""Whole training steps by the path of a GPU against those of a CPU: head and loss as one op, copies of weights, the optimizer's kernels."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from gpu import test_fused_adam as adam
from nn.test_default_dtype import trained
from ottava.models import GPT, GPTConfig, Llama, LlamaConfig
from ottava.optimizers import FusedAdam
from pretended_cuda import pretended_cuda
from quant_cases import RECIPES, all_same, casting

STEPS = 2


def losses(model: torch.nn.Module, name: str, lr: float = 2e-3, **options: Any) -> list[float]:
    """Of steps on the same two rows."""
    optimizer = FusedAdam(model.parameters(), lr=lr, **options)
    tokens = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(STEPS):
        with casting(name):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def both(model: torch.nn.Module, name: str, **options: Any) -> tuple[list[float], list[float]]:
    """(of a CPU, of the pretended GPU)."""
    other = copy.deepcopy(model)
    expected = losses(model, name, **options)
    with pretended_cuda():
        return expected, losses(other, name, **options)


def llama(stored: str | None = None, **options: Any) -> Llama:
    config = LlamaConfig(1000, 128, 256, layers=2, heads=4, kv_heads=2, max_length=32, pad_vocab_to=128, **options)
    torch.manual_seed(0)
    with ottava.quantized_model_init(
        enabled=stored is not None, recipe=RECIPES[stored or "current"], preserve_high_precision_init_val=True
    ):
        return Llama(config, device="cpu", params_dtype=torch.bfloat16)


def assert_near(found: list[float], expected: list[float]) -> None:
    assert expected[-1] < expected[0] - 0.2, expected  # it learns
    assert all(math.isclose(a, b, rel_tol=5e-3) for a, b in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "nvfp4"])
def test_a_llama_learns_as_on_a_cpu(name: str) -> None:
    expected, found = both(llama(), name, master_weights=True)
    assert_near(found, expected)


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_stored_weights_learn_as_on_a_cpu(name: str) -> None:
    expected, found = both(llama(stored=name), name)
    assert_near(found, expected)


def test_small_optimizer_states_tied_weights_and_a_gpt() -> None:
    blocks = {"exp_avg_dtype": adam.BLOCKS, "exp_avg_sq_dtype": adam.BLOCKS, "store_param_remainders": True}
    expected, found = both(llama(tie_embeddings=True), "current", master_weights=True, **blocks)
    assert_near(found, expected)
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(1000, 128, 256, layers=2, heads=2, max_length=32), device="cpu", params_dtype=torch.bfloat16)
    expected, found = both(gpt, "delayed", master_weights=True)
    assert_near(found, expected)


@pytest.mark.parametrize("stored", [False, True], ids=["masters", "fp8 storage"])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_the_default_dtype_changes_no_bit(name: str, stored: bool) -> None:
    with pretended_cuda():
        found, expected = (trained(name, stored, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert all_same(found, expected)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """The interpreter does not fuse multiplications and additions, as a GPU and a CPU do: some roundings more of an update, which is of
    LR's size, and then a neighbour among the numbers of 16 and 8 bits."""
    if expected.dtype.itemsize >= 4:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=4 * 2.0**-23 * adam.LR)
    elif expected.numel():
        kind = torch.uint8 if expected.dtype.itemsize == 1 else torch.int16
        assert (found.view(kind).int() - expected.view(kind).int()).abs().max() <= 1


@pytest.mark.parametrize("dtype, grad, first, second, options", adam.COMBINATIONS)
def test_a_step_of_adam_is_that_of_the_cpu(
    dtype: torch.dtype, grad: torch.dtype, first: Any, second: Any, options: dict[str, Any]
) -> None:
    expected, references = adam.run("cpu", dtype, grad, first, second, **options)
    with pretended_cuda():
        actual, states = adam.run("cuda", dtype, grad, first, second, **options)
    for got, want, state, reference in zip(actual, expected, states, references, strict=True):
        assert_close(got, want)
        assert sorted(state) == sorted(reference)
        for name, value in reference.items():
            if value.dtype == torch.int16:
                assert_close(adam.joined(got, state), adam.joined(want, reference))
            else:
                assert_close(state[name], value)
