"""Head and loss as one op on a GPU: torch's loss and gradients in float64, few launches, and no float32 tensor of all logits."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional

import ottava
from ottava import recipe
from ottava.distributed.vocabulary import VocabParallelHead, vocab_parallel_cross_entropy
from ottava.kernels import head_loss as op
from ottava.models import Llama, LlamaConfig
from ottava.models.head_loss import head_loss

pytestmark = pytest.mark.gpu

# words, multiple that they are padded to, tokens
LARGE, ODD, PADDED = (128256, 1, 520), (1003, 1, 300), (1003, 128, 300)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "ignoring a word": {"ignore_index": 7, "z_loss": 1e-2},
}


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, hidden: int = 64
) -> tuple[VocabParallelHead, Tensor, Tensor]:
    words, multiple, tokens = shape
    generator = torch.Generator().manual_seed(words + tokens)
    x = torch.randn(tokens, hidden, generator=generator).to("cuda", dtype).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator)
    targets[::7], targets[3], targets[5] = -100, 7, words - 1
    head = VocabParallelHead(words, hidden, pad_to_multiple=multiple, device="cuda", params_dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.3)
    return head, x, targets.cuda()


def in_float64(head: VocabParallelHead, x: Tensor, targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight = x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    ignore, words = options.get("ignore_index", -100), head.num_embeddings
    targets = targets.masked_fill(targets == -100, ignore)
    logits = x @ weight[:words].t()
    smoothing = options.get("label_smoothing", 0.0)
    losses = functional.cross_entropy(logits, targets, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (targets != ignore)
    (losses.sum() * 0.25).backward()
    assert x.grad is not None and weight.grad is not None
    return losses.sum().detach(), x.grad, weight.grad


def close(found: tuple[Any, ...], wanted: tuple[Tensor, ...], bars: tuple[float, ...]) -> None:
    for a, b, bar in zip(found, wanted, bars, strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm()).item()
        assert error <= bar, (error, bar)


BARS = {torch.float32: (1e-6, 2e-6, 2e-6), torch.bfloat16: (5e-4, 1e-2, 1e-2)}  # loss, dx, dweight


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("shape", [LARGE, ODD, PADDED], ids=["large", "odd", "padded"])
def test_loss_and_gradients_are_torchs_in_float64(shape, dtype, name, chunks):
    head, x, targets = inputs(shape, dtype)
    options = OPTIONS[name]
    if "ignore_index" in options:
        targets = targets.masked_fill(targets == -100, options["ignore_index"])
    wanted = in_float64(head, x, targets, options)
    loss = head_loss(head, x, targets, head.rows * -(-shape[2] // chunks), **options)
    (loss * 0.25).backward()
    assert x.grad is not None and head.weight.grad is not None
    assert loss.dtype == torch.float32 and x.grad.dtype == head.weight.grad.dtype == dtype
    close((loss.detach(), x.grad, head.weight.grad), wanted, BARS[dtype])
    ignored = targets == options.get("ignore_index", -100)
    assert not x.grad[ignored].any() and not head.weight.grad[head.num_embeddings :].any()


def test_only_what_is_wanted_is_made():
    head, x, targets = inputs(PADDED, torch.bfloat16)
    wanted = in_float64(head, x, targets, {})
    with torch.no_grad():
        close((head_loss(head, x, targets, 2**17),), wanted[:1], (5e-4,))
    head.weight.requires_grad_(False)
    (head_loss(head, x, targets, 2**17) * 0.25).backward()
    close((x.grad,), wanted[1:2], (1e-2,))
    head.weight.requires_grad_(True)
    (head_loss(head, x.detach(), targets, 2**17) * 0.25).backward()
    close((head.weight.grad,), wanted[2:], (1e-2,))


@pytest.mark.parametrize("smoothing, z_loss", [(0.1, 1e-3), (0.0, 0.0)])
def test_the_kernels_agree_with_the_reference_also_for_parts_of_a_vocabulary(smoothing, z_loss):
    for dtype, width, words in ((torch.float32, 1004, 1003), (torch.bfloat16, 20000, 12001), (torch.float16, 40, 37)):
        x = (torch.randn(9, width, device="cuda") * 4).to(dtype)
        targets = torch.randint(words, (9,), device="cuda")
        targets[2], targets[4], x[2] = -100, words + 3, float("nan")
        bars: dict[str, Any] = {"rtol": 1e-5 if dtype == torch.float32 else 1e-2, "atol": 1e-6, "equal_nan": True}
        whole = op.Terms(0, words, words, -100, smoothing, z_loss)
        ours, wanted = x.clone(), x.clone()
        losses, reference = op.loss_fused_(ours, targets, *whole), op._fused(wanted, targets, *whole)
        torch.testing.assert_close(losses, reference, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(ours, wanted, **bars)
        half = width // 2
        terms = [
            op.Terms(r * half, min(max(words - r * half, 0), half), words, -100, smoothing, z_loss) for r in range(2)
        ]
        parts = [x[:, :half], x[:, half:]]
        statistics = torch.stack([op.loss_statistics(p, targets, *t) for p, t in zip(parts, terms)])
        torch.testing.assert_close(
            op.loss_values(statistics, targets, *whole), reference, rtol=1e-5, atol=1e-5, equal_nan=True
        )
        grad = torch.rand(9, device="cuda")
        for rank in range(2):
            out = torch.empty(9, half, dtype=dtype, device="cuda")
            op.loss_gradient_(out, parts[rank], statistics, targets, grad, *terms[rank])
            scaled = (wanted[:, rank * half : (rank + 1) * half].float() * grad[:, None]).to(dtype)
            torch.testing.assert_close(out, scaled, **bars)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["float32", "bf16", "float64"])
def test_cross_entropy_of_logits_runs_by_the_kernels(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 50, 5000, generator=generator) * 3).to("cuda", dtype).requires_grad_()
    targets = torch.randint(4990, (3, 50), generator=generator).cuda()
    targets[1, 4] = -100
    weights = torch.rand(3, 50, generator=generator).cuda()
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "vocabulary_size": 4990}
    losses = vocab_parallel_cross_entropy(logits, targets, reduction="none", **options)
    (losses * weights).sum().backward()
    wide = logits.detach().double().requires_grad_()
    x = wide[..., :4990].flatten(0, 1)
    wanted = functional.cross_entropy(x, targets.flatten(), label_smoothing=0.1, reduction="none")
    wanted = wanted + 1e-3 * x.logsumexp(-1).square() * (targets.flatten() != -100)
    (wanted * weights.flatten()).sum().backward()
    bar = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]
    close((losses.flatten(), logits.grad), (wanted, wide.grad), (min(bar, 2e-6), bar))


def test_the_same_bits_every_time():
    head, x, targets = inputs(LARGE, torch.bfloat16)
    results = []
    for _ in range(3):
        x.grad = head.weight.grad = None
        loss = head_loss(head, x, targets, 2**25, z_loss=1e-3)
        loss.backward()
        results.append((loss.detach(), x.grad, head.weight.grad))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_more_than_two_billion_logits_in_one_chunk():
    words, tokens = 131072, 16500  # 2.16e9 logits, 4.3 GB
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(tokens, words, device="cuda", dtype=torch.bfloat16, generator=generator)
    targets = torch.randint(words, (tokens,), device="cuda", generator=generator)
    last = logits[-2:].double().requires_grad_()
    wanted = functional.cross_entropy(last, targets[-2:], reduction="none")
    wanted.sum().backward()
    losses = op.loss_fused_(logits, targets, 0, words, words, -100, 0.0, 0.0)
    close((losses[-2:], logits[-2:]), (wanted, last.grad), (1e-6, 4e-3))


def test_a_step_is_few_launches_and_holds_one_chunk_of_logits():
    words, hidden, tokens, chunks = 128256, 256, 4096, 4
    head, x, targets = inputs((words, 1, tokens), torch.bfloat16, hidden)
    most = words * tokens // chunks
    head_loss(head, x, targets, most).backward()  # compiles
    x.grad = head.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        head_loss(head, x, targets, most).backward()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    weights = words * hidden
    # A chunk of logits in bf16; or dweight in float32, in bf16 and dx; a tenth for what is small.
    assert peak <= 1.1 * (most * 2 + weights * 4 + 2 * tokens * hidden * 2) + 2**25, peak / (most * 2)
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("_fused_kernel" in name for name in kernels) == chunks, kernels
    assert len(kernels) <= 12 * chunks + 24, kernels


@pytest.mark.parametrize("tie", [False, True])
def test_a_models_loss_is_that_of_its_logits(tie):
    config = LlamaConfig(
        1000, 128, 256, layers=2, heads=4, kv_heads=2, max_length=64, tie_embeddings=tie, pad_vocab_to=128
    )
    model = Llama(config, device="cuda", params_dtype=torch.bfloat16)
    tokens = torch.randint(1000, (2, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs_, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3:9] = -100
    results = []
    for max_logits in (2**29, 2**15):
        model.zero_grad()
        loss = model.loss(inputs_, targets, max_logits=max_logits)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    model.zero_grad()
    hidden = model.hidden(inputs_, None, None)
    logits = model.head(hidden)[..., :1000].float()
    functional.cross_entropy(logits.flatten(0, 1), targets.t().flatten()).backward()
    for loss, *grads in results:
        assert abs(loss.item() - functional.cross_entropy(logits.flatten(0, 1), targets.t().flatten()).item()) < 2e-3
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            close((grad,), (parameter.grad,), (2e-2,))


RECIPES = [recipe.Float8CurrentScaling(), recipe.DelayedScaling(), recipe.Float8BlockScaling()]


@pytest.mark.parametrize("chosen", RECIPES, ids=lambda r: type(r).__name__)
def test_a_quantized_head_is_close_to_one_in_bf16(chosen):
    head, x, targets = inputs((2048, 1, 700), torch.bfloat16, hidden=256)
    wanted = in_float64(head, x, targets, {})
    head.quantized = True
    with ottava.autocast(recipe=chosen):
        loss = head_loss(head, x, targets, 256 * 2048)
    (loss * 0.25).backward()
    assert x.grad is not None and head.weight.grad is not None
    close((loss.detach(), x.grad, head.weight.grad), wanted, (2e-2, 1e-1, 1e-1))


# ---------------------------------------------------------------------------------------------------- two ranks on one GPU

SPLIT = (2046, 128, 512)  # words, padded to 2048: the second rank has two rows of padding


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for sequence_parallel in (False, True):
        for quantized in (False, True):
            head, x, targets = inputs(SPLIT, torch.bfloat16, hidden=256)
            head.set_tensor_parallel_group(dist.group.WORLD)
            head.sequence_parallel, head.quantized = sequence_parallel, quantized
            if sequence_parallel:
                x = x.detach().chunk(2)[rank].clone().requires_grad_()
            with ottava.autocast(enabled=quantized, recipe=recipe.Float8CurrentScaling()):
                loss = head_loss(head, x, targets, head.rows * 200, **OPTIONS["all"])
            (loss * 0.25).backward()
            assert x.grad is not None and head.weight.grad is not None
            results[sequence_parallel, quantized] = [t.detach().cpu() for t in (loss, x.grad, head.weight.grad)]
    torch.save(results, f"{folder}/results-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_a_vocabulary_over_two_ranks():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder,), nprocs=2)
        one, two = (torch.load(f"{folder}/results-{rank}", weights_only=False) for rank in range(2))  # our own files
    wanted = tuple(t.cpu() for t in in_float64(*inputs(SPLIT, torch.bfloat16, hidden=256), OPTIONS["all"]))
    for sequence_parallel, quantized in one:
        (loss, dx, dweight), (other, dx2, dweight2) = (
            one[sequence_parallel, quantized],
            two[sequence_parallel, quantized],
        )
        assert torch.equal(loss, other)
        found = (loss, torch.cat([dx, dx2]) if sequence_parallel else dx2, torch.cat([dweight, dweight2]))
        close(found, wanted, (2e-2, 1e-1, 1e-1) if quantized else (5e-4, 1e-2, 1e-2))


@pytest.mark.parametrize("size", [1, 4095, 4096 * 3 + 5])
def test_a_scaled_copy_has_the_bits_of_a_product_that_is_rounded(size):
    x, factor = torch.randn(size, device="cuda"), torch.tensor(0.3, device="cuda")
    x[0] = float("nan")
    for dtype in (torch.bfloat16, torch.float32):
        found = torch.ops.ottava.scaled_copy(x, factor, dtype)
        torch.testing.assert_close(found, (x * factor).to(dtype), rtol=0, atol=0, equal_nan=True)
