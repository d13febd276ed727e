"""What the docs tests need to know about a Markdown page: its fenced blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)$")
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HTML_LINK = re.compile(r"""\b(?:src|srcset|href)="([^"]+)\"""")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    info: str
    """What stands after the backticks: a language, then perhaps options."""
    text: str
    line: int
    """Line of the page on which the text begins, from 1."""

    @property
    def language(self) -> str:
        """First word of the info string."""
        return self.info.split()[0] if self.info.split() else ""

    @property
    def options(self) -> str:
        """The info string after the language."""
        return self.info[len(self.language) :].strip()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    opened: tuple[str, str, str, int] | None = None  # indent, ticks, info, first line
    body: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, body = (fence["indent"], fence["ticks"], fence["info"].strip(), number + 1), []
        elif fence and fence["ticks"].startswith(opened[1]) and not fence["info"].strip():
            found.append(Block(opened[2], "\n".join(body) + "\n", opened[3]))
            opened = None
        else:
            body.append(line.removeprefix(opened[0]))
    if opened is not None:
        raise ValueError(f"{page.name}:{opened[3] - 1}: this fenced block is never closed.")
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page outside its fenced blocks."""
    fenced = {n for b in blocks(page) for n in range(b.line - 1, b.line + b.text.count("\n") + 1)}
    return [(n, line) for n, line in enumerate(page.read_text().splitlines(), start=1) if n not in fenced]


def code_spans(page: Path) -> list[tuple[int, str]]:
    """The `inline code` of a page, with its line."""
    return [(n, span) for n, line in prose(page) for span in _SPAN.findall(line)]


def links(page: Path) -> list[str]:
    """Targets of the Markdown and HTML links and images of a page."""
    text = "\n".join(_SPAN.sub("code", line) for _, line in prose(page))
    return [m[1] for pattern in (_LINK, _HTML_LINK) for m in pattern.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The names that `page#name` links may use: one for each heading, made as code hosts make them."""
    headings = [line.lstrip("#").strip().lower() for _, line in prose(page) if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
