"""`PackedDocuments`: several documents in one row of tokens, each of which attends to itself only.

What attention needs of it differs by device. The reference takes a dense mask [b, 1, s, s], made once for all layers. On a GPU no such
tensor is made: kernels take the cumulative lengths of the documents, or the first and last position of each token's document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava import torch_private


class PackedDocuments:
    """Where documents lie in a batch of rows. Give it as `attention_mask`, with the mask type "arbitrary": causal, document by document.

    documents [b, s]: the number of each token's document; those of one document lie next to each other.
    device: where attention runs; that of `documents` if not given. If `documents` is on the CPU, the number of documents and their
    longest are known without asking the GPU, which lets it use the fastest kernels and never waits for it: make it there. If it is
    on the GPU already, nothing is read back, and a kernel that does not need to know runs.

        >>> packed = PackedDocuments(torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]]))
        >>> packed.cu_seqlens.tolist(), packed.longest
        ([0, 3, 4, 5, 8], 3)
        >>> DotProductAttention(4, 16, attn_mask_type="arbitrary")(q, k, v, attention_mask=packed)
    """

    # Not a dataclass, and without a method `to`: FSDP and DDP take apart, cast or move what they know how to.

    cu_seqlens: Tensor | None
    """int32 [documents + 1], where documents begin in the rows laid end to end; None if `documents` came from a GPU."""
    longest: int | None
    """Tokens of the longest document; None with cu_seqlens."""

    def __init__(self, documents: Tensor, device: torch.device | str | None = None) -> None:
        if documents.dim() != 2 or documents.is_floating_point():
            raise ValueError(
                f"documents must be integers [batch, tokens], the number of each token's document; got {documents.dtype} "
                f"{tuple(documents.shape)}."
            )
        to = documents.device if device is None else torch.device(device)
        self.batch, self.length = documents.shape
        self.cu_seqlens, self.longest = None, None
        if _readable(documents):
            offsets = _cumulative_lengths(documents)
            _check_runs(documents, offsets)
            self.longest = int((offsets[1:] - offsets[:-1]).max())
            self.cu_seqlens = _sent(offsets, to)
        self.documents = _sent(documents, to)
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._allowed: Tensor | None = None
        if to.type == "cpu":
            self._allowed = ~document_mask(self.documents)

    @staticmethod
    def of(documents: Tensor | PackedDocuments | None, device: torch.device) -> PackedDocuments | None:
        """What a model is given, as its layers take it on `device`."""
        if isinstance(documents, Tensor):
            return PackedDocuments(documents, device)
        if documents is not None and documents.documents.device.type != device.type:
            raise ValueError(
                f"PackedDocuments is on {documents.documents.device}, the tokens are on {device}: "
                f"PackedDocuments(documents, {str(device)!r})."
            )
        return documents

    @property
    def allowed(self) -> Tensor:
        """bool [b, 1, s, s], True where a token may look. Made once; on a GPU only where no kernel does without it."""
        if self._allowed is None:
            self._allowed = ~document_mask(self.documents)
        return self._allowed

    def bounds(self) -> tuple[Tensor, Tensor]:
        """int32 [b, s] each: the first position of each token's document in its row, and the one after its last. Made once."""
        if self._bounds is None:
            self._bounds = document_bounds(self.documents)
        return self._bounds

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Names a batch that these documents do not describe."""
        if (batch, queries) != (self.batch, self.length) or queries != keys:
            raise ValueError(
                f"PackedDocuments of {self.batch} rows of {self.length} tokens does not fit {batch} rows of {queries} queries and "
                f"{keys} keys."
            )


def document_mask(documents: Tensor) -> Tensor:
    """documents [b, s] -> [b, 1, s, s], True where a token may not look: at later tokens and at other documents.

    >>> document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
    [[0, 1, 1], [0, 0, 1], [1, 1, 0]]
    """
    s = documents.shape[1]
    later = torch.ones(s, s, dtype=torch.bool, device=documents.device).triu_(1)
    return (later | (documents[:, :, None] != documents[:, None, :]))[:, None]


def document_positions(documents: Tensor) -> Tensor:
    """documents [b, s] -> [b, s]: the position of each token in its document.

    >>> document_positions(torch.tensor([[0, 0, 0, 1, 1, 2]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - torch.where(_is_first(documents), index, 0).cummax(dim=1).values


def document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """documents [b, s] -> int32 [b, s] each: where each token's document begins in its row, and where the next one does.

    >>> [bound.tolist() for bound in document_bounds(torch.tensor([[0, 0, 0, 1, 1, 2]]))]
    [[[0, 0, 0, 3, 3, 5]], [[3, 3, 3, 5, 5, 6]]]
    """
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device).expand_as(documents)
    first = _is_first(documents)
    start = torch.where(first, index, 0).cummax(dim=1).values
    # The next beginning after each token: from the right, the smallest index that is a first one.
    following = torch.full_like(index, length)
    following[:, :-1] = torch.where(first[:, 1:], index[:, 1:], length)
    end = following.flip(1).cummin(dim=1).values.flip(1)
    return start.to(torch.int32), end.to(torch.int32)


def _readable(documents: Tensor) -> bool:
    """Whether its values can be looked at without waiting for anybody."""
    if documents.device.type != "cpu" or documents.numel() == 0:
        return False
    return not torch.compiler.is_compiling() and not torch_private.is_fake(documents)


def _is_first(documents: Tensor) -> Tensor:
    """Where a document begins, bool [b, s]; always at the beginning of a row."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first


def _cumulative_lengths(documents: Tensor) -> Tensor:
    """int32 [documents + 1], on the CPU."""
    starts = _is_first(documents).flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([documents.numel()])]).to(torch.int32)


def _check_runs(documents: Tensor, offsets: Tensor) -> None:
    """A number that comes back later in its row would be one document for a dense mask and two for cumulative lengths."""
    if bool((documents[:, 1:] >= documents[:, :-1]).all()):
        return  # in order, as they usually are: quicker than to sort them
    ordered = documents.sort(dim=1).values
    distinct = int((ordered[:, 1:] != ordered[:, :-1]).sum()) + documents.shape[0]
    if distinct != offsets.numel() - 1:
        raise ValueError(
            "documents must lie end to end: a number comes back after another one in the same row. Number them in order, "
            "for example [0, 0, 1, 2, 2]."
        )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On `device`, through pinned memory, so that the copy to a GPU is queued and not waited for."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
