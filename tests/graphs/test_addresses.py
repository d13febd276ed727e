"""`Addresses` sees every way in which a tensor of a module can come to lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ottava
from ottava import recipe
from ottava.graphs.addresses import Addresses


def _move_data(module: ottava.Linear) -> None:
    module.weight.data = module.weight.data.clone()


def _replace_buffer(module: ottava.Linear) -> None:
    module.delayed.fwd_scale = module.delayed.fwd_scale.clone()


def _remove_parameter(module: ottava.Linear) -> None:
    del module._parameters["bias"]


def _set_to_none(module: ottava.Linear) -> None:
    module._parameters["bias"] = None


def _quantize(module: ottava.Linear) -> None:
    with ottava.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        module._parameters["weight"] = ottava.Linear(128, 128, device="cpu").weight


@pytest.mark.parametrize("change", [_move_data, _replace_buffer, _remove_parameter, _set_to_none, _quantize])
def test_a_tensor_that_lies_elsewhere_is_seen(change: Callable[[ottava.Linear], None]) -> None:
    module = ottava.Linear(128, 128, device="cpu")
    lies_at = Addresses(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert lies_at.hold()
    change(module)
    assert not lies_at.hold()


def test_stored_weights_that_are_replaced_are_seen() -> None:
    with ottava.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        module, other = (ottava.Linear(128, 128, device="cpu") for _ in range(2))
    lies_at = Addresses(module)
    assert lies_at.hold()
    module._parameters["weight"] = other.weight
    assert not lies_at.hold()
