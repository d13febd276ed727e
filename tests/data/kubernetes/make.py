"""Makes the files beside this one from checkouts: `python make.py TRAINER JOBSET`. Descriptions are left out; nothing else is changed.

What they are, and whose, is in README.md.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FILES = {
    "trainjobs": (0, "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "trainingruntimes": (0, "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
    "jobsets": (1, "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
}


def undescribed(value: Any) -> Any:
    """A property may itself be called description: that one is a schema, not a text."""
    if isinstance(value, dict):
        return {k: undescribed(v) for k, v in value.items() if k != "description" or not isinstance(v, str)}
    return [undescribed(v) for v in value] if isinstance(value, list) else value


def main(checkouts: list[str]) -> None:
    for name, (which, path) in FILES.items():
        text = subprocess.check_output(["git", "-C", checkouts[which], "show", f"HEAD:{path}"], text=True)
        crd = undescribed(next(filter(None, yaml.load_all(text, yaml.CSafeLoader))))
        content = json.dumps(crd, separators=(",", ":"), sort_keys=True).encode()
        (Path(__file__).parent / f"{name}.json.xz").write_bytes(lzma.compress(content, preset=9))


if __name__ == "__main__":
    main(sys.argv[1:])
