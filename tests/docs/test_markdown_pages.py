"""The docs tests see what they should see in a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_pages import anchors, blocks, code_spans, links

PAGE = """# A title, with `code`!

See [the page](other.md#part "hint"), ![picture](a/b.svg) and `make test`.
<img src="c.svg" width="3">

```python no-run: needs a cluster
# not a heading
[not](a-link.md)
```

- a list
  ```bash
  make lint
  ```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_blocks_have_language_options_text_and_line(page: Path) -> None:
    python, bash = blocks(page)
    assert (python.language, python.options, python.line) == ("python", "no-run: needs a cluster", 7)
    assert python.text == "# not a heading\n[not](a-link.md)\n"
    assert (bash.language, bash.options, bash.text) == ("bash", "", "make lint\n")


def test_links_are_those_outside_of_code(page: Path) -> None:
    assert links(page) == ["other.md#part", "a/b.svg", "c.svg"]


def test_anchors_are_the_headings(page: Path) -> None:
    assert anchors(page) == {"a-title-with-code"}


def test_code_spans_have_their_line(page: Path) -> None:
    assert (3, "make test") in code_spans(page)


def test_an_open_block_is_an_error(page: Path) -> None:
    page.write_text("text\n```python\n1\n")
    with pytest.raises(ValueError, match=r"page\.md:2"):
        blocks(page)
