"""Token files: the tokens of many documents in one file that is mapped, not read.

    bytes 0..7         magic, "OTTAVATK"
    bytes 8..11        version, little-endian uint32
    bytes 12..15       length of the JSON header that follows, little-endian uint32
    bytes 16..4095     JSON header: dtype, count, documents, vocab_size, tokenizer, end_token, crc32; padded with zeros
    bytes 4096..       tokens, `count` little-endian numbers of `dtype` (uint16, or uint32 for large vocabularies)
    after the tokens   ends of documents, `documents` little-endian uint64: document i is tokens[ends[i-1]:ends[i]]

Opening checks everything but the tokens themselves, which may be terabytes; `verify` reads them all. A token outside the
vocabulary is found when it is used. Files are written under another name and renamed, so a file that exists is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ottava.notices import warn_once
from ottava.untrusted.files import once_each, open_regular

MAGIC = b"OTTAVATK"
VERSION = 1
HEADER = 4096
SAMPLED_BLOCKS = 64
ENDS_BLOCK = 1 << 20
"""Documents whose ends are looked at at once."""
ENDS_READ = 512
"""Ends in a page: fewer are not worth another read."""
CRC_BLOCK = 1 << 24
MOST_VERIFIED = 64 << 30
"""Bytes that a run reads at once to know whether a file that was written to is what it was."""
_PREFIX = struct.Struct("<8sII")
_KEYS = {
    "dtype": str,
    "count": int,
    "documents": int,
    "vocab_size": int,
    "tokenizer": str,
    "end_token": int,
    "crc32": int,
}


class TokenFileError(ValueError):
    """A file that is not a whole token file. The message names it."""


def same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two `TokenFile.identity` are of the same content, as far as size, header and samples tell. A copy has another time.

    >>> same(TokenFile("a.tokens").identity, TokenFile("a.tokens").identity)
    True
    """
    return {**now, "modified": None} == {**before, "modified": None}


class TokenFile:
    """A token file, mapped into memory.

    >>> file = TokenFile("stdlib.tokens")
    >>> file.tokens[:4], file.count, file.vocab_size, file.tokenizer
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open_regular(
            self.path, TokenFileError
        )  # kept: all that is read is of this file, whatever gets its name
        header = _read_header(self.path, self._file)
        self.count: int = header["count"]
        self.documents: int = header["documents"]
        self.vocab_size: int = header["vocab_size"]
        self.tokenizer: str = header["tokenizer"]
        self.end_token: int = header["end_token"]
        self._crc32: int = header["crc32"]
        self._dtype = np.dtype(header["dtype"])
        self._ends_at = HEADER + self.count * self._dtype.itemsize
        expected, found = self._ends_at + 8 * self.documents, os.fstat(self._file.fileno()).st_size
        if found != expected:
            raise TokenFileError(
                f"{self.path} has {found} bytes, but {self.count} tokens and {self.documents} documents need {expected}: "
                "it was cut short or overwritten. Tokenize it again."
            )
        self.bytes = expected
        self._check_ends()
        self._stamp = self._written()
        self.identity: dict[str, Any] = self._identify()
        """Path, size, digests of the header (which has the checksum of all tokens) and of blocks all over the file, time of change."""

    @property
    def tokens(self) -> NDArray[Any]:
        """All of them, mapped. A process that touches a map of a file that was cut ends with SIGBUS: `read` does not."""
        return np.memmap(self._file, self._dtype, "r", HEADER, (self.count,))

    @property
    def ends(self) -> NDArray[Any]:
        """Where each document ends, in tokens; mapped as `tokens` is."""
        return np.memmap(self._file, "<u8", "r", self._ends_at, (self.documents,))

    def _check_ends(self) -> None:
        """Documents have to end one after the other, the last with the tokens. Looked at in blocks: a file may say that it has billions."""
        before = 0
        for first in range(0, self.documents, ENDS_BLOCK):
            ends = self._ends(first, min(first + ENDS_BLOCK, self.documents))
            if int(ends[-1]) > self.count or (np.diff(ends.astype(np.int64), prepend=before) <= 0).any():
                break
            before = int(ends[-1])
        if before != self.count:
            raise TokenFileError(
                f"{self.path} has documents whose ends are not in order: it is damaged. Tokenize it again."
            )

    def _ends(self, first: int, stop: int) -> NDArray[np.uint64]:
        """Where documents `first` to `stop` end, in tokens."""
        return np.frombuffer(self._pread(8 * (stop - first), self._ends_at + 8 * first), "<u8")

    def _written(self) -> tuple[int, int]:
        """Differs once somebody has written to the file."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _identify(self) -> dict[str, Any]:
        header = hashlib.blake2b(self._pread(HEADER, 0), digest_size=16)
        blocks = hashlib.blake2b(digest_size=16)
        for i in range(SAMPLED_BLOCKS):
            blocks.update(self._pread(min(4096, self.bytes), i * max(self.bytes - 4096, 0) // (SAMPLED_BLOCKS - 1)))
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "header": header.hexdigest(),
            "blocks": blocks.hexdigest(),
            "modified": os.fstat(self._file.fileno()).st_mtime_ns,
        }

    def check_unchanged(self) -> None:
        """TokenFileError if the file was cut or overwritten since it was opened.

        Samples of it are compared; and all of it is read, once, if its time of change says that somebody has written to it.
        """
        stamp = self._written()
        if not same(self._identify(), self.identity):
            raise TokenFileError(
                f"{self.path} was overwritten while it is read: what the run has seen is not what is there."
            )
        if stamp != self._stamp:
            self.verify_written()
            self._stamp = stamp

    def verify_written(self) -> None:
        """`verify`, after somebody has written to the file, if that takes no more than a minute or so; otherwise a warning."""
        if self.bytes <= MOST_VERIFIED:
            self.verify()
        else:
            warn_once(
                f"{self.path} was written to, and is too large to be read in between: samples of it are as they were. "
                "TokenFile(path).verify() reads all of it."
            )

    def _pread(self, count: int, offset: int) -> bytes:
        """Bytes of the file. A map would end the process by SIGBUS where a file was cut."""
        data = os.pread(self._file.fileno(), count, offset)
        if len(data) != count:
            raise self._cut()
        return data

    def _cut(self) -> TokenFileError:
        found = os.fstat(self._file.fileno()).st_size
        return TokenFileError(f"{self.path} was cut short while it is read: it has {found} of {self.bytes} bytes.")

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return (
            f"TokenFile({str(self.path)!r}, {self.count:,} tokens in {self.documents:,} documents, "
            f"{self.tokenizer} with a vocabulary of {self.vocab_size})"
        )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start to stop, checked against the vocabulary."""
        size = self._dtype.itemsize
        stop = min(stop, self.count)
        data = self._pread(max(stop - start, 0) * size, HEADER + start * size)
        tokens = np.frombuffer(data, self._dtype).astype(np.int64)
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            raise TokenFileError(
                f"{self.path} holds token {int(tokens.max())} between {start} and {stop}, outside its vocabulary of "
                f"{self.vocab_size}: it is damaged. Tokenize it again."
            )
        return tokens

    def document_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """The number of each token's document, counted from the one that token `start` is in."""
        first = self._document(start)
        last = min(first + stop - start, self.documents)  # a document has a token at least
        ends = self._ends(first, last)
        number = np.searchsorted(ends, np.arange(start, stop, dtype=np.uint64), side="right")
        return (number - number[0]).astype(np.int64)

    def _document(self, token: int) -> int:
        """Which document a token is in. By halves, a few bytes at a time."""
        low, high = 0, self.documents
        while high - low > ENDS_READ:
            middle = (low + high) // 2
            low, high = (low, middle + 1) if int(self._ends(middle, middle + 1)[0]) > token else (middle + 1, high)
        return low + int(np.searchsorted(self._ends(low, high), np.uint64(token), side="right"))

    def verify(self) -> None:
        """Reads all of it and compares its checksum."""
        total = 0
        for start in range(HEADER, self.bytes, CRC_BLOCK):
            total = zlib.crc32(self._pread(min(CRC_BLOCK, self.bytes - start), start), total)
        if total != self._crc32:
            raise TokenFileError(
                f"{self.path} has the checksum {total:08x}, its header says {self._crc32:08x}: it is damaged, or was overwritten in "
                "part. Tokenize it again."
            )


def write_token_file(
    path: str | os.PathLike[str],
    documents: Iterable[Iterable[int] | NDArray[Any]],
    vocab_size: int,
    tokenizer: str,
    end_token: int,
) -> TokenFile:
    """Writes documents of tokens, one after another, each followed by `end_token`. Returns the file, opened.

    >>> write_token_file("small.tokens", [[1, 2, 3], [4, 5]], vocab_size=7, tokenizer="by hand", end_token=6).count
    7
    """
    path = Path(path)
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    ends, crc = [], 0
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(bytes(HEADER))
            for document in documents:
                data = _checked(document, vocab_size, end_token, path).astype(dtype).tobytes()
                count += len(data) // dtype.itemsize
                ends.append(count)
                crc = zlib.crc32(data, crc)
                file.write(data)
            if not ends:
                raise ValueError(f"{path} would hold no document: there is no text to tokenize.")
            tail = np.asarray(ends, dtype="<u8").tobytes()
            file.write(tail)
            header: dict[str, Any] = {
                "dtype": dtype.str,
                "count": count,
                "documents": len(ends),
                "vocab_size": vocab_size,
                "tokenizer": tokenizer,
                "end_token": end_token,
                "crc32": zlib.crc32(tail, crc),
            }
            file.seek(0)
            file.write(_packed(header, path))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return TokenFile(path)


def _checked(document: Iterable[int] | NDArray[Any], vocab_size: int, end_token: int, path: Path) -> NDArray[np.int64]:
    tokens = np.asarray(document if isinstance(document, np.ndarray | list) else list(document), dtype=np.int64)
    tokens = np.append(tokens, end_token)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"{path}: a document has tokens from {tokens.min()} to {tokens.max()}, outside the vocabulary of {vocab_size}."
        )
    return tokens


def _packed(header: dict[str, Any], path: Path) -> bytes:
    text = json.dumps(header).encode()
    if len(text) > HEADER - _PREFIX.size:
        raise ValueError(f"{path}: the tokenizer's name is too long for the header.")
    return (_PREFIX.pack(MAGIC, VERSION, len(text)) + text).ljust(HEADER, b"\0")


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    raw = os.pread(file.fileno(), HEADER, 0)
    if len(raw) < HEADER or not raw.startswith(MAGIC):
        raise TokenFileError(f"{path} is not a token file: make one with `ottava data tokenize`.")
    _, version, length = _PREFIX.unpack_from(raw)
    if version != VERSION:
        raise TokenFileError(f"{path} is a token file of version {version}; this release reads version {VERSION}.")
    try:
        header = json.loads(raw[_PREFIX.size : _PREFIX.size + length], object_pairs_hook=once_each)
        wrong = [key for key, kind in _KEYS.items() if type(header[key]) is not kind]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokenFileError(f"{path} has a damaged header: tokenize it again.") from error
    if wrong or not _makes_sense(header):
        raise TokenFileError(f"{path} has a damaged header: tokenize it again.")
    return header


def _makes_sense(header: dict[str, Any]) -> bool:
    """Whether the numbers of a header can be true together."""
    return (
        header["dtype"] in ("<u2", "<u4")
        and 0 < header["documents"] <= header["count"] < 1 << 48
        and 0 <= header["end_token"] < header["vocab_size"] <= 1 << 32
        and header["tokenizer"].isprintable()  # it is shown on consoles
    )
