"""What ranks tell each other: plain values arrive as they were sent, and nothing that arrives can run."""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ottava
from ottava import exchange
from ottava.checkpoint.errors import Failure
from ottava.checkpoint.plan import Held, Offer


def test_values_come_back_with_tuples_for_lists():
    held = Held(torch.bfloat16, (4, 2), (((0, 0), (4, 2)),))
    offer = Offer({"w": held}, {"lr": 0.1, "name": "ä\0\ud800"}, {"w": ("model", 0)}, [{"dp": 2}])
    assert exchange.decode(exchange.encode(held)) == held
    back = exchange.decode(exchange.encode(offer))
    assert back.tensors == offer.tensors and back.values == offer.values and back.meshes == ({"dp": 2},)
    for value in (None, True, 0, -(2**70), 1e-310, "", {}, {"a": {"b": None}}, Path("a/b"), torch.float8_e4m3fn):
        assert exchange.decode(exchange.encode(value)) == value
    assert exchange.decode(exchange.encode([1, [2, (3,)]])) == (1, (2, (3,)))
    assert math.isnan(exchange.decode(exchange.encode(math.nan)))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print),
        b"",
        b"[" * 100_000,
        b'{"~": "Path", "v": 3}',
        b'{"~": "dtype", "v": "load"}',
        b'{"~": "system", "v": ["ls"]}',
        b'{"~": "Failure", "v": []}',
        b'{"~": "FileEntry", "v": [1, 2, 3]}',
        b'{"~": ["Failure"], "v": []}',
    ],
)
def test_what_no_rank_sends_is_an_error(data):
    with pytest.raises(ValueError, match="A message of another rank cannot be understood"):
        exchange.decode(data)


def test_what_has_no_plain_form_is_not_sent():
    @dataclass
    class FileEntry:  # of the same name as one that travels
        bytes: int

    for value in (object(), FileEntry(1), torch.zeros(1), {1: 2}.items(), b"abc", print):
        with pytest.raises(ValueError, match="Ranks do not send each other"):
            exchange.encode(value)


def test_a_failure_travels():
    failure = Failure(3, "__3_0.distcp", "No space left on device")
    assert exchange.decode(exchange.encode([failure])) == (failure,)


def test_no_source_of_ours_sends_or_opens_pickles():
    """But for `.metadata`, which DCP wants as one, and which is read as data; and a pipe from a process to what it has forked."""
    words = r"(gather|broadcast|scatter|send|recv)_object|pickle\.loads?\b|Unpickler|torch\.load\b|weights_only=False|marshal"
    root = Path(ottava.__file__).parent
    found = {
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(words, line.partition("#")[0]) and "`" not in line and ">>>" not in line
    }
    assert {
        line for line in found if not line.startswith(("untrusted/inert_pickle.py", "train/nursery.py"))
    } == set(), json.dumps(sorted(found))
