"""`import ottava` needs torch alone, works without CUDA, and is quick."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ottava

ROOT = Path(__file__).resolve().parents[1]
SECONDS_ALLOWED = 0.5  # what `import ottava` may add to `import torch`
# Present on some machines, needed on none of them to import the package.
NOT_AT_IMPORT = ("triton", "safetensors", "transformers", "transformer_engine", "torchao", "matplotlib", "pytest")


def run_python(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick() -> None:
    # torch is left out, and what other processes do meanwhile: seconds of the processor.
    code = "import torch, time; t = time.process_time(); import ottava; print(time.process_time() - t)"
    seconds = min(float(run_python(code)) for _ in range(3))
    assert seconds <= SECONDS_ALLOWED, f"import ottava took {seconds:.2f} s on top of torch"


def test_import_loads_nothing_but_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import ottava; "
        "print(' '.join(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    loaded = set(run_python(code).split())
    assert "ottava" in loaded
    assert not loaded & set(NOT_AT_IMPORT), f"import ottava also imports {sorted(loaded & set(NOT_AT_IMPORT))}"


@pytest.mark.parametrize("package", ["numpy", "triton", "safetensors"])
def test_import_works_without(package: str) -> None:
    # None in sys.modules makes every later import of the package fail, as if it were not installed.
    assert run_python(f"import sys; sys.modules[{package!r}] = None; import ottava; print(ottava.__name__)") == "ottava"


def test_import_works_with_cuda_hidden() -> None:
    code = "import ottava, torch; print(torch.cuda.is_available(), ottava.Linear(16, 16, device='cpu').weight.device)"
    assert run_python(code, CUDA_VISIBLE_DEVICES="") == "False cpu"


def test_import_reads_and_prints_nothing() -> None:
    assert run_python("import ottava") == ""


def test_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ottava.__version__ == project["version"]


def test_every_public_name_exists() -> None:
    missing = [name for name in ottava.__all__ if not hasattr(ottava, name)]
    assert not missing
