"""`ottava bench step` on a CPU: what it compares, what it times, and what it says about those who cannot run."""

from __future__ import annotations

import json

import pytest
import torch

from ottava.bench.contenders import Contender, Numbers
from ottava.bench.gates import Gate, judge
from ottava.bench.plain_llama import PlainLlama, copy_weights
from ottava.bench.shapes import workloads
from ottava.bench.step import check
from ottava.cli.main import main
from ottava.models import Llama, LlamaConfig
from ottava.train.config import Config
from ottava.train.override import override

SHAPE = LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=2, heads=4, kv_heads=2, max_length=16)


def test_the_trainer_and_a_plain_model_are_timed_side_by_side_from_the_same_weights(tmp_path, capsys) -> None:
    path = tmp_path / "step.json"
    words = ["--contenders", "bf16,torch-eager,torchao,te", "--ours", "fp8:precision.recipe=Float8CurrentScaling"]
    quick = ["--steps", "1", "--warmup", "1", "--visits", "1", "--output", str(path)]
    gates = ["--gate", "tokens_per_s=0.001", "--gate", "fp8:ratio_to_torch-eager=1e6"]
    assert main(["bench", "step", "--shape", "tiny", *words, *quick, *gates]) == 3
    document = json.loads(path.read_text())
    results = document["results"]
    assert list(results) == ["bf16", "fp8", "torch-eager", "torchao", "te"]
    for name in ("bf16", "fp8", "torch-eager"):
        row = results[name]
        assert row["ms"] > 0 and row["tokens_per_s"] == pytest.approx(128 / row["ms"] * 1e3) and row["host_ms"] > 0
        assert row["losses"][-1] < row["losses"][0] and row["parameters"] == results["torch-eager"]["parameters"]
    assert results["bf16"]["differences"]["grad_norm"] < 1e-3  # float32 on a CPU: the same weights, the same tokens
    assert results["fp8"]["overrides"] == "precision.recipe=Float8CurrentScaling"
    assert results["fp8"]["ratio_to"]["torch-eager"] > 0
    assert all("failed" in results[name] and results[name]["failed"] for name in ("torchao", "te"))
    assert [gate["passed"] for gate in document["gates"]] == [True, False]
    assert "MISSED" in capsys.readouterr().out and document["machine"]["torch"]


@pytest.mark.parametrize(
    "words,message",
    [
        (["--contenders", "bf17"], "no contender 'bf17'"),
        (["--contenders", "none"], "nobody to time"),
        (["--ours", "precision.recipee=none"], "no key 'recipee'"),
        (["--ours", "a:train.compile=perhaps"], "expected true or false"),
    ],
)
def test_wrong_names_are_exit_2_before_anything_runs(words: list[str], message: str, capsys) -> None:
    assert main(["bench", "step", "--shape", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--shape", "2b"], ["--gate", "speed=3"], ["--gate", "ms=fast"]])
def test_wrong_options_are_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "step", *words])
    assert stopped.value.code == 2


def test_overrides_take_the_type_of_the_key() -> None:
    changed = override(Config(), "optimizer.lr=0.5,train.compile=true,model.kv_heads=2,precision.recipe=none")
    assert (changed.optimizer.lr, changed.train.compile, changed.model.kv_heads) == (0.5, True, 2)
    assert changed.precision.recipe == "none" and override(Config(), "") == Config()


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_model_with_our_weights_has_our_loss(tied: bool) -> None:
    config = LlamaConfig(**{**vars(SHAPE), "tie_embeddings": tied})
    torch.manual_seed(0)
    ours, plain = Llama(config, device="cpu"), PlainLlama(config, "cpu")
    copy_weights(ours, plain)
    tokens = torch.randint(64, (2, 17))
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 2 + [1] * 8 + [2] * 6])
    with torch.no_grad():
        expected, found = (model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, plain))
        apart = ours(tokens[:, :-1], tokens[:, 1:], documents), plain(tokens[:, :-1], tokens[:, 1:], documents)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(apart[0]) == pytest.approx(float(apart[1]), rel=1e-5)
    assert float(apart[0]) != pytest.approx(float(found), rel=2e-5)
    assert sum(p.numel() for p in plain.parameters()) == ours.num_parameters()


def test_a_contender_that_keeps_documents_apart_is_held_against_a_plain_model_that_does(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("ottava.bench.step.DOCUMENT", 8)
    words = ["--contenders", "bf16", "--ours", "packed:precision.recipe=none,data.document_mask=true"]
    quick = ["--steps", "1", "--warmup", "1", "--visits", "1", "--output", str(tmp_path / "step.json")]
    assert main(["bench", "step", "--shape", "tiny", *words, *quick]) == 0
    results = json.loads((tmp_path / "step.json").read_text())["results"]
    assert all(results[name]["differences"]["grad_norm"] < 1e-3 for name in ("bf16", "packed"))
    assert results["packed"]["losses"] != results["bf16"]["losses"]
    assert "plain model, documents apart: losses" in capsys.readouterr().out


def test_a_contender_with_other_losses_is_wrong() -> None:
    expected = [Numbers(6.0, 2.0), Numbers(5.9, 2.0), Numbers(5.8, 2.0)]

    def found(losses: list[float], norm: float, quantized: str | None = None) -> dict[str, float]:
        contender = Contender("x", quantized, 1, lambda: expected[0])
        return check(contender, [Numbers(loss, norm) for loss in losses], expected)

    assert found([6.0, 5.9, 5.8], 2.0) == {"first_loss": 0.0, "grad_norm": 0.0, "last_loss": 0.0}
    for losses, norm in (
        ([6.1, 5.9, 5.8], 2.0),
        ([6.0, 5.9, 5.8], 2.1),
        ([6.0, 5.9, 5.6], 2.0),
        ([float("nan")] * 3, 2.0),
    ):
        with pytest.raises(ArithmeticError):
            found(losses, norm)
    assert found([6.1, 5.9, 5.8], 2.1, "fp8")  # FP8 may differ more
    contender = Contender("x", None, 1, lambda: expected[0])
    with pytest.raises(ArithmeticError, match="does not fall"):  # the plain model has made one step alone
        check(contender, [Numbers(6.0, 2.0), Numbers(6.1, 2.0)], expected[:1])


def test_gates_ask_the_fastest_of_ours_or_the_one_named() -> None:
    results = {
        "slow": {"ours": True, "ms": 2.0, "tokens_per_s": 1.0, "allocated_gib": 3.0, "ratio_to": {"torch": 0.9}},
        "fast": {"ours": True, "ms": 1.0, "tokens_per_s": 2.0, "allocated_gib": 4.0, "ratio_to": {"torch": 1.8}},
        "gone": {"ours": True, "failed": "out of memory"},
        "torch": {"ours": False, "ms": 0.5, "tokens_per_s": 4.0},
    }
    words = ["tokens_per_s=2", "slow:allocated_gib=3", "ratio_to_torch=2", "gone:ms=9", "ratio_to_te=1"]
    verdicts = judge([Gate.parse(word) for word in words], results)
    assert [verdict.passed for verdict in verdicts] == [True, True, False, False, False]
    assert verdicts[0].contender == "fast" and verdicts[3].found is None


def test_named_shapes_are_the_presets() -> None:
    found = workloads()
    assert (found["1b"].model.hidden_size, found["1b"].model.tie_embeddings, found["1b"].tokens) == (2048, True, 16384)
    assert (found["8b-8"].model.layers, found["8b"].model.layers, found["8b"].tokens) == (8, 32, 8192)
