"""The same seed gives the same losses, bit for bit, whatever the number of threads."""

from __future__ import annotations

import pytest
import torch

import ottava
from quant_cases import RECIPES, casting, same

HIDDEN, FFN, HEADS, VOCABULARY, TOKENS = 64, 128, 4, 64, 64
STEPS = 20


class Model(torch.nn.Module):
    """A small language model: embedding, one layer, norm, head. The plain torch parts stay small enough for one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.5)
        self.layer = ottava.TransformerLayer(
            HIDDEN, FFN, HEADS, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=True,
            hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32, device="cpu",
        )  # fmt: skip
        self.head = ottava.LayerNormLinear(HIDDEN, VOCABULARY, device="cpu")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding[tokens]))


def losses(scheme: str, threads: int) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(VOCABULARY, (TOKENS, 2))
    result = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with casting(scheme):
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:-1].reshape(-1, VOCABULARY).double(), tokens[1:].reshape(-1))
        loss.backward()
        optimizer.step()
        result.append(loss.detach())
    return result


SOME = ("none", "delayed", "block", "nvfp4")


@pytest.mark.strict
@pytest.mark.parametrize("scheme", [r if r in SOME else pytest.param(r, marks=pytest.mark.extra) for r in RECIPES])
def test_twenty_steps_are_bitwise_equal_for_any_number_of_threads(scheme: str) -> None:
    once = losses(scheme, 1)
    assert once[-1] < 0.7 * once[0]  # it learns, so the equality is of something
    for threads in (
        (2, 4) if scheme != "nvfp4" else (2,)
    ):  # its emulation is many small operations: slow with many threads
        again = losses(scheme, threads)
        assert all(same(a, b) for a, b in zip(once, again, strict=True)), [
            float(a - b) for a, b in zip(once, again, strict=True)
        ]
