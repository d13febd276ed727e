"""Token files: what a header may say, and how little may follow it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile.spoil import TOKENS, Spoil, anything, make_holes
from ottava.train.token_file import HEADER, MAGIC


def token_files() -> Iterator[tuple[str, Spoil]]:
    yield from anything(lambda folder: folder / TOKENS)
    for name, header in _token_headers().items():
        yield f"a header with {name}", partial(_token_header, header=header)
    for name, text in (("lists", b"[" * 4000), ("dicts", b'{"a":' * 800), ("nothing", b""), ("a text", b'"a"')):
        yield f"a header of {name}", partial(_token_bytes, at=12, data=struct.pack("<I", len(text)) + text)
    yield "another version", partial(_token_bytes, at=8, data=struct.pack("<I", 2))
    yield "another magic", partial(_token_bytes, at=0, data=b"OTTAVATX")
    yield "a header longer than the file", partial(_token_bytes, at=12, data=struct.pack("<I", 2**32 - 1))
    yield "cut in the tokens", partial(_token_cut, size=HEADER + 8)
    yield "cut in the header", partial(_token_cut, size=100)
    yield "a byte more", partial(_token_cut, size=HEADER + 9 * 2 + 3 * 8 + 1)
    yield "documents of holes", _documents_of_holes
    for name, ends in (("back", (4, 3, 9)), ("beyond", (4, 7, 10)), ("nowhere", (0, 0, 9)), ("at 2^63", (4, 2**63, 9))):
        yield f"documents that end {name}", partial(_token_bytes, at=HEADER + 18, data=struct.pack("<3Q", *ends))


def _token_headers() -> dict[str, dict[str, Any]]:
    return {
        "no tokens": {"count": 0},
        "negative tokens": {"count": -9},
        "2^60 tokens": {"count": 1 << 60},
        "2^47 tokens": {"count": (1 << 47) - 1, "documents": (1 << 47) - 1},
        "a count of 3,000 digits": {"count": 10**3000},
        "a count of text": {"count": "9"},
        "true tokens": {"count": True},
        "more documents than tokens": {"documents": 10},
        "no documents": {"documents": 0},
        "another type": {"dtype": "<f8"},
        "a type of objects": {"dtype": "O"},
        "a vocabulary of 2^40": {"vocab_size": 1 << 40},
        "no vocabulary": {"vocab_size": 0},
        "an end outside": {"end_token": 7},
        "a negative end": {"end_token": -1},
        "a tokenizer that clears the screen": {"tokenizer": "\x1b[2J"},
        "a tokenizer that is a list": {"tokenizer": []},
        "a checksum of text": {"crc32": "0"},
    }


def _token_header(folder: Path, header: dict[str, Any]) -> str:
    path = folder / TOKENS
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    text = json.dumps({**json.loads(data[16 : 16 + length]), **header}).encode()
    path.write_bytes((data[:12] + struct.pack("<I", len(text)) + text).ljust(HEADER, b"\0") + data[HEADER:])
    return TOKENS


def _token_bytes(folder: Path, at: int, data: bytes) -> str:
    with (folder / TOKENS).open("r+b") as file:
        file.seek(at)
        file.write(data)
    return TOKENS


def _token_cut(folder: Path, size: int) -> str:
    os.truncate(folder / TOKENS, size)
    return TOKENS


def _documents_of_holes(folder: Path) -> str:
    count = 10**11
    header = {
        "dtype": "<u2",
        "count": count,
        "documents": count,
        "vocab_size": 7,
        "tokenizer": "",
        "end_token": 6,
        "crc32": 0,
    }
    text = json.dumps(header).encode()
    (folder / TOKENS).write_bytes((MAGIC + struct.pack("<II", 1, len(text)) + text).ljust(HEADER, b"\0"))
    make_holes(folder / TOKENS, HEADER + 10 * count)
    return TOKENS
