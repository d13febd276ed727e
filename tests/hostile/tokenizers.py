"""Tokenizers: what a tokenizer.json may say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile.spoil import TOKENIZER, Spoil, anything


def good_tokenizer() -> dict[str, Any]:
    """A tokenizer.json of three letters."""
    options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model = {"type": "BPE", **options, "fuse_unk": False, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "</s>": 2}}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **nothing, "added_tokens": [], "model": {**model, "merges": []}}


def tokenizers() -> Iterator[tuple[str, Spoil]]:
    yield from anything(lambda folder: folder / TOKENIZER)
    for name, change in _tokenizer_changes().items():
        yield name, partial(_tokenizer, change=change)
    for name, text, times in (
        ("60 MB of brackets", "[", 60),
        ("300 MB of brackets", "[", 300),
        ("30 MB of braces", '{"a":', 6),
    ):
        yield name, partial(_tokenizer_text, text=text, times=times << 20)
    for name, model in _models().items():
        yield f"a model {name}", partial(_tokenizer, change={"model": {**good_tokenizer()["model"], **model}})


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _tokenizer_changes() -> dict[str, dict[str, Any]]:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    doubling = [_replace({"String": "a"}, "aa")] * 60
    return {
        "a table that cannot be parsed, which panics": {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        },
        "an empty table, which panics": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "letters that double 60 times": {"normalizer": {"type": "Sequence", "normalizers": doubling}},
        "anything doubles 60 times": {
            "normalizer": {"type": "Sequence", "normalizers": [_replace({"Regex": "."}, "aa")] * 60}
        },
        "a letter that becomes a book": {"normalizer": _replace({"String": "a"}, "a" * 2_000_000)},
        "a preface": {"normalizer": {"type": "Prepend", "prepend": "a" * 2_000_000}},
        "a pattern that is none": {"normalizer": _replace({"Regex": "(("}, "a")},
        "a rule of no kind": {"normalizer": {"type": "Evil"}},
        "rules in rules": {"normalizer": _nested_rules(3000)},
        "words cut by no pattern": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated"}
        },
        "an unknown cut": {"pre_tokenizer": {"type": "Evil"}},
        "no model": {"model": None},
        "a model that is a list": {"model": []},
        "a token 2^40": {"added_tokens": [{"id": 1 << 40, "content": "x", **added}]},
        "a token of a negative number": {"added_tokens": [{"id": -1, "content": "x", **added}]},
        "a token without a text": {"added_tokens": [{"id": 3, **added}]},
        "tokens that are a text": {"added_tokens": "abc"},
        "another version": {"version": "9.9"},
    }


def _nested_rules(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "NFC"}
    for _ in range(min(depth, 300)):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


def _models() -> dict[str, dict[str, Any]]:
    return {
        "with a token 2^32 - 1": {"vocab": {"a": 0, "</s>": 2**32 - 1}},
        "with a token 2^24": {"vocab": {"a": 0, "</s>": 1 << 24}},
        "with a token of text": {"vocab": {"a": "0", "</s>": 1}},
        "with a negative token": {"vocab": {"a": -1, "</s>": 1}},
        "without an end": {"vocab": {"a": 0}},
        "without tokens": {"vocab": {}},
        "whose tokens are a list": {"vocab": ["a"]},
        "that merges strangers": {"merges": ["x y"]},
        "that merges one": {"merges": [["a"]]},
        "that merges to a stranger": {"merges": ["a b"]},
        "that drops everything": {"dropout": 5.0},
        "of no kind": {"type": "Evil"},
        "of one-word pieces without unknowns": {
            "type": "WordPiece",
            "unk_token": "zz",
            "max_input_chars_per_word": 100,
        },
        "of words without unknowns": {"type": "WordLevel", "unk_token": "zz", "vocab": {"</s>": 0}},
        "of no letters": {"type": "Unigram", "unk_id": 0, "vocab": []},
        "of letters without the unknown": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0], ["</s>", 0.0]]},
    }


def _tokenizer(folder: Path, change: dict[str, Any]) -> str:
    (folder / TOKENIZER).write_text(json.dumps({**good_tokenizer(), **change}))
    return TOKENIZER


def _tokenizer_text(folder: Path, text: str, times: int) -> str:
    (folder / TOKENIZER).write_text(text * times)
    return TOKENIZER
