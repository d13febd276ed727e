"""Samples of text."""

from __future__ import annotations

import pytest
import torch

from ottava.models import GPT, GPTConfig
from ottava.nn.initialize import materialize_
from ottava.train.sample import generate


@pytest.fixture(scope="module")
def model() -> GPT:
    """Has learned 0 1 2 3 4 0 1 2 ..."""
    config = GPTConfig(vocab_size=6, hidden_size=32, ffn_hidden_size=64, layers=1, heads=2, max_length=10, dropout=0.1)
    out = materialize_(GPT(config, device="meta"), device="cpu")
    optimizer = torch.optim.AdamW(out.parameters(), lr=1e-2)
    tokens = torch.arange(55).remainder(5).unfold(0, 11, 4)
    for _ in range(80):
        out.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return out


def test_it_says_what_the_model_has_learned_beyond_its_length(model):
    assert generate(model, [3, 4], 20, max_length=10, temperature=0) == [i % 5 for i in range(20)]


def test_the_same_seed_gives_the_same_text_and_the_model_is_left_as_it_was(model):
    model.train()
    first = generate(model, [0], 30, 10, temperature=3.0, seed=1)
    state = torch.get_rng_state()
    assert generate(model, [0], 30, 10, temperature=3.0, seed=1) == first
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert generate(model, [0], 30, 10, temperature=3.0, seed=2) != first


def test_it_stops_at_the_end_of_a_document(model):
    assert generate(model, [0], 20, 10, temperature=0, end_token=3) == [1, 2]


def test_mistakes_are_explained(model):
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [], 5, 10)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, [1], 5, 10, temperature=-1.0)
