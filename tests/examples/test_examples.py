"""The examples run as their docstrings say, on whatever this machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")


def run(*arguments: str, cwd: Path) -> str:
    """What the example prints; it runs in an empty folder, so that it cannot lean on the checkout or leave files in it."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(str(ROOT / a) if a.startswith("examples/") else a for a in arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not list(cwd.iterdir())
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--use-fp8",), ("--use-fp8-infer",)], ids=str)
def test_te_mnist_learns_digits(tmp_path: Path, options: tuple[str, ...]) -> None:
    output = run("-m", "ottava.compat", "examples/te_mnist.py", *options, cwd=tmp_path)
    assert float(re.findall(r"accuracy ([\d.]+)%", output)[-1]) >= 90.0
    assert ("reloaded, in FP8" in output) == ("--use-fp8-infer" in options)


def test_te_mnist_fails_below_the_accuracy_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"is below 100\.0%"):
        run("-m", "ottava.compat", "examples/te_mnist.py", "--epochs", "1", "--accuracy", "1.0", cwd=tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_te_quantized_init_trains_weights_that_exist_in_fp8_only(tmp_path: Path, recipe: str) -> None:
    output = run("-m", "ottava.compat", "examples/te_quantized_init.py", "--recipe", recipe, cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 10 and losses[-1] < 0.9 * losses[0]


def test_train_layer_learns_the_same_in_fp8_and_bf16(tmp_path: Path) -> None:
    output = run("examples/train_layer.py", cwd=tmp_path)
    plain, quantized = (float(x) for x in re.search(r"bf16 ([\d.]+), current ([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert plain < 1.5 and quantized < 1.5
    assert abs(plain - quantized) < 0.1 * plain


@pytest.mark.parametrize(
    "recipe", ["delayed", "nvfp4", *(pytest.param(r, marks=pytest.mark.extra) for r in ("block", "mxfp8"))]
)
def test_train_layer_takes_every_recipe(tmp_path: Path, recipe: str) -> None:
    assert f"{recipe} " in run("examples/train_layer.py", "--recipe", recipe, "--steps", "3", cwd=tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_scripts_for_transformer_engine_do_not_know_ottava(example: Path) -> None:
    code = re.sub(r'""".*?"""', "", example.read_text(), flags=re.DOTALL)
    assert ("transformer_engine" in code) == example.name.startswith("te_")
    assert ("ottava" in code) != example.name.startswith("te_")
