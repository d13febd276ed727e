"""A small model, its training in one process, and comparisons, for the tests of FSDP1 and DDP.

One process that sees the global batch runs it as one microbatch a rank inside one `autocast`, followed by one backward, so that
statistics of delayed scaling are those of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import recipe

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
HIDDEN, STEPS = 64, 3


class Model(nn.Module):
    """Two layers and a head that is an Ottava module of the root itself."""

    def __init__(self, device: str = "cpu", dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ottava.TransformerLayer(
                HIDDEN, 96, 4, num_gqa_groups=2, hidden_dropout=dropout, attention_dropout=dropout,
                normalization="RMSNorm", activation="swiglu", device=device,
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = ottava.Linear(HIDDEN, 32, bias=False, device=device)

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, is_first_microbatch=first)
        return self.head(x, is_first_microbatch=first)


def build(dropout: float = 0.0) -> Model:
    torch.manual_seed(1)
    model = Model(dropout=dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch(step: int, part: int, scale: float = 1.0) -> Tensor:
    """[s, b, hidden]; each part has its own magnitude, so that no two ranks would have the same amax."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(16, 2, HIDDEN, generator=generator) * (scale * (1 + part))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def one_process(name: str, parts: int) -> dict[str, Tensor]:
    """The state dict after training on `parts` parts."""
    model = build()
    optimizer = adamw(model)
    for step in range(STEPS):
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            losses = [loss_of(model(batch(step, part))) for part in range(parts)]
        torch.stack(losses).sum().backward()
        for parameter in model.parameters():  # gradients are quantized before they are averaged, as on a rank
            assert parameter.grad is not None
            parameter.grad /= parts
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def train(wrapped: nn.Module, name: str, part: int, scale: float = 1.0, **autocast: Any) -> None:
    """The same on one rank."""
    optimizer = adamw(wrapped)
    for step in range(STEPS):
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name], **autocast):
            loss = loss_of(wrapped(batch(step, part, scale)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    """All delayed-scaling state."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith(("_scale", "_amax_history")) and "previous" not in name
    }


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative Frobenius error of any tensor."""
    errors = [
        ((actual[k].double() - v.double()).norm() / v.double().norm().clamp_min(1e-12)).item()
        for k, v in expected.items()
    ]
    return max(errors, default=0.0)


def cached(make: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    known: dict[Any, dict[str, Tensor]] = {}

    def get(*args: Any) -> dict[str, Tensor]:
        if args not in known:
            torch.set_num_threads(1)
            known[args] = make(*args)
        return known[args]

    return get
