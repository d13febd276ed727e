"""Load-bearing walls of docs/architecture.md, as a check of the sources: `python tests/walls.py`, which is a part of `make lint`.

* Format knowledge lives in quant/ and kernels/: nobody else looks into a scheme (its string, its kind, its format, its block), and
  nobody outside of quant/ asks for the class of a recipe. Ask `Scheme` and `Quantization` instead.
* The strategy owns placement: the autograd core knows no parallel mode.
* Who makes a tensor says its dtype: `torch.set_default_dtype` is the user's, and scales are float32 under it too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "ottava"
ROOMS_OF_FORMATS = ("quant/", "kernels/")
RECIPES = {"DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"}
RECIPE_QUESTIONS = {
    "delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling", "mxfp8", "nvfp4",
}  # fmt: skip
INSIDE_A_SCHEME = {"kind", "format", "block"}
LOOKS_INTO_STRINGS = {"startswith", "endswith", "removesuffix", "removeprefix", "split", "partition", "find"}
SCHEME_WORD = re.compile(r":?(e4m3|e5m2|e2m1|tensor|pow2|f32|rht|stochastic|eps=|\d+x\d+)(:|$)")
MAKERS = {"zeros", "ones", "empty", "full", "rand", "randn", "tensor", "as_tensor", "linspace", "eye"}
MODES = {"column", "row"}
WITHOUT_MODES = {
    "nn/core.py", "nn/dgrad.py", "nn/operand.py", "nn/output_gradient.py", "nn/producer.py", "nn/product.py", "nn/stage.py",
    "nn/stage_backward.py", "nn/stage_forward.py", "nn/wgrad.py",
}  # fmt: skip


def breaches(source: str, path: str) -> list[tuple[int, str]]:
    """(line, what is wrong) for a file at `path`, relative to src/ottava."""
    in_room = path.startswith(ROOMS_OF_FORMATS)
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [] if path.startswith("quant/") or path == "recipe.py" else _of_recipes(node)
        found += [] if in_room else _of_schemes(node)
        found += _of_modes(node) if path in WITHOUT_MODES else []
        found += _of_dtypes(node)
    return sorted(set(found))


def _of_recipes(node: ast.AST) -> Iterator[tuple[int, str]]:
    advice = "ask ottava.quant.quantization.Quantization.of(recipe)"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        asked = {_last(n) for argument in node.args[1:] for n in ast.walk(argument)} & RECIPES
        if asked:
            yield node.lineno, f"asks whether a recipe is a {sorted(asked)[0]}: {advice}"
    if isinstance(node, ast.Compare):
        asked = {_last(side) for side in (node.left, *node.comparators)} & RECIPES
        if asked:
            yield node.lineno, f"compares a class with {sorted(asked)[0]}: {advice}"
    method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    if method is not None and method.attr in RECIPE_QUESTIONS and "recipe" in _last(method.value):
        yield method.lineno, f"asks a recipe .{method.attr}(): {advice}"


def _of_schemes(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Attribute) and node.attr in INSIDE_A_SCHEME and _is_scheme(node.value):
        yield node.lineno, f"looks at .{node.attr} of a scheme: ask it a question, or add one to Scheme"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS_INTO_STRINGS:
        words = [n.value for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
        if any(isinstance(w, str) and SCHEME_WORD.match(w) for w in words):
            yield node.lineno, f"takes the string of a scheme apart (.{node.func.attr}): ask Scheme.parse(...)"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        words = [s.value for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)]
        peeks = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        spelled = any(SCHEME_WORD.match(w) for w in words)
        if spelled and (peeks or any(_is_scheme(s) for s in sides)):
            yield node.lineno, f"compares the string of a scheme with {words[0]!r}: ask Scheme.parse(...)"


def _of_modes(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and node.value in MODES and isinstance(node.value, str):
        yield node.lineno, f"knows the parallel mode {node.value!r}: the strategy owns placement"
    if isinstance(node, ast.Attribute) and node.attr == "mode":
        yield node.lineno, "asks for a parallel mode: the strategy owns placement"


def _of_dtypes(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _last(node.func.value) == "torch":
        says = {keyword.arg for keyword in node.keywords} & {"dtype", None}  # None: **options
        if node.func.attr in MAKERS and not says:
            yield node.lineno, f"torch.{node.func.attr} without a dtype: it would follow torch.set_default_dtype"


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c` or `f(...)`; "" for other expressions."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_scheme(node: ast.AST) -> bool:
    inner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return "scheme" in _last(node).lower() or (inner is not None and _last(inner) == "Scheme")


def all_breaches() -> list[str]:
    """ "file:line: what is wrong" for every source file."""
    lines = []
    for file in sorted(SOURCES.rglob("*.py")):
        path = file.relative_to(SOURCES).as_posix()
        lines += [f"src/ottava/{path}:{n}: {what}" for n, what in breaches(file.read_text("utf-8"), path)]
    return lines


if __name__ == "__main__":
    wrong = all_breaches()
    print(
        "\n".join(wrong)
        or "Walls stand: format knowledge in quant/ and kernels/, placement in strategies, dtypes that are said."
    )
    sys.exit(bool(wrong))
