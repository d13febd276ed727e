"""Modules on a GPU: within the bars of the recordings, close to their CPU selves, compiled, and under `ottava.compat`."""

from __future__ import annotations

import copy
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ottava
from make_golden import ROW_STEP
from ottava import recipe
from ottava.kernels import residual, rope
from ottava.quant.delayed import DelayedState
from quant_cases import RECIPES, casting, relative

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def load(path: str):
    """A test module of another folder, for its cases and bars."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "tests" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recorded_modules = functools.cache(lambda: load("nn/test_recorded_modules.py"))


@pytest.mark.parametrize(
    "name", ["linear", "linear_nobias", "lnlinear_ln", "lnlinear_rms", "lnmlp_gelu", "lnmlp_swiglu"]
)
def test_recorded_modules_within_their_bars(name):
    cases = recorded_modules()
    for scheme, chosen in cases.RECIPES.items():
        module = cases.build(name).cuda()
        bar, weight_bar = cases.UNQUANTIZED_BARS if scheme == "none" else cases.BARS[name.split("_")[0]]
        for step in range(3):
            module.zero_grad()
            x = cases.recorded()[f"{name}/x{step}"].cuda().requires_grad_()
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                y = module(x)
            y.backward(cases.recorded()[f"{name}/dy{step}"].cuda())
            if "delayed" in scheme:
                state = copy.deepcopy(module).cpu()
                cases.check_state(state, name, f"{name}/{scheme}/scaling_{{direction}}/{{what}}_after{step}")
            if step != 1:
                for got, what in ((y, "y"), (x.grad, "dx")):
                    want = cases.recorded()[f"{name}/{scheme}/{what}{step}"]
                    error = relative(got.reshape(-1, got.shape[-1])[::ROW_STEP].cpu(), want)
                    assert error < bar, (scheme, what, step, error)
        for key, parameter in module.named_parameters():
            got = parameter.grad[::ROW_STEP] if parameter.dim() == 2 else parameter.grad
            error = relative(got.cpu(), cases.recorded()[f"{name}/{scheme}/grad/{key}"])
            assert error < weight_bar, (scheme, key, error)


def layer(device: str, **options) -> ottava.TransformerLayer:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16, **options}
    return ottava.TransformerLayer(256, 512, 4, device=device, **options)


LLAMA = {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", [*RECIPES, "hybrid"])
def test_a_layer_is_close_to_itself_on_the_cpu(name, options):
    others = {
        "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
        "hybrid": recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()),
    }
    chosen = others[name] if name in others else RECIPES[name]
    here, there = layer("cpu", **options), layer("cpu", **options).cuda()
    there.load_state_dict(here.state_dict())
    angles = ottava.attention.RotaryPositionEmbedding(64, device="cpu")(64)
    for step in range(2):
        torch.manual_seed(step)
        x, dy = torch.randn(64, 2, 256).bfloat16(), torch.randn(64, 2, 256).bfloat16()
        results = []
        for module, device in ((here, "cpu"), (there, "cuda")):
            mine = x.to(device, copy=True).requires_grad_()
            module.zero_grad()
            with ottava.autocast(enabled=chosen is not None, recipe=chosen):
                y = module(mine, rotary_pos_emb=angles.to(device))
            y.backward(dy.to(device))
            results.append([y.cpu(), mine.grad.cpu(), *(p.grad.cpu() for p in module.parameters())])
    bar = {"none": 1e-2, "nvfp4": 0.3}.get(name, 6e-2)
    names = ["y", "dx", *(n for n, _ in here.named_parameters())]
    for what, a, b in zip(names, *results, strict=True):
        if not what.endswith("key_bias"):  # its true gradient is zero
            assert relative(b, a) < bar, (what, relative(b, a))


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_compiled_layer_equals_eager(name):
    eager, traced = layer("cuda", **LLAMA), layer("cuda", **LLAMA)
    compiled = torch.compile(traced, fullgraph=True)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for module, call in ((eager, eager), (traced, compiled)):
            module.zero_grad()
            mine = x.clone().requires_grad_()
            with casting(name):
                y = call(mine)
            y.float().pow(2).sum().backward()
            results.append([y, mine.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 3e-2


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_stored_weights_train_with_fused_adam(name):
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        model = torch.nn.Sequential(
            ottava.LayerNormMLP(128, 256, device="cuda"), ottava.Linear(128, 128, device="cuda")
        )
    optimizer = ottava.optimizers.FusedAdam(model.parameters(), lr=3e-3)
    x = torch.randn(64, 128, device="cuda")
    losses = []
    for _ in range(30):
        with casting(name):
            loss = (model(x) - x.roll(1, 0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_rope_and_residual_kernels_give_the_reference_bytes():
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(24, (4 + 2 * 2) * 64, generator=generator).bfloat16()
    freqs = torch.rand(12, 64, generator=generator) * 6
    for by_group in (True, False):
        for interleaved in (True, False):
            for rot in (64, 32):
                table = freqs[:, :rot].contiguous()
                args = (table, table, None, 2, 12, 4, 2, by_group, interleaved)
                # cos and sin of the two devices differ in the last bit: compare in the dtype of the values
                for a, b in zip(
                    rope._split_qkv(qkv, *args), torch.ops.ottava.split_qkv(qkv.cuda(), *_cuda(args)), strict=True
                ):
                    torch.testing.assert_close(b.cpu(), a, rtol=1e-2, atol=1e-6)
    x, bias, rest = (torch.randn(*s, generator=generator).bfloat16() for s in ((10, 96), (96,), (10, 96)))
    assert torch.equal(
        torch.ops.ottava.bias_residual(x.cuda(), bias.cuda(), rest.cuda()).cpu(), residual._bias_residual(x, bias, rest)
    )


def _cuda(args: tuple) -> tuple:
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding", "padding_causal", "arbitrary", "window"])
def test_attention_masks_agree_with_the_cpu(layout, mask):
    if layout == "thd" and "padding" not in mask:
        return  # packed sequences always have padding semantics
    torch.manual_seed(0)
    lengths = torch.tensor([16, 9], dtype=torch.int32)
    kind = "causal" if mask == "window" else mask
    window = (4, 0) if mask == "window" else None
    module = ottava.DotProductAttention(
        4, 64, num_gqa_groups=2, attention_dropout=0.0, qkv_format=layout, attn_mask_type=kind
    )
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    shape = {"sbhd": (16, 2), "bshd": (2, 16), "thd": (25,)}[layout]
    q, k, v = (torch.randn(*shape, h, 64).bfloat16() for h in (4, 2, 2))
    grad = torch.randn(*shape, 256).bfloat16()
    options: dict = {"window_size": window}
    if "padding" in mask:
        options |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 16, "max_seqlen_kv": 16}
    if mask == "arbitrary":
        options["attention_mask"] = torch.rand(2, 1, 16, 16) > 0.7
    results = []
    for device in ("cpu", "cuda"):
        tensors = [t.to(device, copy=True).requires_grad_() for t in (q, k, v)]
        moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in options.items()}
        out = module(*tensors, **moved)
        out.backward(grad.to(device))
        results.append([out.cpu(), *(t.grad.cpu() for t in tensors)])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 2e-2, relative(b, a)


def test_a_cpu_tensor_given_to_a_cuda_module_is_named():
    with pytest.raises(ValueError, match=r"is on cuda:0 but its input is on cpu: move the input with \.to\('cuda:0'\)"):
        ottava.Linear(16, 16, device="cuda")(torch.randn(4, 16))


@pytest.mark.parametrize("stored", [False, True], ids=["masters", "fp8 storage"])
def test_delayed_scaling_of_a_model_built_under_a_bf16_default_dtype(stored):
    """As TransformerEngine's Llama tutorial builds it: q, k and v apart, and torch's default dtype set by the loader."""
    cases = load("nn/test_default_dtype.py")
    delayed = RECIPES["delayed"]
    with cases.default_dtype(torch.bfloat16):
        block = cases.attention(delayed if stored else None).cuda()
        layer = ottava.TransformerLayer(
            128, 256, 2, num_gqa_groups=1, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=False, bias=False,
            normalization="RMSNorm", activation="swiglu", attn_input_format="bshd", params_dtype=torch.bfloat16,
        )  # fmt: skip
        for module, width in ((block, 64), (layer, 128)):
            for _ in range(2):
                with ottava.autocast(recipe=delayed):
                    y = module(torch.randn(2, 32, width, device="cuda"))
                y.float().square().mean().backward()
            assert torch.isfinite(y).all()
            assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)
            states = [m for m in module.modules() if isinstance(m, DelayedState) and m.used]
            assert states and all(s.fwd_scale.dtype is torch.float32 and s.fwd_scale[0] != 1 for s in states)


def test_odd_numbers_of_tokens_and_none_at_all():
    for rows in (0, 1, 7, 33):
        module = ottava.Linear(64, 96, params_dtype=torch.bfloat16, device="cuda")
        for name in ("delayed", "current", "block", "mxfp8"):
            x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with casting(name):
                y = module(x)
            y.sum().backward()
            assert y.shape == (rows, 96) and x.grad.shape == x.shape and bool(module.weight.grad.isfinite().all())


@pytest.mark.parametrize(
    "command",
    [
        ["te_mnist.py", "--use-fp8"],
        ["te_mnist.py", "--use-fp8-infer"],
        ["te_quantized_init.py", "--recipe", "block"],
        ["te_quantized_init.py", "--recipe", "delayed"],
    ],
    ids=" ".join,
)
def test_scripts_written_for_transformer_engine_run(command):
    script, *options = command
    run = subprocess.run(
        [sys.executable, "-m", "ottava.compat", str(ROOT / "examples" / script), *options],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
