"""From text to a token file: documents of text, JSONL or parquet files, and a tokenizer.

A tokenizer is "byte" (256 bytes and an end token: no file needed, every text fits) or the path of a Hugging Face tokenizer.json.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ottava.train.token_file import TokenFile, TokenFileError, write_token_file
from ottava.untrusted.files import printable, read_regular

END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>")
"""What tokenizers call the end of a document, in the order they are looked for."""
MOST_TOKENIZER_BYTES = 64 << 20
MOST_TOKENS = 1 << 24
MOST_GROWTH = 1e6
"""Of a text by all rules of a tokenizer together. Those in use replace a space by three bytes, or an apostrophe by a word."""
BATCH = 512  # documents that are handed to a tokenizer at a time; it uses all cores for them


class Tokenizer(Protocol):
    """What turns text into tokens, and back."""

    name: str
    vocab_size: int
    end_token: int

    def encode(self, texts: list[str]) -> Iterable[list[int] | NDArray[Any]]:
        """Tokens of each text."""

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""


class ByteTokenizer:
    """A token a byte of UTF-8, and 256 for the end of a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.decode(list(tokenizer.encode(["héllo"]))[0].tolist())
    'héllo'
    """

    name = "byte"
    vocab_size = 257
    end_token = 256

    def encode(self, texts: list[str]) -> Iterator[NDArray[np.uint8]]:
        """Tokens of each text."""
        for text in texts:
            yield np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens. Bytes that are no UTF-8 show as U+FFFD; the end token shows as nothing."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face tokenizer.json.

    end_token: the text of the token that ends a document; by default the first of END_TOKENS that the vocabulary has.

        >>> tokenizer = JsonTokenizer("llama3/tokenizer.json")
        >>> tokenizer.encode(["Hello"])
    """

    def __init__(self, path: str | os.PathLike[str], end_token: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ValueError("A tokenizer.json needs the package `tokenizers`: pip install 'ottava[train]'.") from error
        path = Path(path)
        if not path.exists():
            raise ValueError(f"There is no tokenizer at {path}: give 'byte', or the path of a tokenizer.json.")
        content = read_regular(path, MOST_TOKENIZER_BYTES, "a tokenizer.json")
        with _panics_are_errors(f"{path} is not a tokenizer.json"):
            self._backend = Backend.from_str(content.decode())
            if self._backend.normalizer is not None:
                check_growth(self._backend.normalizer.__getstate__())
            self._backend.no_truncation()
            self._backend.no_padding()
            self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
            highest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = max(self.vocab_size, highest + 1)  # numbers may have gaps
        if self.vocab_size > MOST_TOKENS:
            raise ValueError(f"{path} has a token {highest}: a vocabulary has at most {MOST_TOKENS}.")
        self.end_token: int = self._find_end(path, end_token)
        digest = hashlib.sha256(content).hexdigest()[:12]
        name = f"{path.parent.name}/{path.name}@{digest}".lstrip("/")
        self.name = printable(name)

    def _find_end(self, path: Path, given: str | None) -> int:
        for text in (given,) if given is not None else END_TOKENS:
            number = self._backend.token_to_id(text)
            if number is not None:
                return number
        tried = given if given is not None else ", ".join(END_TOKENS)
        raise ValueError(f"{path} has no token {tried}: say which token ends a document (end_token).")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text, without special tokens."""
        with _panics_are_errors(f"the tokenizer {self.name} fails"):
            return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""
        return self._backend.decode(tokens)


@contextmanager
def _panics_are_errors(what: str) -> Iterator[None]:
    """The backend raises plain Exception; a panic of its is not even that. Both as a ValueError that begins with `what`.

    What it writes to the console on the way (a stack of its functions) is kept back, and dropped with the error that tells the same.
    """
    sys.stderr.flush()
    console = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            kept.truncate(0)
            raise ValueError(f"{what}: {printable(str(error))}") from error
        finally:
            os.dup2(console, 2)
            os.close(console)
            kept.seek(0)
            while block := kept.read(1 << 16):
                os.write(2, block)


def check_growth(rules: bytes) -> None:
    """ValueError for rules that replace texts by longer ones, one after the other, until a word fills the memory.

    rules: the `normalizer` of a tokenizer.json.
    """
    growth = 1.0

    def visit(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal growth
        content, pattern = found.get("content"), found.get("pattern")
        if isinstance(content, str) and isinstance(pattern, dict):
            # A regular expression of any length may find a single character, and an empty text is everywhere.
            growth *= max(1.0, len(content) / max(len(str(pattern.get("String", ""))), 0.5))
        growth *= max(1, len(str(found.get("prepend", ""))))
        return found

    json.loads(rules, object_hook=visit)
    if growth > MOST_GROWTH:
        raise ValueError(f"its rules make a text {growth:.1g} times as long; at most {MOST_GROWTH:.0g} times is taken.")


def load_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """ "byte", or the path of a tokenizer.json.

    >>> load_tokenizer("byte").vocab_size
    257
    """
    if name == "byte":
        if end_token is not None:
            raise ValueError(
                f"The byte tokenizer has its own end token; end_token={end_token!r} is for a tokenizer.json."
            )
        return ByteTokenizer()
    return JsonTokenizer(name, end_token)


# --------------------------------------------------------------------------------------------------------------- documents


def read_documents(paths: Iterable[str | os.PathLike[str]], field: str = "text") -> Iterator[str]:
    """Documents of files and of all files in folders, in order of their names.

    A .jsonl or .jsonl.gz file has a document a line, in `field`; a .parquet file one a row, in the column `field`; any other
    file, gzipped or not, is one document.

        >>> list(read_documents(["corpus/", "more.jsonl"]))
    """
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"There is no file or folder {path}.")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            yield from _documents_of(file, field)


def _documents_of(path: Path, field: str) -> Iterator[str]:
    try:
        yield from _read(path, field)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _read(path: Path, field: str) -> Iterator[str]:
    suffixes = [s for s in path.suffixes if s != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        yield from _parquet(path, field)
    elif kind == ".jsonl":
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _line(path, number, line, field)
    else:
        with _opened(path) as file:
            yield "".join(iter(lambda: file.read(1 << 20), ""))


def _opened(path: Path) -> Any:
    # newline="": line ends are text too.
    if path.suffix != ".gz":
        return open(path, encoding="utf-8", newline="")
    return io.TextIOWrapper(_Unpacked(path), encoding="utf-8", newline="")


class _Unpacked(gzip.GzipFile):
    """A gzip file that does not grow without end: a kilobyte can hold a megabyte of one character, and a megabyte a gigabyte."""

    FREE, RATIO = 16 << 20, 200  # bytes that nobody asks about; how often its own size a text may be beyond that

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.most = max(self.FREE, self.RATIO * path.stat().st_size)

    def read1(self, size: int = -1) -> bytes:
        """What a text file reads by."""
        content = super().read1(size)
        if self.tell() > self.most:
            raise ValueError(
                f"{self.name} unpacks to more than {self.RATIO} times its size, which no text does. If it is meant so, unpack it first."
            )
        return content


def _line(path: Path, number: int, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
    if isinstance(record, dict) and field in record and not isinstance(record[field], str):
        raise ValueError(f"{path}, line {number}: the field {field!r} is a {type(record[field]).__name__}, not a text.")
    if not isinstance(record, dict) or field not in record:
        keys = printable(", ".join(record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}, line {number}: no text in the field {field!r}; it has {keys}.")
    if "\\ud" in line.lower():  # JSON can write half of a character, which is no text
        try:
            record[field].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}, line {number}: half of a character (a lone surrogate) in {field!r}.") from error
    return record[field]


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet files need the package `pyarrow`: pip install pyarrow.") from error
    try:
        table = parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            names = printable(", ".join(table.schema_arrow.names))
            raise ValueError(f"{path} has no column {field!r}; it has {names}.")
        for batch in table.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield str(text)
    except (pyarrow.ArrowException, OSError) as error:  # a page may be damaged, too
        raise ValueError(f"{path} is not a whole parquet file: {printable(str(error))}") from error


def tokenize(
    paths: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    tokenizer: str = "byte",
    field: str = "text",
    end_token: str | None = None,
    overwrite: bool = False,
) -> TokenFile:
    """Writes the documents of `paths` (see `read_documents`) as a token file. This is `ottava data tokenize`.

    overwrite: whether a file that exists may be replaced; one that is among the sources never is.

    >>> tokenize(["corpus.jsonl"], "corpus.tokens", tokenizer="llama3/tokenizer.json")
    """
    sources = [Path(path) for path in paths]
    _check_output(Path(output), sources, tokenizer, overwrite)
    turn = load_tokenizer(tokenizer, end_token)
    return write_token_file(
        output, _encoded(read_documents(sources, field), turn), turn.vocab_size, turn.name, turn.end_token
    )


def _check_output(output: Path, sources: list[Path], tokenizer: str, overwrite: bool) -> None:
    """ValueError if writing `output` would destroy something, or be read again as a source."""
    files = [*sources, *([Path(tokenizer)] if tokenizer != "byte" else [])]
    if output.exists() and any(file.exists() and output.samefile(file) for file in files):
        raise ValueError(f"{output} is what is read: give the token file another name.")
    inside = [source for source in sources if source.is_dir() and output.resolve().is_relative_to(source.resolve())]
    if inside:
        raise ValueError(f"{output} lies in {inside[0]}, which is read: give the token file another place.")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output} is not a file: give the token file another name.")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists: give another name, or --overwrite to replace it.")


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[Any]:
    """Tokens of the documents that are not empty."""
    while batch := list(islice(texts, BATCH)):
        yield from tokenizer.encode([text for text in batch if text])


# ---------------------------------------------------------------------------------------------------------- default dataset


def standard_library(cache: str | os.PathLike[str]) -> Path:
    """A token file of the running Python's own standard-library sources, by bytes; made in the folder `cache` if not there yet.

    >>> standard_library("cache").name
    'python-3.11.2-0f3a....tokens'
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    readable = [p for p in files if p.is_file() and os.access(p, os.R_OK)]
    listing = "\n".join(f"{p.relative_to(root)} {p.stat().st_size}" for p in readable)
    if not readable:
        raise ValueError(f"No Python sources in {root}: this Python came without them. Give data.files instead.")
    version = ".".join(map(str, sys.version_info[:3]))
    path = Path(cache) / f"python-{version}-{hashlib.sha256(listing.encode()).hexdigest()[:12]}.tokens"
    try:
        TokenFile(path)
    except TokenFileError:  # not there, or damaged
        # Some of the library's tests are sources that are not UTF-8 on purpose: bytes pass as they are.
        texts = (p.read_text(encoding="utf-8", errors="surrogateescape") for p in readable)
        turn = ByteTokenizer()
        try:
            write_token_file(path, _encoded(texts, turn), turn.vocab_size, turn.name, turn.end_token)
        except OSError as error:
            raise ValueError(
                f"data.cache is {cache}, which cannot be written to ({error.strerror}): choose another folder, or give data.files."
            ) from error
    return path
