"""Files that a user names: read once, as far as is sensible, and named if they are not what they should be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ottava.untrusted.files import (
    open_anew,
    open_regular,
    open_to_append,
    open_to_append_bytes,
    printable,
    read_json,
    read_regular,
    read_toml,
)


def test_a_file_with_a_writer_at_the_other_end_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe cannot be read: it is not a file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(ValueError, match="nothing cannot be read: No such file"):
        open_regular(tmp_path / "nothing")


def test_no_more_is_read_than_is_sensible(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5, "this") == b"12345"
    with pytest.raises(ValueError, match="a has 5 bytes; this has at most 4"):
        read_regular(tmp_path / "a", 4, "this")


@pytest.mark.parametrize("key", ["a.", '"a".', "'a' . "])
def test_keys_of_many_parts_are_refused_before_they_are_parsed(tmp_path, key):
    path = tmp_path / "run.toml"
    for text in (key * 100_000 + "a = 1", "[" + key * 100_000 + "a]", "x = {" + key * 100_000 + "a = 1}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="run.toml is not TOML: a key of 64 parts and more"):
            read_toml(path)
    files = ", ".join(f'"part-{i:03d}.of.500.tokens"' for i in range(500))
    path.write_text(f"[data]\nfiles = [{files}]\nversion.major.minor = 1\n")
    assert len(read_toml(path)["data"]["files"]) == 500
    path.write_text("a" * 500_000 + " = 1")  # one long word: the look for dots takes no longer than it
    assert len(next(iter(read_toml(path)))) == 500_000


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "9" * 5000, "", '{"a": 1', "\ud800"])
def test_what_is_no_object_is_named(tmp_path, text):
    (tmp_path / "some.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match="some.json is not"):
        read_json(tmp_path / "some.json")


def test_text_is_shown_in_one_printable_line():
    assert printable("plain") == "plain" and printable("\x1b[2J\n") == "'\\x1b[2J\\n'"
    assert printable("x" * 500) == "x" * 300 + "..."


@pytest.mark.parametrize("dangling", [False, True])
def test_what_is_written_anew_replaces_a_link_and_what_is_appended_refuses_it(tmp_path: Path, dangling: bool) -> None:
    target, link = tmp_path / "mine", tmp_path / "link"
    if not dangling:
        target.write_text("precious")
    link.symlink_to(target)
    for append in (open_to_append, open_to_append_bytes):
        with pytest.raises(OSError):
            append(link)
    with open_anew(link) as file:
        file.write("new")
    assert link.read_text() == "new" and not link.is_symlink()
    assert not target.exists() if dangling else target.read_text() == "precious"
