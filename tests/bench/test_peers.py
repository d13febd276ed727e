"""The layers of others have our weights and do what ours do."""

from __future__ import annotations

import json

import pytest
import torch

from ottava import compat
from ottava.bench import te_peer
from ottava.bench.peers import Unavailable, compile_blocks
from ottava.bench.plain_llama import Block, PlainLlama
from ottava.cli.main import main
from ottava.models import LlamaConfig

SHAPE = LlamaConfig(vocab_size=64, hidden_size=64, ffn_hidden_size=128, layers=1, heads=4, kv_heads=2, max_length=16)


def test_a_transformer_layer_with_a_plain_blocks_weights_gives_its_output() -> None:
    torch.manual_seed(0)
    block, device = Block(SHAPE, "cpu"), torch.device("cpu")
    x = torch.randn(2, 16, 64)
    cos, sin = PlainLlama(SHAPE, "cpu").angles(16, device)
    with compat.installed(), torch.no_grad():
        theirs = te_peer.TeBlock(block, SHAPE, 1, device)(x, cos, sin)
    assert torch.allclose(theirs, block(x, cos, sin), atol=1e-5)


def test_ottavas_stand_in_is_not_taken_for_transformer_engine() -> None:
    with compat.installed(), pytest.raises(Unavailable, match="stand-in"):
        te_peer.require_te(torch.device("cpu"))


def test_compiled_blocks_take_the_places_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda block: torch.nn.Sequential(block))
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    before = list(blocks)
    compile_blocks(blocks)
    assert [list(block) for block in blocks] == [[layer] for layer in before]  # type: ignore[call-overload]


def test_bench_layer_has_peers_and_says_who_could_not_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layer.json"
    words = ["bench", "layer", "--repeats", "1", "--sequence", "32", "--output", str(path)]
    assert main([*words, "--peers", "torch,torchao,te"]) == 0
    document = json.loads(path.read_text())
    assert document["peers"]["torch"]["ms"] > 0 and document["peers"]["torch"]["relative_error"] < 0.02
    assert document["peers"]["torchao"]["failed"] and document["peers"]["te"]["failed"]
    assert document["results"]["DelayedScaling"]["host_ms"] > 0
    assert main([*words, "--peers", "megatron"]) == 2 and "no peer 'megatron'" in capsys.readouterr().err
