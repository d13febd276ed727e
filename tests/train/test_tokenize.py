"""From text to tokens."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc

import pytest

from ottava.train import tokenize as module
from ottava.train.token_file import TokenFile
from ottava.train.tokenize import ByteTokenizer, load_tokenizer, read_documents, standard_library, tokenize


@pytest.fixture
def tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.enable_truncation(2)  # a tokenizer.json may say so; a corpus must not be cut
    path = tmp_path / "words" / "tokenizer.json"
    path.parent.mkdir()
    backend.save(str(path))
    return path


def test_bytes_come_back():
    turn = ByteTokenizer()
    text = "naïve\r\n\tcafé 🎹"
    (tokens,) = turn.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert turn.decode([*tokens.tolist(), turn.end_token]) == text
    assert turn.decode([0xC3]) == "\ufffd"


def test_a_tokenizer_json_is_used_whole(tokenizer_json, tmp_path):
    (tmp_path / "a.txt").write_text("hello world hello there")
    file = tokenize([tmp_path / "a.txt"], tmp_path / "a.tokens", tokenizer=str(tokenizer_json))
    assert file.tokens.tolist() == [0, 1, 0, 2, 3]
    assert file.vocab_size == 4 and file.tokenizer.startswith("words/tokenizer.json@")
    assert load_tokenizer(str(tokenizer_json)).decode([0, 1]) == "hello world"


def test_tokenizer_mistakes_are_explained(tokenizer_json, tmp_path):
    with pytest.raises(ValueError, match="has no token <stop>: say which token ends a document"):
        load_tokenizer(str(tokenizer_json), end_token="<stop>")
    with pytest.raises(ValueError, match="There is no tokenizer at nowhere.json"):
        load_tokenizer("nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match="has its own end token"):
        load_tokenizer("byte", end_token="</s>")


def test_documents_of_every_kind_of_file(tmp_path):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "a.txt").write_bytes(b"one\r\n")
    lines = [json.dumps({"text": "two", "id": 1}), "", json.dumps({"text": "three"})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "four"}).encode()))
    parquet.write_table(pyarrow.table({"text": ["five", None, "six"], "n": [1, 2, 3]}), tmp_path / "d.parquet")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e.md").write_text("seven")
    assert list(read_documents([tmp_path])) == ["one\r\n", "two", "three", "four", "five", "six", "seven"]


def test_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    assert tokenize([tmp_path / "a.jsonl"], tmp_path / "a.tokens").tokens.tolist() == [ord("x"), 256]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": 3}\n', r"a.jsonl, line 1: the field 'text' is a int, not a text"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl, line 1: no text in the field 'text'; it has body"),
        ("a.txt", b"\xff\xfe", r"a.txt is not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl is not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl, line 1: half of a character"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl, line 1: not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], r"a.jsonl.gz is not a whole gzip file"),
        ("a.txt.gz", b"plain", r"a.txt.gz is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 20, r"a.txt.gz is not a whole gzip file"),
        ("a.parquet", b"nothing", r"a.parquet is not a whole parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents([tmp_path / name]))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_file_that_unpacks_without_end_is_refused(tmp_path, name):
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(128):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{name} unpacks to more than 200 times its size"):
        list(read_documents([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size < 1 << 20 and peak < 128 << 20


def test_text_that_repeats_itself_is_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"the same again\n" * 100_000))
    assert len(*read_documents([tmp_path / "a.txt.gz"])) == 1_500_000


def test_a_missing_column_and_a_missing_path_are_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        list(read_documents([tmp_path / "a.parquet"]))
    with pytest.raises(ValueError, match="no file or folder"):
        list(read_documents([tmp_path / "none"]))


def test_the_standard_library_is_tokenized_once(tmp_path, monkeypatch):
    root, cache = tmp_path / "lib", tmp_path / "cache"
    (root / "site-packages").mkdir(parents=True)
    (root / "b.py").write_bytes(b"x = '\xe9'\n")  # not UTF-8
    (root / "a.py").write_text("y = 1\n")
    (root / "site-packages" / "c.py").write_text("z\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(root))
    path = standard_library(cache)
    assert bytes(t for t in TokenFile(path).tokens.tolist() if t < 256) == b"y = 1\nx = '\xe9'\n"
    before = path.stat().st_mtime_ns
    assert standard_library(cache) == path and path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:-1])  # damaged: made again
    TokenFile(standard_library(cache)).verify()
    (root / "a.py").write_text("y = 22\n")
    assert standard_library(cache) != path


def test_nothing_is_destroyed_by_tokenizing(tmp_path, tokenizer_json):
    text, out = tmp_path / "a.txt", tmp_path / "a.tokens"
    text.write_text("abc")
    (tmp_path / "link").symlink_to(text)
    for output in (text, tmp_path / "link", tmp_path / ".." / tmp_path.name / "a.txt"):
        with pytest.raises(ValueError, match="is what is read: give the token file another name"):
            tokenize([text], output, overwrite=True)
    with pytest.raises(ValueError, match="is what is read"):
        tokenize([text], tokenizer_json, tokenizer=str(tokenizer_json), overwrite=True)
    with pytest.raises(ValueError, match="lies in .*, which is read"):
        tokenize([tmp_path], text, overwrite=True)
    with pytest.raises(ValueError, match="lies in .*, which is read"):  # a new file would be read while it is written
        tokenize([tmp_path], tmp_path / "new.tokens")
    assert text.read_text() == "abc"
    os.mkfifo(
        tmp_path / "pipe"
    )  # stands for a device: /dev/null would be replaced, and missed by everybody, if this failed
    with pytest.raises(ValueError, match="pipe is not a file: give the token file another name"):
        tokenize([text], tmp_path / "pipe", overwrite=True)
    assert tokenize([text], out).count == 4
    text.write_text("abcdef")
    with pytest.raises(ValueError, match=r"a.tokens exists: give another name, or --overwrite"):
        tokenize([text], out)
    assert tokenize([text], out, overwrite=True).count == 7
