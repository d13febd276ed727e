"""A transformer layer in float64, written from the definitions: what the modules are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def norm(
    x: Tensor, weights: Weights, prefix: str, kind: str = "LayerNorm", eps: float = 1e-5, names=("weight", "bias")
) -> Tensor:
    gamma, beta = weights[prefix + names[0]], weights.get(prefix + names[1])
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
    return x if beta is None else x + beta


def linear(x: Tensor, weights: Weights, prefix: str, *, bias: bool = True) -> Tensor:
    """The weight may be whole, or in parts (query_weight, ...)."""
    parts = ["", "query_", "key_", "value_"]
    y = x @ torch.cat([weights[f"{prefix}{p}weight"] for p in parts if f"{prefix}{p}weight" in weights]).T
    found = [weights[f"{prefix}{p}bias"] for p in parts if f"{prefix}{p}bias" in weights]
    return y + torch.cat(found) if found and bias else y


def rotate(x: Tensor, interleaved: bool = False, positions: Tensor | None = None) -> Tensor:
    """x [s, ..., h, d] at positions 0 ... s - 1, by angles p / 10000^(2i/d)."""
    d = x.shape[-1]
    p = torch.arange(x.shape[0]) if positions is None else positions
    angle = p.double()[:, None] / 10000.0 ** (torch.arange(0, d, 2).double() / d)
    turn = torch.exp(1j * angle).view(-1, *(1,) * (x.dim() - 2), d // 2)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
    z = torch.complex(a, b) * turn
    return torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """q [s, b, h, d], k, v [t, b, g, d]; hidden: bool, True is masked out, broadcastable to [b, h, s, t]. -> [s, b, h * d]."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    score = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[-1])
    weight = score.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weight, v).flatten(2)


def causal(length: int, keys: int | None = None) -> Tensor:
    return torch.ones(length, keys or length, dtype=torch.bool).triu(1)


def mlp(x: Tensor, weights: Weights, prefix: str, activation: str, kind: str = "LayerNorm") -> tuple[Tensor, Tensor]:
    """(output, the norm's output)."""
    normed = norm(x, weights, prefix, kind, names=("layer_norm_weight", "layer_norm_bias"))
    h = normed @ weights[f"{prefix}fc1_weight"].T + weights.get(f"{prefix}fc1_bias", 0)
    if activation == "swiglu":
        a, b = h.chunk(2, -1)
        h = torch.nn.functional.silu(a) * b
    else:
        h = torch.nn.functional.gelu(h, approximate="tanh")
    return h @ weights[f"{prefix}fc2_weight"].T + weights.get(f"{prefix}fc2_bias", 0), normed


def doubles(module: torch.nn.Module) -> Weights:
    """The parameters of a module in float64, ready for gradients."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Parameters that make every one of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.copy_(
                noise / math.sqrt(p.shape[-1])
                if p.dim() > 1
                else (1 if "norm" in name and "weight" in name else 0) + 0.3 * noise
            )


def assert_same_gradients(module: torch.nn.Module, weights: Weights, tolerance: float = 1e-4) -> None:
    for name, p in module.named_parameters():
        want = weights[name].grad
        if want is None:
            assert p.grad is None or not p.grad.any(), name
            continue
        assert p.grad is not None, name
        # The floor is for a bias of keys: it adds the same to all scores of a query, so its gradient is 0 but for rounding.
        error = (p.grad.double() - want).norm() / want.norm().clamp(min=0.1)
        assert error < tolerance, f"{name}: {error}"
