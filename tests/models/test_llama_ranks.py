"""Llama where ranks are: a vocabulary split over them, and FSDP2's hooks around `loss`."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from distributed.ranks import Ranks
from ottava.models import Llama, LlamaConfig
from ottava.nn.initialize import materialize_

CONFIG = LlamaConfig(
    vocab_size=90,
    hidden_size=32,
    ffn_hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    max_length=16,
    pad_vocab_to=4,
    init_std=0.1,
)


def model() -> Llama:
    return materialize_(Llama(CONFIG, device="meta"), device="cpu")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(90, (2, 9), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -100
    return tokens[:, :-1], targets


def result(x: torch.Tensor) -> list:
    return x.detach().tolist()


def split_vocabulary(max_logits: int) -> dict[str, list]:
    whole, tokens, targets = model(), *batch()
    whole.embedding.set_tensor_parallel_group(dist.group.WORLD)
    whole.head.set_tensor_parallel_group(dist.group.WORLD)
    loss = whole.loss(tokens, targets, max_logits=max_logits)
    loss.backward()
    found = {
        "loss": result(loss),
        "logits": result(whole(tokens)),
        "fc1": result(whole.layers[0].layernorm_mlp.fc1_weight.grad),
    }
    return {**found, "head": result(whole.head.weight.grad)}


def split_sequence(max_logits: int) -> float:
    """The head gathers a sequence that is split over ranks, piece by piece."""
    whole, tokens, targets = model(), *batch()
    x = whole.hidden(tokens)
    whole.head.set_tensor_parallel_group(dist.group.WORLD)
    whole.head.sequence_parallel = True
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    return whole._loss(part, targets.t(), max_logits=max_logits).item()


def fully_sharded() -> dict[str, list]:
    from torch.distributed.fsdp import fully_shard

    whole, tokens, targets = model(), *batch()
    for layer in whole.layers:
        fully_shard(layer)
    fully_shard(whole)
    loss = whole.loss(tokens, targets)
    loss.backward()
    return {
        "loss": result(loss),
        "parameters": whole.num_parameters(),
        "fc1": result(whole.layers[0].layernorm_mlp.fc1_weight.grad.full_tensor()),
    }


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> dict:
    whole, tokens, targets = model(), *batch()
    loss = whole.loss(tokens, targets)
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": whole(tokens).detach(),
        "fc1": whole.layers[0].layernorm_mlp.fc1_weight.grad,
        "head": whole.head.weight.grad,
    }


def close(found, wanted) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_logits", [2**20, 200])
def test_a_vocabulary_that_is_split_gives_the_same_loss_logits_and_gradients(ranks, alone, max_logits):
    found = ranks.run(split_vocabulary, max_logits)
    for one in found:
        for name in ("loss", "logits", "fc1"):
            close(one[name], alone[name])
    close(found[0]["head"] + found[1]["head"], alone["head"])


@pytest.mark.parametrize("max_logits", [2**20, 200])
def test_a_sequence_that_is_split_gives_the_same_loss(ranks, alone, max_logits):
    assert ranks.run(split_sequence, max_logits) == pytest.approx([alone["loss"].item()] * 2, rel=1e-5)


def test_loss_runs_through_the_hooks_of_fsdp(ranks, alone):
    for one in ranks.run(fully_sharded):
        close(one["loss"], alone["loss"])
        close(one["fc1"], alone["fc1"])
        assert one["parameters"] == model().num_parameters()
