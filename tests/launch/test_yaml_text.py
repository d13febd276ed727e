"""What is written as YAML is read back as the same by a YAML library."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava.launch.yaml_text import documents, to_yaml

yaml = pytest.importorskip("yaml")

TEXTS = st.one_of(
    st.text(),
    st.sampled_from(["yes", "Null", "1", "1e3", "- a", "a: b", "#", "~", "a\nb\n", "a\n\n b\n", " a\nb\n", "0x1f", "a\n", "1:2", "="]),
    st.lists(st.text(alphabet=" ab:#-'\"{", max_size=8), min_size=1).map(lambda lines: "\n".join(lines) + "\n"),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=60)
@given(VALUES)
def test_it_is_read_back_as_the_same(value):
    assert yaml.safe_load(to_yaml(value) + "\n") == value


def test_documents_and_blocks_are_for_people():
    text = documents([{"a": {"b": "x = 1\ny = 2\n"}}, ["c", {"d": "1"}]])
    assert text == 'a:\n  b: |\n    x = 1\n    y = 2\n---\n- c\n- d: "1"\n'
    assert list(yaml.safe_load_all(text)) == [{"a": {"b": "x = 1\ny = 2\n"}}, ["c", {"d": "1"}]]
