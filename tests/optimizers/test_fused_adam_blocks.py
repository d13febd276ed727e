"""Moments in FP8 blocks, stochastic rounding, gradients of another type, and a factor instead of a pass over the gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optimizers.adam_cases import parameters, set_gradients, train
from ottava import torch_private
from ottava.optimizers import FusedAdam
from ottava.optimizers.masters import Place

BLOCKS: dict[str, Any] = {"exp_avg_dtype": "float8_block128", "exp_avg_sq_dtype": "float8_block128"}


def test_matrices_have_bytes_and_scales_and_vectors_stay_float32() -> None:
    params = [nn.Parameter(torch.randn(3, 300)), nn.Parameter(torch.randn(300))]
    optimizer = FusedAdam(params, **BLOCKS)
    set_gradients(params, 0)
    optimizer.step()
    matrix, vector = (optimizer.state[p] for p in params)
    for name in ("exp_avg", "exp_avg_sq"):
        assert matrix[name].dtype == torch.uint8 and matrix[f"{name}_scale_inv"].shape == (3, 3)
        assert vector[name].dtype == torch.float32 and f"{name}_scale_inv" not in vector
    assert optimizer.param_groups[0]["exp_avg_sq_dtype"] == "float8_root_block128"
    got = optimizer.get_unscaled_state(params[0], "exp_avg_sq")
    assert ((got - 0.001 * params[0].grad ** 2).abs() <= 0.07 * got + 1e-12).all()


def test_moments_in_blocks_train_as_float32_does() -> None:
    """Also where one row's gradients are a millionth of another's, which one scale a tensor would lose."""

    def run(**options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        goal = torch.randn(4, 200, generator=generator)
        sizes = torch.tensor([[1.0], [1e-2], [1e-4], [1e-6]])
        param = nn.Parameter(torch.zeros(4, 200))
        optimizer = FusedAdam([param], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, **options)
        for _ in range(300):
            noise = 1 + 0.5 * torch.randn(4, 200, generator=generator)
            param.grad = (param.detach() - goal) * sizes * noise
            optimizer.step()
        return (param.detach() - goal).square().mean(1)

    exact, blocks, random = run(), run(**BLOCKS), run(**BLOCKS, stochastic_rounding=True)
    assert (exact < 0.05).all()
    assert (blocks < exact + 0.01).all() and (random < exact + 0.01).all()


def test_state_in_blocks_comes_back_bit_for_bit_and_converts() -> None:
    params = [nn.Parameter(torch.randn(3, 200)), nn.Parameter(torch.randn(5))]
    source = FusedAdam(params, lr=1e-2, **BLOCKS)
    for step in range(2):
        set_gradients(params, step)
        source.step()
    same, plain = FusedAdam(params, **BLOCKS), FusedAdam(params)
    same.load_state_dict(source.state_dict())
    plain.load_state_dict(source.state_dict())
    for p in params:
        for name, value in source.state[p].items():
            assert torch.equal(same.state[p][name], value), name
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(plain.state[p][name], source.get_unscaled_state(p, name))
            assert f"{name}_scale_inv" not in plain.state[p]
    back = FusedAdam(params, **BLOCKS)
    back.load_state_dict(plain.state_dict())
    assert (back.state[params[0]]["exp_avg"].int() - source.state[params[0]]["exp_avg"].int()).abs().max() <= 1


def test_an_unknown_word_for_a_moment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exp_avg_dtype must be one of .*'float8_block128', got 'float7'"):
        FusedAdam(parameters(), exp_avg_dtype="float7")
    with pytest.raises(ValueError, match="exp_avg_dtype must be one of"):
        FusedAdam(parameters(), exp_avg_dtype="float8_root_block128")  # has no sign


def test_a_shard_that_cuts_a_block_is_refused_by_name() -> None:
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def param(*shape: int) -> nn.Parameter:
            part = distribute_tensor(torch.zeros(shape), mesh, [Shard(1)], src_data_rank=None)
            return nn.Parameter(part)

        fits, cut = param(4, 512), param(4, 192)
        optimizer = FusedAdam([fits, cut], **BLOCKS)
        optimizer.initialize_state(fits)
        scales = optimizer.state[fits]["exp_avg_scale_inv"]
        assert isinstance(scales, DTensor) and scales.shape == (4, 4) and scales.to_local().shape == (4, 2)
        with pytest.raises(
            ValueError, match=r"\(4, 192\) is cut to \(4, 96\) at \(0, 96\).*blocks of 128.*use a tensor-parallel size"
        ):
            optimizer.initialize_state(cut)
        assert Place.of(fits) == Place(256, 256, 512)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ stochastic rounding


def test_small_steps_of_a_bfloat16_parameter_add_up_on_average() -> None:
    def end(**options: Any) -> float:
        param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = FusedAdam([param], lr=1e-4, **options)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.float().mean().item()

    assert end() == 1.0  # every step is less than half of the last digit
    assert end(stochastic_rounding=True) == pytest.approx(0.99, abs=5e-4)


def test_the_second_moment_drifts_without_stochastic_rounding_and_not_with_it() -> None:
    """docs/optimizers.md; with beta2 = 0.999 a step changes less than the last digit."""

    def moment(**options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.zeros(2, 128))
        optimizer = FusedAdam([param], lr=0.0, betas=(0.9, 0.999), **options)
        for _ in range(1500):
            param.grad = torch.randn(2, 128, generator=generator)
            optimizer.step()
        return optimizer.get_unscaled_state(param, "exp_avg_sq")

    exact = moment()
    nearest, random = ((moment(**BLOCKS, stochastic_rounding=s) / exact).median().item() for s in (False, True))
    assert abs(random - 1) < 0.05 < 0.1 < abs(nearest - 1)


def test_the_same_seed_repeats_and_another_does_not() -> None:
    def run(seed: int) -> list[Tensor]:
        return train(
            lambda p: FusedAdam(p, stochastic_rounding=True, seed=seed, exp_avg_dtype=torch.bfloat16),
            dtype=torch.bfloat16,
        )

    first, second, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_place_counts_elements_of_the_whole() -> None:
    whole = torch.arange(6 * 8).view(6, 8)
    rows = Place(base=16).index(torch.Size((2, 8)), torch.device("cpu"))
    assert torch.equal(rows, whole[2:4])
    columns = Place(base=4 + 8, columns=4, stride=8).index(torch.Size((3, 4)), torch.device("cpu"))
    assert torch.equal(columns, whole[1:4, 4:])


def test_float16_parameters_without_masters_are_not_rounded_at_random() -> None:
    with pytest.raises(ValueError, match="is float16, to which stochastic_rounding does not round"):
        FusedAdam([nn.Parameter(torch.ones(2, dtype=torch.float16))], stochastic_rounding=True)


# ------------------------------------------------------------------------------------------------------------------- gradients


def test_a_bfloat16_gradient_of_a_float32_parameter_is_taken() -> None:
    params, exact = parameters(), parameters()
    a, b = FusedAdam(params, lr=1e-2), FusedAdam(exact, lr=1e-2)
    for step in range(3):
        set_gradients(exact, step)
        for p, q in zip(params, exact, strict=True):
            p.grad_dtype = torch.bfloat16
            p.grad = q.grad.bfloat16()
            q.grad = q.grad.bfloat16().float()
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(params, exact, strict=True))


def test_a_step_keeps_no_gradient_alive() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param])
    for _ in range(2):
        param.grad = torch.ones(4)
        held = weakref.ref(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert held() is None


def test_state_and_parameters_in_new_memory_are_found() -> None:
    params, wanted = parameters(), parameters()
    a, b = FusedAdam(params, lr=1e-2), FusedAdam(wanted, lr=1e-2)
    for step in range(4):
        set_gradients(params, step)
        set_gradients(wanted, step)
        if step == 2:
            params[2].data = params[2].data.clone()
            a.state[params[3]]["exp_avg"] = a.state[params[3]]["exp_avg"].clone()
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(params, wanted, strict=True))


def test_a_factor_clips_as_scaling_the_gradients_does_and_leaves_them() -> None:
    params, scaled = parameters(), parameters()
    a, b = FusedAdam(params, lr=1e-2), FusedAdam(scaled, lr=1e-2)
    factor = torch.tensor(0.3)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(scaled, step)
        before = [p.grad.clone() for p in params]
        for p in scaled:
            p.grad.mul_(factor)
        a.step(grad_scale=factor)
        b.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(params, scaled, strict=True))
    with pytest.raises(ValueError, match="grad_scale must be one number"):
        a.step(grad_scale=torch.ones(2))
