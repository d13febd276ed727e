"""FusedAdam on DTensor parameters: arithmetic on the local part, state placed as the parameter is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ottava import recipe
from ottava.optimizers import FusedAdam
from ottava.quant.quantizer import quantize
from ottava.quant.tensor import QuantizedTensor


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_parameter_steps_as_a_plain_one(mesh: DeviceMesh) -> None:
    values, grads = torch.randn(8, 4), torch.randn(3, 8, 4)
    sharded = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    plain = nn.Parameter(values.clone())
    a, b = FusedAdam([sharded], lr=1e-2), FusedAdam([plain], lr=1e-2)
    for grad in grads:
        sharded.grad = distribute_tensor(grad, mesh, [Shard(0)])
        plain.grad = grad
        a.step()
        b.step()
    assert torch.equal(sharded.full_tensor(), plain)
    state = a.state[sharded]
    assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == sharded.placements
    assert torch.equal(state["exp_avg"].full_tensor(), b.state[plain]["exp_avg"])


def test_masters_of_sharded_parameters_are_sharded(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.randn(8, 4).bfloat16(), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.randn(8, 4).bfloat16(), mesh, [Shard(0)])
    optimizer = FusedAdam([param], lr=1e-2, master_weights=True)
    optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert isinstance(master, DTensor) and master.dtype == torch.float32
    assert torch.equal(param.full_tensor(), master.full_tensor().bfloat16())
    other = FusedAdam([param], lr=1e-2, master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[param]["master_param"].full_tensor(), master.full_tensor())


def test_a_sharded_weight_stored_in_fp8_is_quantized_again(mesh: DeviceMesh) -> None:
    local = quantize(torch.randn(64, 32).bfloat16(), recipe.Float8CurrentScaling(), role="weight")
    param = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    assert isinstance(param.to_local(), QuantizedTensor)
    master = nn.Parameter(local.dequantize(torch.float32))
    optimizer, reference = FusedAdam([param], lr=1e-2), FusedAdam([master], lr=1e-2)
    grad = torch.randn(64, 32).bfloat16()
    param.grad, master.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad.float()
    optimizer.step()
    reference.step()
    assert torch.equal(optimizer.state[param]["master_param"].full_tensor(), master)
    expected = quantize(master.detach(), recipe.Float8CurrentScaling(), role="weight")
    with torch.no_grad():
        assert torch.equal(param.to_local().rowwise_data, expected.rowwise_data)


def test_scaled_moments_of_a_sharded_parameter_are_refused(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"sharded.*use float32 or bfloat16 moments"):
        FusedAdam([param], exp_avg_dtype=torch.uint8)
