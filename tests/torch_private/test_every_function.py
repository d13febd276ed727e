"""Every private torch API that Ottava leans on has a test in this folder, so that a torch release that changes one fails here, by name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from ottava import torch_private


def _named_in(file: Path) -> set[str]:
    """The x of every `torch_private.x` in a test's code."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_private"
    }


def test_every_function_is_tested_in_this_folder() -> None:
    functions = {
        name
        for name, value in inspect.getmembers(torch_private, inspect.isfunction)
        if value.__module__ == torch_private.__name__
    }
    functions -= {"_no_gpu"}  # stands in for the next two, which are builtins where torch was built with CUDA
    functions |= {"current_device", "current_stream"}
    tested = set().union(
        *(_named_in(file) for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__))
    )
    assert "fsdp2_groups" in functions and not functions - tested, "add a test for what is new"
