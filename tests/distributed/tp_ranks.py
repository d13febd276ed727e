"""A module on tensor-parallel ranks beside the same module in one process: what `test_tensor_parallel*.py` run in their ranks.

Every rank builds the whole module and runs it on the whole input, which is the single process; then it builds its part of a spread
one, by one of the ways that users have (`INSTALL`), and runs that on its part of the input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ottava
from ottava import recipe
from ottava.distributed.whole import layout_of
from ottava.nn.strategy import REPLICATED, Layout

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "current pow2": recipe.Float8CurrentScaling(use_power_2_scales=True),
    "block": recipe.Float8BlockScaling(),
    "block1d": recipe.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "current dequantized": recipe.Float8CurrentScaling(backward_override="dequantized"),
    "current high precision": recipe.Float8CurrentScaling(backward_override="high_precision"),
    "mxfp8 dequantized": recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "block high precision": recipe.Float8BlockScaling(backward_override="high_precision"),
}

ALL_RECIPES = RECIPES | {"square gradients": recipe.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2)}
"""Those of single tests too."""

INSTALL = ("mesh", "constructor", "group", "late group")
"""set_device_mesh after construction; tp_mesh= and weight_mesh=; tp_group= and tp_size=; tp_size=, then set_tensor_parallel_group."""

TOKENS = Layout(0)
"""Tokens are spread over ranks under sequence parallelism, and equal on all of them without it."""
FEATURES = Layout(-1)


class TwoMatrices(Layout):
    """Two matrices of 128 features side by side, of which ranks hold parts one by one."""

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([super(TwoMatrices, self).cut(half, rank, size) for half in whole.split(128, -1)], -1)


HIDDEN, FFN, HEADS, CHANNELS = 256, 256, 4, 64  # over 2 ranks no block of 128 is cut


@dataclass(frozen=True)
class Case:
    """A module, and how its inputs and its output are spread over ranks."""

    build: Callable[..., nn.Module]
    """Called with the arguments that spread it, and those of a test."""
    inputs: tuple[Layout, ...] = (TOKENS,)
    output: Layout = TOKENS
    shape: tuple[int, ...] = (2, HIDDEN)
    """Of an input behind its tokens."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of forward."""


def _norm(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def build(tp_size: int = 1, tp_group: Any = None, **options: Any) -> nn.Module:
        norm = kind(HIDDEN, **options)
        if tp_group is not None:
            norm.set_tensor_parallel_group(tp_group)  # type: ignore[operator]
        return norm

    return build


def _of(kind: type[nn.Module], *sizes: int, **fixed: Any) -> Callable[..., nn.Module]:
    return lambda **options: kind(*sizes, **{**fixed, **options})


def _linear(mode: str, **fixed: Any) -> Callable[..., nn.Module]:
    return _of(ottava.Linear, HIDDEN, HIDDEN, parallel_mode=mode, **fixed)


def _normed(**fixed: Any) -> Callable[..., nn.Module]:
    return _of(ottava.LayerNormLinear, HIDDEN, HIDDEN, parallel_mode="column", **fixed)


def _mlp(**fixed: Any) -> Callable[..., nn.Module]:
    return _of(ottava.LayerNormMLP, HIDDEN, FFN, set_parallel_mode=True, **fixed)


def _grouped(mode: str, **fixed: Any) -> Callable[..., nn.Module]:
    return _of(ottava.GroupedLinear, 2, HIDDEN, HIDDEN, parallel_mode=mode, **fixed)


def _attention(**fixed: Any) -> Callable[..., nn.Module]:
    return _of(ottava.MultiheadAttention, HIDDEN, HEADS, attention_dropout=0.0, set_parallel_mode=True, **fixed)


def _layer(**fixed: Any) -> Callable[..., nn.Module]:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "set_parallel_mode": True, **fixed}
    return _of(ottava.TransformerLayer, HIDDEN, FFN, HEADS, **options)


LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "fuse_qkv_params": True,
    "num_gqa_groups": 2,
}
CASES: dict[str, Case] = {
    "column": Case(_linear("column"), output=FEATURES),
    "column without bias": Case(_linear("column", bias=False), output=FEATURES),
    "column, bias returned": Case(_linear("column", return_bias=True), output=FEATURES),
    "column, split": Case(_linear("column", parameters_split=("query", "key")), output=TwoMatrices(-1)),
    "row": Case(_linear("row"), inputs=(FEATURES,)),
    "row without bias": Case(_linear("row", bias=False), inputs=(FEATURES,)),
    "row, bias returned": Case(_linear("row", return_bias=True), inputs=(FEATURES,)),
    "row, split": Case(_linear("row", parameters_split=("query", "key")), inputs=(FEATURES,)),
    "LayerNorm": Case(_norm(ottava.LayerNorm)),
    "RMSNorm": Case(_norm(ottava.RMSNorm)),
    "LayerNormLinear": Case(_normed(), output=FEATURES),
    "LayerNormLinear, split": Case(
        _normed(normalization="RMSNorm", parameters_split={"a": 128, "b": 128}), output=TwoMatrices(-1)
    ),
    "gelu": Case(_mlp()),
    "swiglu": Case(_mlp(activation="swiglu", normalization="RMSNorm", bias=False)),
    "swiglu with bias": Case(_mlp(activation="swiglu")),
    "gelu, bias returned": Case(_mlp(return_bias=True)),
    "experts, column": Case(_grouped("column"), output=FEATURES, shape=(HIDDEN,), arguments={"m_splits": None}),
    "experts, row": Case(_grouped("row"), inputs=(FEATURES,), shape=(HIDDEN,), arguments={"m_splits": None}),
    "softmax offset": Case(
        _of(ottava.DotProductAttention, HEADS, CHANNELS, softmax_type="learnable"),
        inputs=(Layout(2),) * 3, output=FEATURES, shape=(2, HEADS, CHANNELS),
    ),
    "attention, fused": Case(_attention(fuse_qkv_params=True)),
    "attention, fused, not interleaved": Case(
        _attention(fuse_qkv_params=True, qkv_weight_interleaved=False, num_gqa_groups=2)
    ),
    "attention, separate": Case(_attention(num_gqa_groups=2, input_layernorm=True)),
    "attention, cross": Case(_attention(attention_type="cross", attn_mask_type="no_mask"), inputs=(TOKENS, TOKENS)),
    "attention, cross, fused, not interleaved": Case(
        _attention(
            attention_type="cross", attn_mask_type="no_mask", input_layernorm=True, fuse_qkv_params=True,
            qkv_weight_interleaved=False,
        ),
        inputs=(TOKENS, TOKENS),
    ),
    "attention, qk norm": Case(_attention(qk_norm_type="LayerNorm", softmax_type="learnable")),
    "attention, norm returned": Case(_attention(input_layernorm=True, return_layernorm_output=True)),
    "encoder": Case(_layer()),
    "llama": Case(_layer(**LLAMA)),
    "decoder": Case(_layer(layer_type="decoder"), inputs=(TOKENS, TOKENS)),
    "layer, output norm": Case(_layer(output_layernorm=True)),
    "layer, parallel": Case(_layer(parallel_attention_mlp=True, qk_norm_type="RMSNorm")),
    "layer, residual after norm": Case(_layer(apply_residual_connection_post_layernorm=True)),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- one module


def randomize(module: nn.Module) -> None:
    """Vectors start as zeros or ones, where mistakes do not show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.2)


def spread_module(case: Case, whole: nn.Module, mesh: DeviceMesh, install: str, options: dict[str, Any]) -> nn.Module:
    """The module on the ranks of `mesh`, with the values of `whole`."""
    size, group = mesh.size(), mesh.get_group()
    if install == "mesh":
        module = copy.deepcopy(whole)
        module.set_device_mesh(mesh, mesh)  # type: ignore[operator]
        return module
    torch.manual_seed(7)
    if install == "constructor":
        module = case.build(**options, tp_mesh=mesh, weight_mesh=mesh)
    elif install == "group":
        module = case.build(**options, tp_group=group, tp_size=size)
    else:
        module = case.build(**options, tp_size=size)
        module.set_tensor_parallel_group(group)  # type: ignore[operator]
    if install == "constructor":  # whole weights were drawn, then cut
        torch.manual_seed(7)
        fresh = case.build(**options)
        for name, parameter in module.named_parameters():
            assert torch.equal(local(parameter), part(fresh, name, fresh.get_parameter(name), module, mesh)), name
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local(parameter).copy_(part(whole, name, whole.get_parameter(name), module, mesh))
    return module


def local(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(whole: nn.Module, name: str, value: Tensor, spread: nn.Module, mesh: DeviceMesh) -> Tensor:
    """What this rank should hold of `value`, which belongs to parameter `name`."""
    owner, _, leaf = name.rpartition(".")
    layout, size = layout_of(spread.get_submodule(owner), leaf)
    return layout.cut(value, mesh.get_local_rank(), size)


def forward(case: Case, module: nn.Module, inputs: list[Tensor], **extra: Any) -> tuple[Tensor, Tensor | None]:
    """(output with the bias added where it is returned, the norm's output if the module returns it)."""
    arguments = {**case.arguments, **extra}
    if "m_splits" in arguments:  # two uneven groups
        first = inputs[0].shape[0] // 2 // 16 * 16 - 16
        arguments["m_splits"] = [first, inputs[0].shape[0] - first]
    cross = isinstance(module, ottava.MultiheadAttention | ottava.TransformerLayer) and len(inputs) > 1
    out = module(inputs[0], encoder_output=inputs[1], **arguments) if cross else module(*inputs, **arguments)
    if not isinstance(out, tuple):
        return out, None
    if getattr(module, "return_bias", False):
        return out[0] + out[1].to(out[0].dtype), None
    return out[0], out[1]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, by norms; 0.0 only if the bits are equal."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if torch.equal(found, expected):
        return 0.0
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)) or 1e-30


@dataclass(frozen=True)
class Run:
    """How a case is run."""

    recipe: str = "none"
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    install: str = "mesh"
    tokens: int = 32
    """Length of the sequences; there are two."""
    steps: int = 1
    calibrating: bool = False
    microbatches: bool = False
    """A second forward with is_first_microbatch=False after the first with True."""
    options: tuple[tuple[str, Any], ...] = ()
    """More constructor arguments."""


def compare(name: str, run: Run) -> dict[str, float]:
    """Relative errors of the output, of the inputs' gradients and of the parameters' gradients, by name."""
    case = CASES[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    spread = {"sequence_parallel": True} if run.sequence_parallel else {}
    options = {**dict(run.options), "device": "cpu", **spread}
    if case.build is not CASES["softmax offset"].build:
        options["params_dtype"] = run.dtype
    torch.manual_seed(7)
    whole = case.build(**options)
    randomize(whole)
    module = spread_module(case, whole, mesh, run.install, options)
    results = []
    for one, of, rank in ((whole, 1, 0), (module, mesh.size(), mesh.get_local_rank())):
        _give_main_grads(one)
        results.append(_run(case, one, run, of, rank))
    expected, found = results
    rank, size = mesh.get_local_rank(), mesh.size()
    errors = {}
    for key, value in expected.items():
        if key.startswith("parameter "):
            parameter = key.removeprefix("parameter ").partition(" ")[0]
            value = part(whole, parameter, value, module, mesh)
        else:
            layouts = {"y": case.output, "norm": TOKENS, **{f"x{i}": layout for i, layout in enumerate(case.inputs)}}
            value = _cut(layouts[key], value, run, rank, size)
        errors[key] = error(found[key], value)
    assert expected.keys() == found.keys()
    return errors


def _cut(layout: Layout, value: Tensor, run: Run, rank: int, size: int) -> Tensor:
    return (REPLICATED if layout is TOKENS and not run.sequence_parallel else layout).cut(value, rank, size)


def _give_main_grads(module: nn.Module) -> None:
    if any(getattr(m, "wgrad_accumulation", False) for m in module.modules()):
        for parameter in module.parameters():
            parameter.main_grad = torch.full(local(parameter).shape, 0.5)  # type: ignore[attr-defined]


def _run(case: Case, module: nn.Module, run: Run, size: int, rank: int) -> dict[str, Tensor]:
    chosen = ALL_RECIPES[run.recipe]
    found: dict[str, Tensor] = {}
    for step in range(run.steps):
        module.zero_grad()
        # Magnitudes differ along tokens and features, so that ranks disagree about amax until they share it.
        generator = torch.Generator().manual_seed(step)
        wholes = []
        for _ in case.inputs:
            x = torch.randn(run.tokens, *case.shape, generator=generator)
            x *= torch.linspace(0.2, 2.0, run.tokens).view(-1, *[1] * len(case.shape)) * torch.linspace(
                0.5, 1.5, case.shape[-1]
            )
            wholes.append(x.to(run.dtype))
        inputs = [
            _cut(c, x, run, rank, size).clone().requires_grad_() for c, x in zip(case.inputs, wholes, strict=True)
        ]
        with ottava.autocast(
            enabled=chosen is not None and not run.calibrating, recipe=chosen, calibrating=run.calibrating
        ):
            y, norm = forward(case, module, inputs, **({"is_first_microbatch": True} if run.microbatches else {}))
            if run.microbatches:
                y, norm = forward(case, module, inputs, is_first_microbatch=False)
        full = list(y.shape)
        full[0] *= size if run.sequence_parallel and case.output is TOKENS else 1
        full[-1] *= size if case.output is not TOKENS else 1
        weight = torch.randn(full, generator=generator) * torch.linspace(0.1, 1.0, full[0]).view(
            -1, *[1] * (len(full) - 1)
        )
        weight = _cut(case.output, weight.to(run.dtype), run, rank, size)
        loss = (y * weight).sum() + (0.0 if norm is None else norm.square().sum())
        loss.backward()
        found |= {"y": y.detach()} | {f"x{i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
        found |= {} if norm is None else {"norm": norm.detach()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert not isinstance(parameter, DTensor) or parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]
            found[f"parameter {name}"] = local(parameter.grad)
        if hasattr(parameter, "main_grad"):
            found[f"parameter {name} main"] = parameter.main_grad
    for name, buffer in module.named_buffers():
        if "delayed" in name and run.recipe == "delayed" and "scale" in name:
            found[f"parameter {name}"] = buffer
    return found
