"""`python -m ottava.compat` runs a script as python does: arguments, paths, exit code, traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def compat(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "ottava.compat", *command, cwd=cwd)


def both(
    script: str, *arguments: str, cwd: Path
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """(under Ottava, under plain python)."""
    return compat(script, *arguments, cwd=cwd), run(script, *arguments, cwd=cwd)


def test_a_script_trains_a_layer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

model = te.Linear(32, 32, device="cpu")
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
x = torch.randn(32, 32)
for _ in range(3):
    optimizer.zero_grad()
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling(amax_history_len=4)):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(te.Linear.__module__, loss.item() < 1)
"""
    )
    done = compat("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ottava.nn.linear True"


def test_the_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "neighbour.py").write_text("x = 1\n")
    (folder / "look.py").write_text(
        """
import pickle, sys, neighbour

class Thing:
    pass

print(__name__, __file__, __spec__, sys.argv, sys.path[0])
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.modules["__main__"].Thing is Thing)
"""
    )
    ours, plain = both("sub/look.py", "-m", "--epochs", "3", cwd=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    assert "['sub/look.py', '-m', '--epochs', '3']" in ours.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(7)",
        "raise SystemExit('a message')",
        "import os; os._exit(5)",
        "def f():\n    raise KeyError('inside')\n\ntry:\n    f()\nexcept KeyError as e:\n    raise ValueError('outside') from e",
        "def broken(:\n    pass",
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1 / 0",
        "import atexit\natexit.register(lambda: print('bye'))\nprint('hello')",
    ],
    ids=["exit code", "exit message", "hard exit", "chained exceptions", "syntax error", "own excepthook", "atexit"],
)
def test_exit_codes_and_tracebacks_are_pythons(tmp_path: Path, source: str) -> None:
    (tmp_path / "script.py").write_text(source + "\n")
    ours, plain = both("script.py", cwd=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)


def test_a_module_runs_with_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text(
        "import sys, transformer_engine.pytorch as te\nprint(__name__, __spec__.name, sys.argv[1:], te.Linear.__name__)\n"
    )
    done = compat("-m", "package.tool", "--x", cwd=tmp_path)
    assert done.stdout.strip() == "__main__ package.tool ['--x'] Linear", done.stderr


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import transformer_engine\nprint(__name__)\n")
    assert compat("app", cwd=tmp_path).stdout == "__main__\n"


def test_a_name_ottava_lacks_is_an_ordinary_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import transformer_engine.pytorch as te\nte.onnx_export\n")
    done = compat("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert "script.py" in done.stderr.splitlines()[1]
    assert done.stderr.strip().endswith(
        "AttributeError: Ottava does not have `transformer_engine.pytorch.onnx_export`. Export with torch.export."
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "a script is missing"),
        (("missing.py",), "cannot open 'missing.py': No such file or directory"),
        (("-m",), "-m needs the name of a module"),
        (("-m", "no_such_package.tool"), "no module named 'no_such_package.tool'"),
        (("--fast", "x.py"), "unknown option '--fast'"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = compat(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_shown(tmp_path: Path) -> None:
    done = compat("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m ottava.compat SCRIPT [ARGS...]")
