"""Batches: a function of (seed, step) alone, every sequence once an epoch, shares of a mixture as asked."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from ottava.train.data import IGNORED, MIXTURE, Batch, Data, Prefetch
from ottava.train.token_file import write_token_file

LENGTH = 8


def make(tmp_path, name: str, sequences: int, first: int = 0, document: int = 8 * 4 - 1):
    """Tokens count up, so that a token says where in the file it came from."""
    tokens = np.arange(first, first + sequences * LENGTH + 1)
    pieces = [tokens[i : i + document] for i in range(0, len(tokens), document)]
    return write_token_file(tmp_path / name, pieces, 40_000, "count", end_token=39_999)


@pytest.fixture
def file(tmp_path):
    return make(tmp_path, "a.tokens", 100)


def starts(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tokens.tolist()]


def test_targets_are_the_next_tokens(file):
    batch = Data([file], LENGTH).batch(step=3, size=4)
    assert batch.tokens.shape == batch.targets.shape == (4, LENGTH) and batch.documents is None
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    tokens = file.tokens.tolist()
    for row, target in zip(batch.tokens.tolist(), batch.targets.tolist()):
        where = next(i for i in range(len(tokens)) if tokens[i : i + LENGTH] == row)
        assert tokens[where + LENGTH] == target[-1]


def test_an_epoch_sees_every_sequence_once_and_the_next_in_another_order(file):
    data = Data([file], LENGTH, seed=5)
    n = len(data)
    first, second = starts(data.samples(range(n))), starts(data.samples(range(n, 2 * n)))
    assert len(set(first)) == n and set(first) == set(second) and first != second
    assert starts(Data([file], LENGTH, seed=6).samples(range(n))) != first


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_the_number_of_ranks_and_microbatches_does_not_change_a_step(file, ranks):
    data = Data([file], LENGTH, seed=5, document_mask=True)
    whole = data.batch(step=7, size=12)
    parts = [m for rank in range(ranks) for m in data.batch(7, 12, (rank, ranks)).split(1)]
    for name in ("tokens", "targets", "documents"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


def test_a_restart_continues_where_it_was(file):
    before = [Data([file], LENGTH, seed=5).batch(step, 6).tokens for step in range(40)]
    again = Data([file], LENGTH, seed=5)
    for step in (39, 17, 18, 0):
        assert torch.equal(again.batch(step, 6).tokens, before[step])


def test_validation_and_training_share_nothing(file):
    splits = {}
    for seed in (1, 2):
        train = Data([file], LENGTH, seed, split="train", validation_fraction=0.1)
        held = Data([file], LENGTH, seed, split="validation", validation_fraction=0.1)
        splits[seed] = (set(starts(train.samples(range(len(train))))), set(starts(held.samples(range(len(held))))))
        assert len(held) == 10 and not splits[seed][0] & splits[seed][1]
        assert len(splits[seed][0] | splits[seed][1]) == len(Data([file], LENGTH))
    assert splits[1] == splits[2]  # the split does not depend on the run's seed


def test_a_sweep_sees_each_validation_sequence_once(file):
    held = Data([file], LENGTH, split="validation", validation_fraction=0.25)
    rows = [row for batch in held.sweep(size=5) for row in starts(batch)]
    assert len(rows) == len(set(rows)) == len(held) // 5 * 5
    assert len(list(held.sweep(5, batches=2))) == 2


def test_a_mixture_has_exactly_its_shares(tmp_path):
    files = [make(tmp_path, "a", 300), make(tmp_path, "b", 50, 10_000), make(tmp_path, "c", 7, 20_000)]
    data = Data(files, LENGTH, seed=3, weights=[0.5, 0.3, 0.2])
    which, where = data.locate(np.arange(2 * MIXTURE))
    for block in (which[:MIXTURE], which[MIXTURE:]):
        assert np.bincount(block).tolist() == [4096, 2458, 1638]
    assert np.bincount(which[:400]) == pytest.approx([200, 120, 80], abs=40)  # mixed from the start
    small = where[:MIXTURE][which[:MIXTURE] == 2]  # 1638 turns of 7 sequences
    assert np.unique(small, return_counts=True)[1].tolist() == [234] * 7
    again = data.locate(np.array([5, 9000, 123]))
    assert np.array_equal(again[0], which[[5, 9000, 123]]) and np.array_equal(again[1], where[[5, 9000, 123]])


def test_without_weights_a_mixture_is_the_files_together(tmp_path):
    data = Data([make(tmp_path, "a", 300), make(tmp_path, "b", 100)], LENGTH)
    which, _ = data.locate(np.arange(MIXTURE))
    assert np.bincount(which) / MIXTURE == pytest.approx([0.75, 0.25], abs=0.01)


def test_document_masks_name_documents_and_leave_out_what_cannot_be_known(tmp_path):
    file = write_token_file(tmp_path / "d", [[1, 2], [3], [4, 5, 6, 7]], 10, "t", end_token=9)  # 1 2 9 3 9 4 5 6 7 9
    batch = Data([file], 9, document_mask=True).batch(0, 1)
    assert batch.tokens.tolist() == [[1, 2, 9, 3, 9, 4, 5, 6, 7]]
    assert batch.documents is not None and batch.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert batch.targets.tolist() == [[2, 9, IGNORED, 9, IGNORED, 5, 6, 7, 9]]
    packed = batch.to("meta").packed()  # as for a GPU: found on the host
    assert packed.documents.device.type == "meta"
    assert (packed.longest, batch.packed().cu_seqlens.tolist()) == (4, [0, 3, 5, 9])


def test_mistakes_are_explained(tmp_path, file):
    other = write_token_file(tmp_path / "o", [range(90)], 100, "other", end_token=99)
    for call, message in [
        (lambda: Data([file, other], LENGTH), "different tokenizers"),
        (lambda: Data([other], 100), r"has 0 sequences of 100 tokens \(91 tokens\), of which train gets none"),
        (lambda: Data([], LENGTH), "at least one token file"),
        (lambda: Data([file], LENGTH, weights=[1, 2]), "1 files need as many weights, got 2"),
        (lambda: Data([file, file], LENGTH, weights=[1, 1e-9]), "share below 1/8192"),
        (lambda: Data([file], LENGTH, split="test"), "'train' or 'validation'"),
        (lambda: Data([file], LENGTH).batch(0, 10, (0, 4)), "10 samples cannot be shared by 4 ranks"),
        (lambda: Data([file], LENGTH).batch(0, 10).split(4), "10 rows cannot be split into microbatches of 4"),
        (lambda: Data([tmp_path / "none"], LENGTH), "none cannot be read"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_prefetch_gives_results_in_order_and_runs_ahead():
    made = []
    with Prefetch(lambda step: made.append(step) or step * step, start=5, depth=3) as results:
        assert [next(results) for _ in range(4)] == [25, 36, 49, 64]
        deadline = time.monotonic() + 5
        while len(made) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made[:8] == list(range(5, 13)) and len(made) <= 4 + 3 + 1
    assert not [t for t in threading.enumerate() if t.name == "ottava data"]
    with pytest.raises(StopIteration):
        next(results)


def test_prefetch_makes_the_next_result_as_soon_as_one_is_taken_early():
    made = threading.Semaphore(0)

    def make(step: int) -> int:
        made.release()
        if step == 3:
            raise ValueError("d.tokens is damaged")
        return step

    with Prefetch(make, depth=1) as results:
        assert made.acquire(timeout=20) and made.acquire(timeout=20)  # one is there, one waits for room
        results.take_early()
        assert made.acquire(timeout=20), "nobody asked for a result yet, but there was room"
        results.take_early()  # at most one
        assert [next(results), next(results), next(results)] == [0, 1, 2]
        assert made.acquire(timeout=20)
        results.take_early()  # a failure waits until its result is asked for
        with pytest.raises(ValueError, match="d.tokens is damaged"):
            next(results)


def test_prefetch_raises_where_the_result_would_have_come():
    def make_or_fail(step: int) -> int:
        if step == 2:
            raise ValueError("c.tokens is damaged")
        return step

    with Prefetch(make_or_fail) as results:
        assert [next(results), next(results)] == [0, 1]
        for _ in range(2):  # and again, instead of waiting for ever
            with pytest.raises(ValueError, match="c.tokens is damaged"):
                next(results)
