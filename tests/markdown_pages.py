"""What the docs tests need to know about a Markdown page: its fenced blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)$")
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


def prose(page: Path) -> str:
    """The page without its fenced blocks and inline code."""
    kept, inside = [], False
    for line in page.read_text().splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(re.sub(r"`[^`]*`", "", line))
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """Targets of the Markdown and HTML links and images of a page."""
    text = prose(page)
    return [m[1] for pattern in (_LINK, _HTML_LINK) for m in pattern.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The names that `page#name` links may use: one for each heading, made as code hosts make them."""
    names: set[str] = set()
    inside = False
    for line in page.read_text().splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside and re.match(r"#{1,6} ", line):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            names.add(title.replace(" ", "-"))
    return names
