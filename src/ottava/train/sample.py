"""Text from a model, token by token, to see what it has learned. There is no key-value cache: a sample of 200 tokens is 200 forwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import pad


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    max_length: int,
    temperature: float = 0.8,
    seed: int = 0,
    end_token: int | None = None,
    device: torch.device | None = None,
    multiple: int = 1,
    beat: Callable[[], None] = lambda: None,
) -> list[int]:
    """Up to `count` tokens after `prompt`; fewer if `end_token` comes, which is left out. The model sees the last `max_length` tokens.

    temperature 0 takes the likeliest token. All ranks of a sharded model must call this together; they draw the same tokens, because
    the numbers come from `seed` on the CPU. device: by default that of the parameters. multiple: lengths that the model takes, where
    ranks split sequences; what is added stands after the last token, which does not see it. beat: called before each token.

        >>> ByteTokenizer().decode(generate(model, list(b"def "), count=100, max_length=128))
    """
    if not prompt:
        raise ValueError("A sample needs a prompt of at least one token.")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}.")
    device = device or next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    tokens = list(prompt)
    try:
        for _ in range(count):
            beat()
            window = torch.tensor([tokens[-max_length:]], dtype=torch.int64, device=device)
            length = window.shape[1]
            logits = model(pad(window, (0, -length % multiple)))[0, length - 1].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            if token == end_token:
                break
            tokens.append(token)
    finally:
        model.train(training)
    return tokens[len(prompt) :]
