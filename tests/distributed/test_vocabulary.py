"""A vocabulary over 1, 2 and 4 ranks: embedding, head and cross-entropy equal those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from distributed.vocab_ranks import run_ranks
from ottava.distributed import vocabulary
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy
from ottava.kernels import cross_entropy as chunks
from ottava.nn.initialize import materialize_

WORLD, SIZES = 4, (2, 4)
TOKENS, WIDTH, HIDDEN, VOCABULARY, MULTIPLE = 12, 40, 16, 37, 8  # 37 words, padded to 40
# name -> (dtype, scale of the logits, arguments)
LOSSES: dict[str, tuple[torch.dtype, float, dict[str, Any]]] = {
    "plain": (torch.float32, 3.0, {}),
    "sum": (torch.float32, 3.0, {"reduction": "sum"}),
    "none": (torch.float32, 3.0, {"reduction": "none"}),
    "padding": (torch.float32, 3.0, {"vocabulary_size": VOCABULARY}),
    "a rank of padding only": (torch.float32, 3.0, {"vocabulary_size": 19}),
    "smoothing": (torch.float32, 3.0, {"label_smoothing": 0.1, "vocabulary_size": VOCABULARY}),
    "z-loss": (torch.float32, 3.0, {"z_loss": 1e-2}),
    "all": (torch.float32, 3.0, {"label_smoothing": 0.2, "z_loss": 1e-3, "vocabulary_size": VOCABULARY}),
    "large logits": (torch.float32, 1e4, {}),
    "bf16": (torch.bfloat16, 3.0, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    "float64": (torch.float64, 3.0, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    "all ignored": (torch.float32, 3.0, {"ignore_index": -1}),
}


def loss_inputs(name: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    dtype, scale, options = LOSSES[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = (torch.randn(3, TOKENS // 3, WIDTH, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(options.get("vocabulary_size", WIDTH), (3, TOKENS // 3), generator=generator)
    targets[0, 1] = targets[2, 3] = options.get("ignore_index", -100)
    if name == "all ignored":
        targets[:] = -1
    return logits, targets, options


def loss_and_grad(logits: Tensor, targets: Tensor, group: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, targets, group, **options)
    weights = torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def float64_loss(logits: Tensor, targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """By torch's own functions, in float64."""
    logits = logits.double().clone().requires_grad_()
    ignore, size = options.get("ignore_index", -100), options.get("vocabulary_size", WIDTH)
    x, t = logits[..., :size].reshape(-1, size), targets.reshape(-1)
    smoothing, reduction = options.get("label_smoothing", 0.0), options.get("reduction", "mean")
    losses = functional.cross_entropy(x, t, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    losses = losses + options.get("z_loss", 0.0) * x.logsumexp(-1).square() * (t != ignore)
    loss = losses.reshape(targets.shape) if reduction == "none" else losses.sum()
    if reduction == "mean":
        loss = loss / (t != ignore).sum().clamp(min=1)
    weights = torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def tokens_and_input() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (8, 3), generator=generator)
    tokens[0, 0], tokens[7, 2], tokens[3] = 0, VOCABULARY - 1, 11
    return tokens, torch.randn(8, 3, HIDDEN, generator=generator)


class TinyModel(nn.Module):
    """Embedding and a head that is tied to it: every gradient path of a split vocabulary."""

    def __init__(self, group: Any, sequence_parallel: bool = False, late: Any = None, device: str = "cpu") -> None:
        super().__init__()
        options: dict[str, Any] = {
            "pad_to_multiple": MULTIPLE,
            "sequence_parallel": sequence_parallel,
            "device": device,
            "params_dtype": torch.float32,
        }
        self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, group, init_method=normal, name="table", **options)
        self.head = VocabParallelHead(VOCABULARY, HIDDEN, group, weight=self.embedding.weight, **options)
        if late is not None:  # the mesh is known only after construction
            self.embedding.set_device_mesh(late)
            self.head.set_device_mesh(late)

    def forward(self, tokens: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens)
        logits = self.head(hidden * torch.linspace(0.5, 1.5, HIDDEN))
        loss = vocab_parallel_cross_entropy(logits, tokens.roll(-1, 0), group, vocabulary_size=VOCABULARY)
        return hidden, loss


def normal(weight: Tensor) -> None:
    nn.init.normal_(weight)


def train(
    group: Any, sequence_parallel: bool = False, late: Any = None, shard: Any = None, device: str = "cpu"
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TinyModel(group, sequence_parallel, late, device)
    if shard is not None:
        fully_shard(model, mesh=shard)
    if device == "meta":
        materialize_(model, device="cpu")
    assert model.head.weight is model.embedding.weight
    start = model.embedding.weight.detach().clone()
    hidden, loss = model(tokens_and_input()[0], group if late is None else late)
    loss.backward()
    grad = model.embedding.weight.grad
    assert grad is not None
    if isinstance(start, DTensor):
        assert isinstance(grad, DTensor)
        start, grad = start.full_tensor(), grad.full_tensor()
    return {"start": start, "hidden": hidden.detach(), "loss": loss.detach(), "grad": grad}


def head_alone(group: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The input's gradient is the sum over all ranks' columns."""
    torch.manual_seed(0)
    head = VocabParallelHead(
        VOCABULARY, HIDDEN, group, pad_to_multiple=MULTIPLE, init_method=normal, name="table", device="cpu"
    )
    x = tokens_and_input()[1].to(dtype).requires_grad_()
    logits = head(x)
    finite = logits.detach().isfinite()
    logits.masked_fill(~finite, 0).float().square().sum().backward()
    assert x.grad is not None and head.weight.grad is not None
    return {"logits": logits.detach(), "dx": x.grad, "dw": head.weight.grad}


def work(rank: int) -> dict[str, Any]:
    """Every case on groups of 2 and of 4."""
    results: dict[str, Any] = {}
    for size in SIZES:
        mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("dp", "tp"))
        tp, group = mesh["tp"], mesh["tp"].get_group()
        me = dist.get_rank(group)
        for name in LOSSES:
            logits, targets, options = loss_inputs(name)
            part = logits.chunk(size, dim=-1)[me]
            results[f"loss {name} {size}"] = loss_and_grad(part, targets, tp if name == "plain" else group, options)
        results[f"model {size}"] = train(group)
        results[f"model sp {size}"] = train(group, sequence_parallel=True)
        results[f"model mesh {size}"] = train(tp)
        results[f"model late {size}"] = train(None, late=tp)
        results[f"model fsdp {size}"] = train(tp, shard=mesh["dp"])
        results[f"meta {size}"] = train(tp, shard=mesh["dp"], device="meta")
        for dtype in (torch.float32, torch.bfloat16):
            results[f"head {dtype} {size}"] = head_alone(group, dtype)
        # DTensor logits, as torch's ColwiseParallel gives them.
        logits, targets, _ = loss_inputs("plain")
        split = DTensor.from_local(logits.chunk(size, dim=-1)[me], tp, [vocabulary.Shard(2)])
        results[f"dtensor {size}"] = vocab_parallel_cross_entropy(split, targets)
        torch.manual_seed(0)
        copied = copy.deepcopy(TinyModel(group).embedding)
        results[f"copy {size}"] = copied(tokens_and_input()[0]).detach()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, WORLD, tmp_path_factory.mktemp("ranks"))


def close(a: Tensor, b: Tensor, bar: float) -> bool:
    return bool((a.double() - b.double()).norm() <= bar * b.double().norm() + 1e-12)


# --------------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("name", LOSSES)
def test_one_rank_gives_the_loss_and_gradient_of_torch_in_float64(name: str) -> None:
    logits, targets, options = loss_inputs(name)
    loss, grad = loss_and_grad(logits, targets, None, options)
    expected, expected_grad = float64_loss(logits, targets, options)
    bar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[logits.dtype]
    assert close(loss, expected, min(bar, 1e-6)) and close(grad, expected_grad, bar)
    assert grad.dtype == logits.dtype and loss.dtype == torch.promote_types(logits.dtype, torch.float32)


def test_gradcheck() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, -100, 3, 1])
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_cross_entropy(x, targets, None, -100, 0.1, 0.01, "none", 7), logits, atol=1e-8
    )


@pytest.mark.strict
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    for rows, width in ((1, 100_003), (5, 50_257), (70, 2_001), (70_001, 3)):
        logits = torch.randn(rows, width) * 4
        targets = torch.randint(width, (rows,))
        options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
        torch.set_num_threads(1)
        once = loss_and_grad(logits, targets, None, options)
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            again = loss_and_grad(logits, targets, None, options)
            assert all(torch.equal(a, b) for a, b in zip(once, again)), (rows, width, threads)


def test_all_tokens_ignored_gives_zero_and_no_gradient() -> None:
    loss, grad = loss_and_grad(torch.full((3, 8), float("nan")), torch.full((3,), -100), None, {})
    assert loss == 0 and not grad.any()
    loss, grad = loss_and_grad(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long), None, {})
    assert loss == 0 and grad.shape == (0, 8)


def test_an_ignored_row_of_nan_does_not_spread() -> None:
    logits = torch.randn(3, 8)
    logits[1] = float("nan")
    loss, grad = loss_and_grad(logits, torch.tensor([1, -100, 2]), None, {})
    assert loss.isfinite() and grad.isfinite().all() and not grad[1].any()


def test_logits_of_minus_infinity_are_never_chosen() -> None:
    logits = torch.randn(4, 8)
    logits[:, 5] = float("-inf")
    loss, grad = loss_and_grad(logits, torch.tensor([0, 1, 2, 3]), None, {})
    assert loss.isfinite() and not grad[:, 5].any() and grad.isfinite().all()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, options = loss_inputs("all")
    whole = loss_and_grad(logits, targets, None, options)
    monkeypatch.setitem(chunks.CHUNK, "cpu", 5 * WIDTH)
    parts = loss_and_grad(logits, targets, None, options)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


def test_forward_keeps_no_second_copy_of_the_logits() -> None:
    logits = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        vocab_parallel_cross_entropy(logits, torch.zeros(64, dtype=torch.long))
    others = [t for t in saved if t.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert len(others) < len(saved) and sum(t.numel() for t in others) < 64 * 10


def test_embedding_and_head_are_torchs_own_on_one_rank() -> None:
    tokens, x = tokens_and_input()
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, pad_to_multiple=MULTIPLE, device="cpu")
    assert embedding.weight.shape == (WIDTH, HIDDEN) and not embedding.weight[VOCABULARY:].any()
    out = embedding(tokens)
    out.square().sum().backward()
    plain = embedding.weight.detach().clone().requires_grad_()
    expected = functional.embedding(tokens, plain)
    expected.square().sum().backward()
    assert torch.equal(out, expected) and embedding.weight.grad is not None and plain.grad is not None
    assert torch.allclose(embedding.weight.grad, plain.grad, rtol=1e-6)
    head = VocabParallelHead(VOCABULARY, HIDDEN, weight=embedding.weight, pad_to_multiple=MULTIPLE)
    logits = head(x)
    assert torch.allclose(logits[..., :VOCABULARY], x @ plain[:VOCABULARY].T, atol=1e-6)
    assert logits[..., VOCABULARY:].isneginf().all() and "padding=3" in repr(head)


def test_a_frequent_token_adds_up_its_gradients_in_float32() -> None:
    embedding = VocabParallelEmbedding(4, 2, params_dtype=torch.bfloat16, device="cpu")
    embedding(torch.ones(2000, dtype=torch.long)).sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad[1, 0] == 2000


def test_the_seed_and_the_name_choose_the_first_weights() -> None:
    def weight(seed: int, name: str | None = None) -> Tensor:
        torch.manual_seed(seed)
        return VocabParallelEmbedding(64, 8, device="cpu", name=name).weight.detach()

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))
    assert not torch.equal(weight(1, "a"), weight(1, "b"))


def test_mistakes_are_named() -> None:
    embedding = VocabParallelEmbedding(10, 4, device="cpu")
    with pytest.raises(ValueError, match=r"Token 10 is outside the vocabulary \[0, 10\)"):
        embedding(torch.tensor([1, 10]))
    with pytest.raises(ValueError, match="integer tokens"):
        embedding(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="last dimension of 4"):
        VocabParallelHead(10, 4, device="cpu")(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"needs a weight of shape \(12, 4\)"):
        VocabParallelHead(12, 4, weight=embedding.weight)
    logits = torch.zeros(2, 8)
    for targets, options, message in (
        ([1, 8], {}, "Target 8 is outside"),
        ([1, 7], {"vocabulary_size": 7}, "Target 7 is outside"),
        ([1, 2, 3], {}, r"need targets of shape \(2,\)"),
        ([1, 2], {"reduction": "avg"}, "one of mean, sum, none"),
        ([1, 2], {"label_smoothing": 2.0}, "between 0 and 1"),
        ([1, 2], {"vocabulary_size": 9}, "between 1 and the 8 logits"),
    ):
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(logits, torch.tensor(targets), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_split_logits_give_the_loss_and_gradient_of_one_rank(name: str, size: int, ranks: list[dict[str, Any]]) -> None:
    logits, targets, options = loss_inputs(name)
    loss, grad = loss_and_grad(logits, targets, None, options)
    for rank, results in enumerate(ranks):
        got, got_grad = results[f"loss {name} {size}"]
        bar = 1e-12 if logits.dtype == torch.float64 else 1e-6
        assert close(got, loss, bar)
        assert close(got_grad, grad.chunk(size, dim=-1)[rank % size], 4e-3 if grad.dtype == torch.bfloat16 else 1e-6)
        assert torch.equal(
            got, ranks[rank - rank % size][f"loss {name} {size}"][0]
        )  # bit for bit the same on the group
    assert torch.equal(ranks[0][f"dtensor {size}"].detach(), ranks[0][f"loss plain {size}"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["model", "model sp", "model mesh", "model late", "model fsdp", "meta"])
def test_a_tied_model_starts_and_learns_as_on_one_rank(kind: str, size: int, ranks: list[dict[str, Any]]) -> None:
    one = train(None, device="meta" if kind == "meta" else "cpu")
    for rank, results in enumerate(ranks):
        got, me = results[f"{kind} {size}"], rank % size
        split = kind in ("model", "model sp")
        start, grad = (t.chunk(size)[me] if split else t for t in (one["start"], one["grad"]))
        hidden = one["hidden"].chunk(size)[me] if kind == "model sp" else one["hidden"]
        assert torch.equal(got["start"], start) and torch.equal(got["hidden"], hidden)
        assert close(got["loss"], one["loss"], 1e-6) and close(got["grad"], grad, 1e-5)
        assert kind == "meta" or torch.equal(results[f"copy {size}"], one["hidden"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_input_gradient_is_summed_over_ranks(
    dtype: torch.dtype, size: int, ranks: list[dict[str, Any]]
) -> None:
    one = head_alone(None, dtype)
    for rank, results in enumerate(ranks):
        got, me, bar = results[f"head {dtype} {size}"], rank % size, 1e-6 if dtype == torch.float32 else 1e-2
        assert torch.equal(got["logits"], one["logits"].chunk(size, dim=-1)[me])
        assert close(got["dx"], one["dx"], bar) and close(got["dw"], one["dw"].chunk(size)[me], bar)


def test_a_vocabulary_that_does_not_divide_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "size_of", lambda group: 4)
    with pytest.raises(ValueError, match="37 cannot be split over 4 .* Pass pad_to_multiple=4"):
        VocabParallelEmbedding(37, 4, device="cpu")
