"""Does a recipe train as well as no quantization, and small moments as well as float32 ones? The same job, data and order of samples,
once for each; validation losses compared.

    python benchmarks/convergence.py                                         # the default job, every recipe: CPU, about 15 minutes
    python benchmarks/convergence.py --config examples/train_160m.toml --sources --bar 0.005 \
        --recipes none DelayedScaling Float8CurrentScaling Float8BlockScaling # an H200, about 13 minutes
    python benchmarks/convergence.py --moments float32 bfloat16 float8 --bar 0.005 --precision.recipe=DelayedScaling

Each run is an `ottava train` of its own and is kept (and not repeated) under --runs; one report shows all of them. Exit code 1 if the last
validation loss of a run is above that of "none" (of the first kind of moments) by more than the bar. --json collects the curves; with
--keep runs from an earlier call on the same machine and job stay in the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ottava.train.metrics import read_metrics
from ottava.train.report import write_report
from ottava.train.tokenize import tokenize

RECIPES = [
    "none", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling",
]  # fmt: skip
MOMENTS = ["float32", "bfloat16", "float8"]


def sources(output: Path) -> Path:
    """A token file of all Python sources on this machine that are UTF-8: standard library and installed packages."""
    if not output.is_file():
        roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
        files = sorted({p for root in roots for p in root.rglob("*.py") if p.is_file() and _is_text(p)})
        output.parent.mkdir(parents=True, exist_ok=True)
        found = tokenize(files, output)
        print(f"{output}: {len(files):,} files, {len(found):,} tokens", flush=True)
    return output


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def train(name: str, options: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """One run, of a recipe or a kind of moments, and what came of it."""
    folder = options.runs / name
    command = [sys.executable, "-m", "ottava", "train", *options.config, f"--train.run={folder}"]
    if options.sources:
        command.append(f"--data.files={sources(options.runs / 'sources.tokens')}")
    if options.moments:
        command += ["--optimizer.name=fused_adam", f"--optimizer.moments={name}", *extra]
    else:
        command += [f"--precision.recipe={name}", *extra]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)
    lines = list(read_metrics(folder / "metrics.jsonl"))
    curve = [(line["tokens"], line["validation_loss"]) for line in lines if line.get("validation_loss") is not None]
    settled = lines[len(lines) // 4 :]
    return {
        "validation": curve,
        "tokens_per_s": _median([line["tokens_per_s"] for line in settled]),
        "mfu": _median([line["mfu"] for line in settled if line.get("mfu") is not None]),
        "mfu_basis": lines[-1].get("mfu_basis"),
        "peak_reserved_gib": lines[-1]["peak_reserved_gib"],
    }


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def compare(runs: dict[str, Any], bar: float) -> bool:
    """Prints a table of the last validation losses; whether all are within the bar."""
    good = True
    base = runs.get("none", next(iter(runs.values())))["validation"][-1][1]
    print(f"\n{'':24}{'validation':>12}{'gap':>9}{'tokens/s':>12}{'MFU':>7}")
    for name, run in runs.items():
        loss = run["validation"][-1][1]
        gap = run["gap"] = loss / base - 1
        mfu = "" if run["mfu"] is None else f"{run['mfu']:.3f}"
        print(f"{name:24}{loss:12.4f}{gap:+9.2%}{run['tokens_per_s']:12,.0f}{mfu:>7}")
        good &= gap <= bar
    print(f"\nlargest gap allowed: {bar:.2%}: {'kept' if good else 'NOT KEPT'}")
    return good


def main() -> None:
    """Runs, compares, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", nargs="*", default=[], metavar="CONFIG", help="of `ottava train` (default: its own)"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="default: all")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, help="compare these instead, of FusedAdam")
    parser.add_argument("--sources", action="store_true", help="read all Python sources of this machine")
    parser.add_argument("--bar", type=float, default=0.01, help="largest gap, as a fraction (default: 0.01)")
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"), help="folder for the runs")
    parser.add_argument("--json", type=Path, help="file for the curves")
    parser.add_argument("--keep", action="store_true", help="keep what --json has of other recipes")
    options, extra = parser.parse_known_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    command = " ".join(["python", "benchmarks/convergence.py", *sys.argv[1:]])
    runs: dict[str, Any] = {}
    if options.keep and options.json and options.json.is_file():
        runs = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    names = options.moments or options.recipes
    for name in names:
        runs[name] = train(name, options, extra) | {
            "command": command,
            "device": device,
            "torch": torch.__version__,
        }
        if options.json:
            found = {"bar": options.bar, "runs": runs}
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    good = compare(runs, options.bar)
    if options.json:
        options.json.write_text(json.dumps({"bar": options.bar, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(write_report([options.runs / name for name in names], options.runs / "report.html"))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
