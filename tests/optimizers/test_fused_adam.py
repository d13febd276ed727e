"""FusedAdam against torch.optim, and against float64 where torch.optim has no such thing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava import recipe
from ottava.optimizers import FusedAdam
from ottava.optimizers.moments import MomentFormat
from ottava.quant.tensor import QuantizedTensor

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RECIPES = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
]
SHAPES = [(), (3,), (17, 5), (4, 3, 2)]


def recipe_name(r: Any) -> str:
    return type(r).__name__


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, attribute: str = "grad", dtype: Any = None) -> None:
    """Gradients of very different sizes, the same for every call with the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator) * 10.0 ** (-2 * i)
        setattr(p, attribute, grad.to(p.device, dtype or p.dtype))


def train(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 20, **kwargs: Any) -> list[Tensor]:
    params = parameters(**kwargs)
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance in float32 steps."""
    step = torch.nextafter(b.abs(), torch.tensor(float("inf"), device=b.device)) - b.abs()
    return int(((a.double() - b.double()).abs() / step.double()).max())


def quantized_linear(r: recipe.Recipe, preserve: bool = False, features: int = 64) -> ottava.Linear:
    with ottava.quantized_model_init(recipe=r, preserve_high_precision_init_val=preserve):
        return ottava.Linear(features, features, bias=False, params_dtype=torch.bfloat16, device="cpu")


# -------------------------------------------------------------------------------------------------------------- float32


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_torchs_adam_over_20_steps(device: str, adam_w_mode: bool, weight_decay: float) -> None:
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": weight_decay}
    ours = train(lambda p: FusedAdam(p, adam_w_mode=adam_w_mode, **options), device=device)
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    # On a GPU torch itself differs between its fused and its plain form by more than we may.
    fused = {"fused": True} if device == "cuda" else {"foreach": False}
    theirs = train(lambda p: reference(p, **options, **fused), device=device)
    assert max(ulps(a, b) for a, b in zip(ours, theirs, strict=True)) <= 2


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


# ---------------------------------------------------------------------------------------------- masters of bf16 and fp16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_masters_follow_float32_training_and_parameters_are_their_rounding(device: str, dtype: torch.dtype) -> None:
    params = parameters(dtype, device)
    optimizer = FusedAdam(params, lr=1e-4, master_weights=True)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, **({"fused": True} if device == "cuda" else {}))
    for step in range(10):
        set_gradients(params, step)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, master in zip(params, masters, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], master)
        assert torch.equal(p, master.to(dtype))


def test_a_small_update_is_lost_in_bf16_and_kept_by_a_master() -> None:
    def run(master_weights: bool) -> float:
        param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = FusedAdam([param], lr=1e-4, master_weights=master_weights)
        for _ in range(60):
            param.grad = torch.ones(1, dtype=torch.bfloat16)
            optimizer.step()
        return param.item()

    assert run(master_weights=False) == 1.0
    assert run(master_weights=True) < 1.0


def test_remainders_are_the_master_in_half_the_space() -> None:
    whole, halves = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a = FusedAdam(whole, lr=1e-3, master_weights=True)
    b = FusedAdam(halves, lr=1e-3, master_weights=True, store_param_remainders=True)
    for step in range(10):
        set_gradients(whole, step)
        set_gradients(halves, step)
        a.step()
        b.step()
    for p, q in zip(whole, halves, strict=True):
        assert b.state[q]["master_param"].dtype == torch.int16
        assert torch.equal(a.state[p]["master_param"], b.get_unscaled_state(q, "master_param"))
        # The two roundings to bf16 differ on exact ties only.
        assert ((p.float() - q.float()).abs() <= p.float().abs() * 2.0**-7).all()


# ---------------------------------------------------------------------------------------------------------- FP8 storage


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_fp8_storage_is_the_quantization_of_a_float32_master(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    weight = layer.weight
    assert isinstance(weight, QuantizedTensor)
    optimizer = FusedAdam(layer.parameters(), lr=1e-3)
    master = nn.Parameter(weight.dequantize(torch.float32))
    reference = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.0, foreach=False)
    before = weight.dequantize().clone()
    for _ in range(5):
        weight.grad = torch.randn(64, 64, dtype=torch.bfloat16)
        master.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.state[weight]["master_param"], master)
    expected = weight.detach().clone()
    expected.copy_(master.detach())
    assert torch.equal(weight.rowwise_data, expected.rowwise_data)
    assert torch.equal(weight.rowwise_scale_inv, expected.rowwise_scale_inv)
    assert torch.equal(weight.columnwise_data, expected.columnwise_data)
    assert not torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_a_layer_stored_in_fp8_learns(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x, target = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with ottava.autocast(recipe=r):
            loss = ((layer(x) - target).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_masters_start_from_the_preserved_value_and_free_it() -> None:
    layer = quantized_linear(recipe.Float8CurrentScaling(), preserve=True)
    initial = layer.weight.get_high_precision_init_val()
    layer.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
    optimizer = FusedAdam(layer.parameters())
    optimizer.step()
    master = optimizer.state[layer.weight]["master_param"]
    assert torch.equal(master, initial.float())
    assert not torch.equal(master, layer.weight.dequantize(torch.float32))
    assert layer.weight.get_high_precision_init_val() is None


def test_a_preserved_value_is_not_used_once_the_weight_was_changed() -> None:
    layer = quantized_linear(recipe.Float8CurrentScaling(), preserve=True)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64))
    layer.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
    now = layer.weight.dequantize(torch.float32)
    optimizer = FusedAdam(layer.parameters())
    optimizer.step()
    assert torch.equal(optimizer.state[layer.weight]["master_param"], now)


def test_masters_can_be_seeded_by_hand_as_transformer_engine_scripts_do() -> None:
    layer = quantized_linear(recipe.DelayedScaling(), preserve=True)
    optimizer = FusedAdam(layer.parameters(), master_weights=True)
    optimizer.initialize_state(layer.weight, store_param_remainders=False)
    value = layer.weight.get_high_precision_init_val()
    assert value is not None
    optimizer.set_scaled_state(layer.weight, "master_param", 2 * value.float())
    layer.weight.clear_high_precision_init_val()
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), 2 * value.float())
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_stock_optimizer_on_fp8_storage_raises_instead_of_doing_nothing(kind: Any, options: dict) -> None:
    layer = quantized_linear(recipe.Float8BlockScaling())
    optimizer = kind(layer.parameters(), lr=1e-3, **options)
    layer.weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
    before = layer.weight.rowwise_data.clone()
    with pytest.raises((ValueError, RuntimeError), match=r"copy_|QuantizedTensor"):
        optimizer.step()
    assert torch.equal(layer.weight.rowwise_data, before)


# --------------------------------------------------------------------------------------------------- moments in fewer bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float8_e5m2], ids=str)
def test_moments_are_stored_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=1e-3, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    set_gradients(params, 0)
    optimizer.step()
    fp8 = dtype in (torch.uint8, torch.float8_e5m2)
    for p in params:
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == (torch.uint8 if fp8 else dtype)
        for name, exact in (("exp_avg", 0.1 * p.grad), ("exp_avg_sq", 0.001 * p.grad**2)):
            got = optimizer.get_unscaled_state(p, name)
            epsilon = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.uint8: 2**-4}.get(dtype, 2**-3)
            floor = exact.abs().max() * 2.0**-17  # below it a format's values are subnormal
            assert ((got - exact).abs() <= exact.abs() * epsilon * 1.01 + floor).all()


def test_fp8_moments_follow_the_current_scaling_rule_to_the_byte() -> None:
    param = nn.Parameter(torch.randn(32, 48))
    param.grad = torch.randn(32, 48)
    optimizer = FusedAdam([param], exp_avg_dtype=torch.uint8)
    optimizer.step()
    exact = torch.zeros(32, 48).lerp_(param.grad, 1 - 0.9)
    expected = ottava.quantize(exact, recipe.Float8CurrentScaling(), role="input", columnwise=False)
    assert torch.equal(optimizer.state[param]["exp_avg"], expected.rowwise_data)
    assert torch.equal(optimizer.state[param]["exp_avg_scale_inv"], expected.rowwise_scale_inv)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e5m2, torch.float16], ids=str)
def test_a_positive_second_moment_never_becomes_zero(dtype: torch.dtype) -> None:
    # Zero would divide by eps alone: a step of 1e5 instead of 1e-3.
    param = nn.Parameter(torch.zeros(4))
    optimizer = FusedAdam([param], lr=1e-3, exp_avg_sq_dtype=dtype)
    for _ in range(3):
        param.grad = torch.tensor([1.0, 1e-4, 1e-6, 0.0])
        optimizer.step()
    stored = optimizer.get_unscaled_state(param, "exp_avg_sq")
    assert (stored[:3] > 0).all() and stored[3] == 0
    assert param.abs().max() < 4e-3


def test_moments_in_bfloat16_and_float16_train_as_float32_does() -> None:
    exact = train(lambda p: FusedAdam(p, lr=1e-3, betas=(0.9, 0.95)), steps=50)
    for dtype in (torch.bfloat16, torch.float16):
        make = lambda p, d=dtype: FusedAdam(p, lr=1e-3, betas=(0.9, 0.95), exp_avg_dtype=d, exp_avg_sq_dtype=d)  # noqa: E731
        for a, b in zip(train(make, steps=50), exact, strict=True):
            assert (a - b).abs().max() < 1e-3  # one step of fifty


@pytest.mark.parametrize(
    "dtype, slow, fast",
    [(torch.float16, 1.00, 1.0), (torch.bfloat16, 1.46, 1.0), (torch.uint8, 0.87, 1.0), (torch.float8_e5m2, 1.30, 1.1)],
    ids=str,
)
def test_drift_of_the_second_moment_is_what_the_docs_say(dtype: torch.dtype, slow: float, fast: float) -> None:
    """slow, fast: the median ratio to float32 after 4,000 steps with beta2 = 0.999 and 0.95."""

    def moment(kept: torch.dtype, beta2: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.zeros(512))
        optimizer = FusedAdam([param], lr=0.0, betas=(0.9, beta2), exp_avg_sq_dtype=kept)
        for _ in range(4000):
            param.grad = torch.randn(512, generator=generator) * torch.logspace(-2, 0, 512)
            optimizer.step()
        return optimizer.get_unscaled_state(param, "exp_avg_sq")

    for beta2, expected in ((0.999, slow), (0.95, fast)):
        ratio = (moment(dtype, beta2) / moment(torch.float32, beta2)).median().item()
        assert abs(ratio - expected) < 0.05, ratio


def test_an_empty_tensor_and_nan_pass_through_every_format() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        form = MomentFormat.of(dtype, "dtype")
        for value in (torch.zeros(0, 4), torch.tensor([[1.0, float("nan"), -2.0]])):
            stored, scale_inv = form.zeros(value.shape, value.device)
            form.encode_(value, stored, scale_inv)
            torch.testing.assert_close(form.decode(stored, scale_inv), value, equal_nan=True)


# ------------------------------------------------------------------------------------------------------------- gradients


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


# ---------------------------------------------------------------------------------------------------------- state dict

SAVED = [
    {},
    {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float8_e5m2},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"capturable": True},
]


@pytest.mark.parametrize("options", SAVED, ids=str)
def test_state_round_trips_bit_for_bit_through_a_file(options: dict) -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-2, **options)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"params": [p.data for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for state in loaded["optimizer"]["state"].values():
        assert all(type(value) is Tensor for value in state.values())
        assert isinstance(state["step"], Tensor)

    resumed = [nn.Parameter(p) for p in loaded["params"]]
    other = FusedAdam(resumed, lr=1.0, **options)
    other.load_state_dict(loaded["optimizer"])
    for p, q in zip(params, resumed, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for name, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name
    for step in range(3, 6):
        for ps, o in ((params, optimizer), (resumed, other)):
            set_gradients(ps, step)
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_fp8_storage_resumes_bit_for_bit(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    optimizer = FusedAdam(layer.parameters(), exp_avg_dtype=torch.uint8)
    gradients = torch.randn(4, 64, 64).bfloat16()
    for grad in gradients[:2]:
        layer.weight.grad = grad
        optimizer.step()
    twin = quantized_linear(r)
    twin.load_state_dict(layer.state_dict())
    resumed = FusedAdam(twin.parameters(), exp_avg_dtype=torch.uint8)
    resumed.load_state_dict(optimizer.state_dict())
    for model, o in ((layer, optimizer), (twin, resumed)):
        for grad in gradients[2:]:
            model.weight.grad = grad
            o.step()
    assert torch.equal(layer.weight.rowwise_data, twin.weight.rowwise_data)
    assert torch.equal(optimizer.state[layer.weight]["master_param"], resumed.state[twin.weight]["master_param"])


def test_loaded_state_does_not_share_memory_with_the_dict() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = FusedAdam(parameters())
    other.load_state_dict(saved)
    saved["state"][0]["exp_avg"].fill_(7.0)
    assert other.state[other.param_groups[0]["params"][0]]["exp_avg"].max() != 7.0


def test_state_of_torchs_adamw_loads() -> None:
    params, ours = parameters(), parameters()
    reference = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, foreach=False)
    for step in range(3):
        set_gradients(params, step)
        reference.step()
    for p, q in zip(params, ours, strict=True):
        q.data.copy_(p.data)
    optimizer = FusedAdam(ours)
    optimizer.load_state_dict(reference.state_dict())
    for ps, o in ((params, reference), (ours, optimizer)):
        set_gradients(ps, 3)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, ours, strict=True))


def test_a_step_count_kept_by_the_group_loads() -> None:
    # TransformerEngine's state dict: one count a group, none in the state.
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 12
    optimizer.load_state_dict(saved)
    assert all(optimizer.state[p]["step"].item() == 12 for p in params)


def test_moments_saved_in_another_dtype_are_converted() -> None:
    params = parameters()
    optimizer = FusedAdam(params, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16)
    set_gradients(params, 0)
    optimizer.step()
    other = FusedAdam(parameters())
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, other.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert other.state[q][name].dtype == torch.float32
            assert torch.equal(other.state[q][name], optimizer.get_unscaled_state(p, name))


def test_hooks_around_loading_see_the_whole_dict_and_the_loaded_state() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    other, seen = FusedAdam(parameters()), []

    def double_first(_: Any, saved: dict) -> dict:
        saved = copy.deepcopy(saved)
        saved["state"][0]["exp_avg"].mul_(2)
        return saved

    other.register_load_state_dict_pre_hook(double_first)
    other.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    other.load_state_dict(optimizer.state_dict())
    first = other.param_groups[0]["params"][0]
    assert seen == [len(params)]
    assert torch.equal(other.state[first]["exp_avg"], 2 * optimizer.state[params[0]]["exp_avg"])


def test_a_copy_of_the_optimizer_keeps_its_options() -> None:
    optimizer = FusedAdam(parameters(torch.bfloat16), master_weights=True, adam_w_mode=False)
    assert copy.deepcopy(optimizer).options == optimizer.options


# --------------------------------------------------------------------------------------------------------------- refused


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
