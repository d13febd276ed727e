"""Files that a stranger might send, to the trainer and to `checkpoint import`: refused by name, soon, in little memory."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ottava.checkpoint.boxes import tiling_problem
from ottava.models.hf_files import _block_size, import_hf
from ottava.models.safetensors_file import File
from ottava.train.arguments import parse
from ottava.train.prometheus import Prometheus
from ottava.train.token_file import HEADER, MAGIC, TokenFile, TokenFileError
from ottava.train.tokenize import load_tokenizer


@pytest.fixture(autouse=True)
def _soon_and_small() -> Iterator[None]:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def tokens(header: bytes) -> bytes:
    return (MAGIC + struct.pack("<II", 1, len(header)) + header).ljust(HEADER, b"\0") + bytes(8)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(tokens(b"[" * 4000)),
        lambda path: path.write_bytes(tokens(b'{"a":' * 600)),
        lambda path: path.write_bytes(tokens(b'{"count": ' + b"9" * 4000)),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["pipe", "folder", "lists", "objects", "number", "device"],
)
def test_token_files(tmp_path, make):
    make(tmp_path / "evil.tokens")
    with pytest.raises(TokenFileError, match="evil.tokens"):
        TokenFile(tmp_path / "evil.tokens")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.write_text("a = " + "[" * 100_000),
        lambda path: path.write_text("a = " + "{b = " * 50_000),
        lambda path: path.symlink_to("/dev/zero"),
        _sparse,
        lambda path: path.write_bytes(b"\xff\xfe"),
    ],
    ids=["pipe", "lists", "tables", "device", "huge", "not text"],
)
def test_configurations(tmp_path, make, capsys):
    make(tmp_path / "evil.toml")
    with pytest.raises(SystemExit) as stopped:
        parse([str(tmp_path / "evil.toml")])
    assert stopped.value.code == 2 and "evil.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, '{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}', "\0"]
)
def test_tokenizers(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_that_panics_is_an_error_and_ctrl_c_is_not(tmp_path, monkeypatch):
    import tokenizers

    class PanicException(BaseException):
        """As Rust's panics come to Python."""

    class Backend:
        @staticmethod
        def from_str(text: str) -> None:
            raise raised("index out of range")

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(tokenizers, "Tokenizer", Backend)
    raised: Callable[[str], BaseException] = PanicException
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json: index out of range"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    raised = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def safetensors(path: Path, **entries: list[int]) -> None:
    header = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in entries.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


def test_tensors_that_share_bytes_are_refused(tmp_path):
    safetensors(tmp_path / "fine.safetensors", b=[10, 20], a=[0, 10], empty=[10, 10], last=[20, 64])
    assert len(File(tmp_path / "fine.safetensors").specs) == 4
    safetensors(tmp_path / "evil.safetensors", a=[0, 10], b=[9, 20])
    with pytest.raises(ValueError, match="evil.safetensors: the entry of 'b' overlaps"):
        File(tmp_path / "evil.safetensors")


@pytest.mark.parametrize("block", [[2**31, 1], [0, 128], [128], "128", [1.5, 2], [True, True], {"a": 1}])
def test_block_sizes_that_make_no_sense(tmp_path, block):
    with pytest.raises(ValueError, match="weight_block_size"):
        _block_size(block, tmp_path)


def test_a_quantization_config_that_is_no_object(tmp_path):
    shape: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = {**shape, "num_attention_heads": 1, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": [1, 2]}))
    with pytest.raises(ValueError, match="config.json has a list as quantization_config"):
        import_hf(tmp_path, tmp_path / "out")


def test_many_boxes_in_a_row_are_looked_at_once():
    count = 30_000
    row = [((0, i), (1, 1)) for i in range(count)]
    assert tiling_problem((1, count), row) is None
    assert tiling_problem((count, 1), [((i, 0), (1, 1)) for i in range(count)]) is None
    assert "overlap" in (tiling_problem((1, count), [*row[:-1], row[0]]) or "")


def test_a_page_of_metrics_is_served_to_this_machine_alone_unless_told():
    sink = Prometheus(0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
    finally:
        sink.close()
