"""Token files: what is written comes back, and what is damaged is named."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from ottava.train import token_file
from ottava.train.run_folder import check_data
from ottava.train.token_file import HEADER, TokenFile, TokenFileError, same, write_token_file


@pytest.fixture
def path(tmp_path):
    out = tmp_path / "some.tokens"
    write_token_file(out, [[1, 2, 3], np.array([4, 5]), (t for t in (0,))], 7, "by hand", end_token=6)
    return out


def test_what_is_written_comes_back(path):
    file = TokenFile(path)
    assert file.tokens.tolist() == [1, 2, 3, 6, 4, 5, 6, 0, 6]
    assert file.ends.tolist() == [4, 7, 9]
    assert (file.count, file.vocab_size, file.tokenizer, file.end_token) == (9, 7, "by hand", 6)
    assert file.document_of(2, 9).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert "9 tokens in 3 documents" in repr(file)
    file.verify()


def test_large_vocabularies_take_four_bytes(tmp_path):
    file = write_token_file(tmp_path / "a", [[128_000]], 128_256, "t", 128_001)
    assert file.tokens.dtype == np.dtype("<u4") and file.tokens.tolist() == [128_000, 128_001]


@pytest.mark.parametrize("kept", [0, 10, HEADER - 1, HEADER, HEADER + 17, -1])
def test_a_short_file_is_named(path, kept):
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    with pytest.raises(TokenFileError, match="some.tokens"):
        TokenFile(path)


def test_a_long_file_is_named(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(TokenFileError, match=r"some.tokens has 4139 bytes.*need 4138"):
        TokenFile(path)


def test_another_file_is_named(path):
    path.write_bytes(b"PK" + path.read_bytes()[2:])
    with pytest.raises(TokenFileError, match=r"some.tokens is not a token file: make one with `ottava data tokenize`"):
        TokenFile(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenFileError, match=r"none.tokens cannot be read: No such file"):
        TokenFile(tmp_path / "none.tokens")


def test_another_version_is_named(path):
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(TokenFileError, match=r"version 9; this release reads version 1"):
        TokenFile(path)


@pytest.mark.parametrize(
    "old, new", [(b'"count": 9', b'"count": 8'), (b'"<u2"', b'"<f4"'), (b'"dtype"', b'"dtipe"'), (b"{", b"[")]
)
def test_a_damaged_header_is_named(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(TokenFileError, match="some.tokens"):
        TokenFile(path)


def test_damaged_document_ends_are_named(path):
    data = bytearray(path.read_bytes())
    data[-8:] = data[-16:-8]
    path.write_bytes(data)
    with pytest.raises(TokenFileError, match=r"some.tokens has documents whose ends are not in order"):
        TokenFile(path)


def test_a_damaged_token_is_named_when_used_and_by_verify(path):
    data = bytearray(path.read_bytes())
    data[HEADER + 2] = 200
    path.write_bytes(data)
    file = TokenFile(path)
    assert file.read(2, 5).tolist() == [3, 6, 4]
    with pytest.raises(
        TokenFileError, match=r"some.tokens holds token 200 between 0 and 4, outside its vocabulary of 7"
    ):
        file.read(0, 4)
    with pytest.raises(TokenFileError, match=r"some.tokens has the checksum"):
        file.verify()


def test_nothing_is_left_when_writing_fails(tmp_path):
    def documents():
        yield [1]
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_token_file(tmp_path / "a.tokens", documents(), 7, "t", 6)
    with pytest.raises(ValueError, match="outside the vocabulary of 7"):
        write_token_file(tmp_path / "a.tokens", [[9]], 7, "t", 6)
    with pytest.raises(ValueError, match="no document"):
        write_token_file(tmp_path / "a.tokens", [], 7, "t", 6)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def large(tmp_path):
    """2 MB in documents of 1 to 300 tokens: more than the samples of it that are compared."""
    lengths = np.random.default_rng(0).integers(1, 300, 7000)
    documents = [np.arange(n) % 7 for n in lengths]
    return write_token_file(tmp_path / "large.tokens", documents, vocab_size=8, tokenizer="by hand", end_token=7)


def _overwrite_between_samples(file):
    with file.path.open("r+b") as opened:
        opened.seek(4096 + 10_000)  # samples are 4 KiB, every 33 KB or so
        before = opened.read(2)
        opened.seek(4096 + 10_000)
        opened.write(bytes([before[0] ^ 1, 0]))


def test_a_token_that_no_sample_sees_is_noticed_by_the_time_of_change(large):
    large.check_unchanged()
    _overwrite_between_samples(large)
    assert same(TokenFile(large.path).identity, large.identity)  # the samples are as they were
    with pytest.raises(TokenFileError, match=r"large.tokens has the checksum"):
        large.check_unchanged()


def test_a_touched_file_is_read_once_and_taken(large, monkeypatch):
    reads = []
    monkeypatch.setattr(TokenFile, "verify", lambda self: reads.append(self.path))
    os.utime(large.path)
    large.check_unchanged()
    large.check_unchanged()
    assert reads == [large.path]


def test_a_restart_reads_all_of_a_file_that_was_written_to(large, tmp_path, monkeypatch):
    (tmp_path / "data.json").write_text(json.dumps({"files": [large.identity]}))
    check_data(tmp_path, [TokenFile(large.path).identity])
    os.utime(large.path)  # a copy: another time, the same tokens
    check_data(tmp_path, [TokenFile(large.path).identity])
    _overwrite_between_samples(large)
    with pytest.raises(TokenFileError, match=r"large.tokens has the checksum"):
        check_data(tmp_path, [TokenFile(large.path).identity])
    warned = []
    monkeypatch.setattr(token_file, "warn_once", warned.append)
    monkeypatch.setattr(token_file, "MOST_VERIFIED", 1000)  # as a file of terabytes
    check_data(tmp_path, [TokenFile(large.path).identity])
    assert "large.tokens was written to, and is too large" in warned[0]


def test_documents_are_found_without_a_map_that_a_cut_file_would_end_the_process_by(large):
    number = np.searchsorted(large.ends, np.arange(large.count, dtype=np.uint64), side="right").astype(np.int64)
    for start in (0, 1, 299, 12345, large.count // 2, large.count - 700):
        stop = min(start + 700, large.count)
        assert (large.document_of(start, stop) == number[start:stop] - number[start]).all()
    os.truncate(large.path, 4096)
    with pytest.raises(TokenFileError, match="large.tokens was cut short"):
        large.document_of(0, 10)


def test_what_is_read_is_the_file_that_was_checked(large):
    first = large.read(0, 100)
    other = large.path.with_name("other.tokens")
    other.write_bytes(b"evil")
    other.replace(large.path)  # another file gets its name
    assert (large.read(0, 100) == first).all()
    large.verify()
