"""The docs are run: every python block executes, every link leads somewhere, every command that is named exists."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest

import ottava
import ottava.optimizers
from markdown_pages import Block, anchors, blocks, code_spans, links
from ottava.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block in any other language would be a way around the checks below.
LANGUAGES = {"python", "bash", "text", "toml", "json", "make"}
# Inline code that begins so is a command, and is checked like a line of a shell block.
COMMANDS = ("make ", "ottava ", "python -m ottava", "python docs/", "python examples/", "python benchmarks/")
NO_RUN = re.compile(r"no-run: \S.*")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_pages() -> list[Path]:
    return [page for page in PAGES if any(b.language == "python" for b in blocks(page))]


def shell_lines() -> list[tuple[str, str]]:
    """(where it stands, text) of each line of a shell block and each piece of inline code."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                text = block.text.replace("\\\n", " ")  # a line that goes on below
                found += [(page, block.line + n, line) for n, line in enumerate(text.splitlines())]
        found += [(page, number, span) for number, span in code_spans(page) if span.startswith(COMMANDS)]
    return [(f"{page_name(page)}:{number}", line) for page, number, line in found]


def shell_commands() -> list[tuple[str, list[str]]]:
    """(where it stands, words) of each command; a line may start with a prompt, chain commands, end with a comment."""
    found = []
    for where, line in shell_lines():
        for command in re.split(r"&&|\|\||;|\|", line.partition("#")[0]):
            words = shlex.split(command.strip().removeprefix("$ "))
            if words:
                found.append((where, words))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def run_block(page: Path, block: Block, namespace: dict) -> None:
    """Executes a block; a traceback shows the page and its line."""
    padded = "\n" * (block.line - 1) + block.text
    exec(compile(padded, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", python_pages(), ids=page_name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One page is one program, read from top to bottom. In an empty folder, so that no block relies on the checkout.
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__docs__"}
    for block in blocks(page):
        if block.language == "python" and not block.options:
            run_block(page, block, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_name_a_known_language(page: Path) -> None:
    for block in blocks(page):
        where = f"{page_name(page)}:{block.line - 1}"
        assert block.language in LANGUAGES, f"{where}: block language {block.language!r}, expected one of {LANGUAGES}"
        if block.options:
            assert block.language == "python", f"{where}: only python blocks take options, got {block.options!r}"
            assert NO_RUN.fullmatch(block.options), f"{where}: write 'python no-run: the reason', got {block.info!r}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):  # https:, mailto:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page_name(page)}: link to {link}, but {path} does not exist"
        assert target.is_relative_to(ROOT), f"{page_name(page)}: link to {link} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page_name(page)}: {path or page.name} has no heading #{anchor}"


def test_make_commands_exist() -> None:
    for where, words in shell_commands():
        if words[0] == "make":
            named = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
            unknown = set(named) - make_targets()
            assert not unknown, f"{where}: the Makefile has no target {sorted(unknown)}"


def is_runnable(module: str) -> bool:
    """Whether `python -m module` has something to run: a module, or a package with a `__main__`."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec is not None


def test_modules_and_scripts_named_in_commands_exist() -> None:
    for where, words in shell_commands():
        if Path(words[0]).name not in ("python", "python3", "torchrun"):
            continue
        for script in (w for w in words[1:] if w.endswith(".py") and "/" in w):
            assert (ROOT / script).exists(), f"{where}: {script} does not exist"
        if words[1:2] == ["-m"] and words[2].startswith("ottava"):
            assert is_runnable(words[2]), f"{where}: python -m {words[2]} runs nothing"


def ottava_commands() -> dict[tuple[str, ...], str]:
    """The `ottava` commands that shell blocks name, each with the first place that names it."""
    found: dict[tuple[str, ...], str] = {}
    for where, words in shell_commands():
        if Path(words[0]).name in ("python", "python3") and words[1:3] == ["-m", "ottava"]:
            words = words[2:]
        if words[0] == "ottava":
            # The plain words up to the first option or path name the command: `ottava bench layer --steps 10`.
            named = itertools.takewhile(lambda w: re.fullmatch(r"[a-z][a-z-]*", w), words[1:])
            found.setdefault(tuple(named), where)
    return found


def test_ottava_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for command, where in ottava_commands().items():
        try:
            code = main([*command, "--help"])
        except SystemExit as end:
            code = end.code
        assert code in (0, None), f"{where}: ottava {' '.join(command)} --help says {capsys.readouterr().err}"


def test_names_that_readme_says_work_exist() -> None:
    rooms = (ottava, ottava.recipe, ottava.optimizers)
    for line in (ROOT / "README.md").read_text().splitlines():
        name, _, state = line.strip("| ").partition(" | ")
        if state.startswith("works"):
            for word in re.findall(r"`([A-Za-z_]+)`", name):
                known = any(hasattr(room, word) for room in rooms) or word == "is_first_microbatch"
                assert known, f"README says that {word} works, but there is no such name"
