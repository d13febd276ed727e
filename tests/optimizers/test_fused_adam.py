"""FusedAdam on plain parameters is torch's Adam; gradients from elsewhere; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from optimizers.adam_cases import (
    DEVICES,
    parameters,
    set_gradients,
    train,
    ulps,
)
from ottava.optimizers import FusedAdam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_torchs_adam_over_20_steps(device: str, adam_w_mode: bool, weight_decay: float) -> None:
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": weight_decay}
    ours = train(lambda p: FusedAdam(p, adam_w_mode=adam_w_mode, **options), device=device)
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    # torch itself differs between its forms on a GPU by more than we may: our kernel does what the plain one does on a CPU.
    theirs = train(lambda p: reference(p, **options, foreach=False), device="cpu")
    if device == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        # A CPU's float32 root is not always the nearest: each of 20 steps of 3e-3 may be off by its last digit.
        torch.testing.assert_close(a.cpu(), b, rtol=2.0**-22, atol=20 * 2.0**-23 * 3e-3)


def test_positional_arguments_are_in_the_order_of_torch_and_transformer_engine() -> None:
    ours = train(lambda p: FusedAdam(p, 3e-3, (0.8, 0.95), 1e-7, 0.1))
    theirs = train(lambda p: torch.optim.AdamW(p, 3e-3, (0.8, 0.95), 1e-7, 0.1, foreach=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_bias_correction_the_moments_are_taken_as_they_are() -> None:
    start = parameters()
    ours = train(lambda p: FusedAdam(p, lr=1e-2, bias_correction=False), steps=3)
    for i, got in enumerate(ours):
        value, m, v = start[i].detach().double(), torch.zeros(()), torch.zeros(())
        for step in range(3):
            set_gradients(start, step)
            grad = start[i].grad.double()
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            value = value - 1e-2 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-6)


def test_steps_are_counted_without_bias_correction_too() -> None:
    params = parameters()
    optimizer = FusedAdam(params, bias_correction=False)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert all(optimizer.state[p]["step"].item() == 3 for p in params)


@pytest.mark.parametrize("device", DEVICES)
def test_lr_may_be_a_tensor_and_capturable_makes_it_one(device: str) -> None:
    plain = train(lambda p: FusedAdam(p, lr=2.0**-7), device=device)
    tensor = train(lambda p: FusedAdam(p, lr=torch.tensor(2.0**-7)), device=device)
    captured = []

    def capturable(params: list[nn.Parameter]) -> FusedAdam:
        captured.append(FusedAdam(params, lr=2.0**-7, capturable=True))
        return captured[0]

    on_device = train(capturable, device=device)
    assert isinstance(captured[0].param_groups[0]["lr"], Tensor)
    assert captured[0].param_groups[0]["lr"].device.type == device
    assert all(s["step"].device.type == device for s in captured[0].state.values())
    for a, b, c in zip(plain, tensor, on_device, strict=True):
        assert ulps(a, b) <= 2 and ulps(a, c) <= 2


if torch.cuda.is_available():  # CUDA graphs exist there only

    def test_a_capturable_step_replays_in_a_cuda_graph() -> None:
        def run(graphed: bool) -> list[Tensor]:
            params = parameters(device="cuda")
            optimizer = FusedAdam(params, lr=1e-2, capturable=True)
            set_gradients(params, 0)
            optimizer.step()
            graph = torch.cuda.CUDAGraph()
            if graphed:
                with torch.cuda.graph(graph):
                    optimizer.step()
            for _ in range(3):
                graph.replay() if graphed else optimizer.step()
            return [p.detach().clone() for p in params]

        assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_parameters_without_a_gradient_do_not_move_and_have_no_state() -> None:
    params = parameters()
    before = params[0].detach().clone()
    optimizer = FusedAdam(params, weight_decay=0.1)
    set_gradients(params, 0)
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state


def test_groups_have_their_own_options() -> None:
    def make(params: list[nn.Parameter], kind: Any, **options: Any) -> Any:
        optimizer = kind([{"params": params[:2], "lr": 1e-2}, {"params": params[2:3], "weight_decay": 0.5}], **options)
        optimizer.add_param_group({"params": params[3:], "betas": (0.5, 0.5)})
        return optimizer

    ours = train(lambda p: make(p, FusedAdam))
    theirs = train(lambda p: make(p, torch.optim.AdamW, weight_decay=0.0, foreach=False))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_non_contiguous_parameter_is_updated_like_any_other() -> None:
    def run(kind: Any) -> Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(8, 6).t())
        optimizer = kind([param], lr=1e-2)
        for _ in range(3):
            param.grad = torch.randn(6, 8)
            optimizer.step()
        return param.detach()

    assert torch.equal(run(FusedAdam), run(lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.0, foreach=False)))


def test_many_small_batches_give_what_one_batch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda p: FusedAdam(p, exp_avg_dtype=torch.bfloat16)  # noqa: E731
    together = train(make, dtype=torch.bfloat16)
    monkeypatch.setattr("ottava.optimizers.adam_update.TEMPORARY_ELEMENTS", 7)
    assert all(torch.equal(a, b) for a, b in zip(together, train(make, dtype=torch.bfloat16), strict=True))


def test_step_runs_the_closure_with_gradients_on_and_returns_its_loss() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert optimizer.step(closure).item() < 4.0


def test_a_learning_rate_scheduler_drives_it() -> None:
    def run(kind: Any, **options: Any) -> Tensor:
        param = nn.Parameter(torch.ones(4))
        optimizer = kind([param], lr=0.1, weight_decay=0.0, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        for _ in range(5):
            param.grad = param.detach().clone()
            optimizer.step()
            scheduler.step()
        return param.detach()

    assert torch.equal(run(FusedAdam), run(torch.optim.AdamW, foreach=False))
    torch.testing.assert_close(run(FusedAdam, capturable=True), run(torch.optim.AdamW, foreach=False))


def test_gradient_scaler_unscales_and_skips_overflow() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((param * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(4))
    optimizer.zero_grad()
    scaler.scale((param**2).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.9))


def test_decoupled_gradients_may_have_another_dtype() -> None:
    params, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    decoupled = FusedAdam(params, master_weights=True, use_decoupled_grad=True)
    coupled = FusedAdam(plain, master_weights=True)
    for step in range(3):
        set_gradients(params, step, "decoupled_grad", torch.float32)
        set_gradients(plain, step)
        for p, q in zip(params, plain, strict=True):
            p.decoupled_grad = q.grad.float()
        decoupled.step()
        coupled.step()
    assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))
    decoupled.zero_grad()
    assert all(p.decoupled_grad is None for p in params)


def test_gradients_accumulated_into_main_grad_are_used_and_zeroed() -> None:
    layer = ottava.Linear(32, 32, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cpu")
    layer.weight.main_grad = torch.zeros(32, 32)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2, master_weights=True, use_decoupled_grad=True)
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))  # weight and bias
    optimizer.zero_grad()
    assert layer.weight.main_grad.abs().max() == 0
    assert layer.bias.grad is None


def test_a_gradient_that_went_to_main_grad_is_not_silently_ignored() -> None:
    layer = ottava.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(32, 32)
    optimizer = FusedAdam(layer.parameters())
    layer(torch.randn(8, 32)).sum().backward()
    with pytest.raises(ValueError, match="use_decoupled_grad=True"):
        optimizer.step()


def test_zero_grad_drops_or_zeroes() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert param.grad is None
    with pytest.raises(ValueError, match="set_grad_none"):
        FusedAdam([param], set_grad_none=True).zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "AMSGrad"),
        ({"master_weight_dtype": torch.float16, "master_weights": True}, "masters are float32"),
        ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype must be one of"),
        ({"exp_avg_sq_dtype": torch.int8}, "exp_avg_sq_dtype must be one of"),
        ({"store_param_remainders": True}, "needs master_weights=True"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ],
)
def test_options_it_does_not_have_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"parameter 1 of group 0 must be float32.*got {dtype}"):
        FusedAdam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))])


def test_a_refused_group_is_not_half_added() -> None:
    optimizer = FusedAdam(parameters())
    with pytest.raises(ValueError, match="group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def test_sparse_and_misshapen_gradients_are_refused() -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    optimizer = FusedAdam(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    param = nn.Parameter(torch.ones(2))
    param.decoupled_grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\) for a parameter of shape \(2,\)"):
        FusedAdam([param], use_decoupled_grad=True).step()


def test_a_grad_scaler_argument_and_foreign_state_are_refused() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    with pytest.raises(ValueError, match=r"grad_scaler.step\(optimizer\)"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    sgd = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    set_gradients(sgd.param_groups[0]["params"], 0)
    sgd.step()
    with pytest.raises(ValueError, match="not Adam's"):
        optimizer.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="no master"):
        optimizer.set_scaled_state(params[1], "master_param", torch.ones(3))
