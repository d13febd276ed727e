"""Batches of a run: which tokens step N trains on, as a function of (seed, N) alone.

A source is a token file, cut into sequences of `length` tokens (and one more, the last target). Sample number g of the run goes to
a source, and there to a sequence, by two keyed permutations (order.py); step N is the samples N B ... (N+1) B - 1 of a global
batch of B. Nothing is counted while training runs, so the number of ranks, workers and restarts cannot change what is seen, and
in an epoch each sequence is seen exactly once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ottava.nn.attention_documents import PackedDocuments
from ottava.train.order import Permutation
from ottava.train.token_file import TokenFile

MIXTURE = 8192
"""Samples in which each source has exactly its share; weights are rounded to 1/8192."""
IGNORED = -100
"""A target that does not count: the first token of the next document cannot be known."""

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """tokens [b, s], targets [b, s] int64 (the tokens, one later), and with document masks the number of each token's document,
    which stays on the CPU."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None

    def to(self, device: torch.device | str) -> Batch:
        """On another device. From pinned memory the copy does not wait. `documents` stays, see `packed`."""
        return Batch(
            self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), self.documents
        )

    def packed(self) -> PackedDocuments | None:
        """The documents as attention takes them where the tokens are. Their lengths are found on the host: no GPU is waited for."""
        return None if self.documents is None else PackedDocuments(self.documents, self.tokens.device)

    def pin_memory(self) -> Batch:
        """In memory that a GPU can copy from by itself."""
        return Batch(*[None if t is None else t.pin_memory() for t in self._tensors()])  # type: ignore[arg-type]

    def split(self, rows: int) -> list[Batch]:
        """Microbatches of `rows` rows.

        >>> [m.tokens.shape[0] for m in batch.split(2)]
        """
        if self.tokens.shape[0] % rows:
            raise ValueError(f"A batch of {self.tokens.shape[0]} rows cannot be split into microbatches of {rows}.")
        pieces = [[None] * (self.tokens.shape[0] // rows) if t is None else t.split(rows) for t in self._tensors()]
        return [Batch(*piece) for piece in zip(*pieces)]  # type: ignore[arg-type]

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.tokens, self.targets, self.documents


# ----------------------------------------------------------------------------------------------------------------- sources


class Source:
    """The sequences of one token file that belong to a split.

    The split is drawn over sequences by a fixed permutation, so it depends neither on the run's seed nor on the order of files.
    """

    def __init__(self, file: TokenFile, length: int, split: str, validation: float) -> None:
        self.file, self.length = file, length
        self.sequences = (file.count - 1) // length
        held_out = min(max(round(self.sequences * validation), 1), self.sequences) if validation else 0
        kept = self.sequences - held_out
        self.first, self.size = (0, kept) if split == "train" else (kept, held_out)
        if self.size < 1:
            raise ValueError(
                f"{file.path} has {self.sequences} sequences of {length} tokens ({file.count} tokens), of which {split} gets none: "
                "use a longer text, shorter sequences, or another validation_fraction."
            )
        self._split = Permutation(self.sequences, ("split", length))

    def place(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the file the sequences 0 <= number < size of this split begin, in tokens."""
        return self._split(self.first + numbers) * self.length

    def read(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """length + 1 tokens from `start` on, and the document of each."""
        stop = start + self.length + 1
        return self.file.read(start, stop), self.file.document_of(start, stop)


class Data:
    """What a run trains on, or validates on: samples 0, 1, 2, ... without end.

    files: token files, all of one tokenizer. weights: their shares of the samples (default: by number of tokens).
    document_mask: tokens see their own document only, and no token is asked for the next document's first.

        >>> data = Data(["a.tokens", "b.tokens"], length=2048, seed=1234, weights=[0.7, 0.3])
        >>> batch = data.batch(step=0, size=64)                       # one process
        >>> mine = data.batch(step=0, size=64, part=(rank, ranks))    # its rows on one of several
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str] | TokenFile],
        length: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        split: str = "train",
        validation_fraction: float = 0.0,
        document_mask: bool = False,
    ) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', got {split!r}.")
        if not 0.0 <= validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must be at least 0 and below 1, got {validation_fraction}.")
        if length < 1:
            raise ValueError(f"length must be at least 1 token, got {length}.")
        if not files:
            raise ValueError("Data needs at least one token file.")
        opened = [file if isinstance(file, TokenFile) else TokenFile(file) for file in files]
        for file in opened[1:]:
            if (file.tokenizer, file.vocab_size) != (opened[0].tokenizer, opened[0].vocab_size):
                raise ValueError(f"Token files of different tokenizers cannot be mixed: {opened[0]} and {file}.")
        self.length, self.seed, self.document_mask = length, seed, document_mask
        self.vocab_size, self.tokenizer = opened[0].vocab_size, opened[0].tokenizer
        self.sources = [Source(file, length, split, validation_fraction) for file in opened]
        self._shares = _shares(weights, self.sources)  # samples of each source in MIXTURE
        self._starts = np.concatenate([[0], np.cumsum(self._shares)])

    def __len__(self) -> int:
        """Sequences in all sources."""
        return sum(source.size for source in self.sources)

    @property
    def identity(self) -> list[dict[str, Any]]:
        """What the files are, by size and content: a run keeps it, and goes on with no others."""
        return [source.file.identity for source in self.sources]

    def check_unchanged(self) -> None:
        """TokenFileError, with its name, for a file that is not what it was when it was opened."""
        for source in self.sources:
            source.file.check_unchanged()

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, first token there) of each sample number."""
        which, turn = self._turn(samples)
        where = np.empty_like(samples)
        for k, source in enumerate(self.sources):
            mine = np.flatnonzero(which == k)
            epochs, index = np.divmod(turn[mine], source.size)
            for epoch in np.unique(epochs):
                order = Permutation(source.size, ("order", self.seed, k, int(epoch)))
                now = epochs == epoch
                where[mine[now]] = source.place(order(index[now]))
        return which, where

    def _turn(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, how many samples of that source came before) of each sample number."""
        if len(self.sources) == 1:
            return np.zeros_like(samples), samples
        which, turn = np.empty_like(samples), np.empty_like(samples)
        blocks, index = np.divmod(samples, MIXTURE)
        for block in np.unique(blocks):
            here = blocks == block
            slot = Permutation(MIXTURE, ("mixture", self.seed, int(block)))(index[here])
            source = np.searchsorted(self._starts, slot, side="right") - 1
            which[here] = source
            turn[here] = block * self._shares[source] + slot - self._starts[source]
        return which, turn

    def samples(self, numbers: Sequence[int] | range | NDArray[np.int64]) -> Batch:
        """The samples of these numbers as a batch."""
        which, where = self.locate(np.asarray(numbers, dtype=np.int64))
        rows = [self.sources[k].read(start) for k, start in zip(which.tolist(), where.tolist())]
        tokens = torch.from_numpy(np.stack([row[0] for row in rows]))
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # a single row's slices would share memory
        if not self.document_mask:
            return Batch(inputs, targets, None)
        documents = torch.from_numpy(np.stack([row[1] for row in rows]))
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return Batch(inputs, targets, documents[:, :-1].clone())

    def batch(self, step: int, size: int, part: tuple[int, int] = (0, 1)) -> Batch:
        """Of the global batch of `size` samples of `step`, the rows of part (rank, ranks): a contiguous share."""
        rank, ranks = part
        if size % ranks or not 0 <= rank < ranks:
            raise ValueError(f"A global batch of {size} samples cannot be shared by {ranks} ranks (rank {rank}).")
        share = size // ranks
        first = step * size + rank * share
        return self.samples(range(first, first + share))

    def sweep(self, size: int, part: tuple[int, int] = (0, 1), batches: int | None = None) -> Iterator[Batch]:
        """Every sequence once, in batches of `size` as far as they are full; at most `batches`. For validation."""
        whole = max(len(self) // size, 1)
        for step in range(whole if batches is None else min(batches, whole)):
            yield self.batch(step, size, part)


def _shares(weights: Sequence[float] | None, sources: list[Source]) -> NDArray[np.int64]:
    """Weights in units of 1/MIXTURE that add up to 1: rounded down, and what is left to the largest remainders."""
    given = [float(source.size) for source in sources] if weights is None else list(weights)
    if len(given) != len(sources):
        raise ValueError(f"{len(sources)} files need as many weights, got {len(given)}.")
    if min(given) < 0 or not 0 < sum(given) < float("inf"):
        raise ValueError(f"Weights of a mixture must be positive numbers, got {given}.")
    exact = np.asarray(given) / sum(given) * MIXTURE
    shares = np.floor(exact).astype(np.int64)
    left = MIXTURE - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    for share, source in zip(shares, sources):
        if share == 0:
            raise ValueError(
                f"{source.file.path} has a share below 1/{MIXTURE} of the samples: give it a larger weight, or leave it out."
            )
    return shares


# ---------------------------------------------------------------------------------------------------------------- prefetch


class Prefetch(Generic[T]):
    """Calls `make(start)`, `make(start + 1)`, ... in a thread, `depth` ahead, and gives the results in order.

    An exception in the thread is raised where its result would have come. Close it, or use it in a `with` block.

        >>> with Prefetch(lambda step: data.batch(step, size=64), start=0) as batches:
        ...     for step in range(100):
        ...         batch = next(batches)
    """

    def __init__(self, make: Callable[[int], T], start: int = 0, depth: int = 2) -> None:
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=max(depth, 1))
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._taken: list[tuple[Any, BaseException | None]] = []
        self._thread = threading.Thread(target=self._run, args=(make, start), name="ottava data", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], T], step: int) -> None:
        while not self._closed.is_set():
            try:
                item: tuple[Any, BaseException | None] = (make(step), None)
            except BaseException as error:
                item = (None, error)
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return
            step += 1

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        if self._failure is None:
            value, self._failure = self._taken.pop() if self._taken else self._ready.get()
            if self._failure is None:
                return value
        raise self._failure

    def take_early(self) -> None:
        """Makes room for one more result if the next one is there. The thread, whose Python and the caller's take turns, then works
        now, and not when `next` is called."""
        if not self._taken and not self._ready.empty():
            self._taken.append(self._ready.get())

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
