"""DCP's index is read whole, however it is cut; what makes more objects than its size explains is not."""

from __future__ import annotations

import pickle

import pytest
import torch

from ottava.checkpoint import metadata
from ottava.checkpoint.metadata import Chunk, Entry
from ottava.untrusted.inert_pickle import Record, Refused, read_pickle


@pytest.mark.parametrize(("tensors", "boxes"), [(1, 1), (2000, 1), (10, 300), (300, 8)])
def test_honest_indexes_are_within_the_limit(tensors, boxes):
    files = [f"__{i}_0.distcp" for i in range(boxes)]
    entries = {
        f"layers.{i}.w": Entry(
            torch.float32, (boxes, 4), tuple(Chunk((c, 0), (1, 4), files[c], 1000 * i, 900) for c in range(boxes))
        )
        for i in range(tensors)
    }
    data = metadata.encode(entries, {name: tuple(name.split(".")) for name in entries})
    assert metadata.decode(data, dict.fromkeys(files, 1000 * tensors)) == entries


@pytest.mark.parametrize("thing", [b"}", b"]", b"("])
def test_an_object_a_byte_is_refused_soon(thing):
    with pytest.raises(Refused, match="makes more objects than a checkpoint of its size has"):
        read_pickle(b"\x80\x04" + thing * 1_000_000 + b".")


def test_objects_are_records():
    found = read_pickle(pickle.dumps(torch.Size((1, 2))))
    assert isinstance(found, Record) and found.kind == "Size" and found.args == ((1, 2),)
    with pytest.raises(Refused, match=r"names builtins.print"):
        read_pickle(pickle.dumps(print))
