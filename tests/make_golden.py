"""Derives tests/data from the recordings in shared/golden. Not needed to run the tests; run it again if the recordings change.

    python tests/make_golden.py ../shared/golden

The recordings are 27 MB; the repository keeps under 6 MB of them, and checks all of them:

    quant.safetensors    every input x in full; the recorded bytes and scales of a few small cases, to look at when one differs
    quant.json           sha256 of every recorded array of every case, in Ottava's layout: "odd/e4m3/block1d": {"rowwise_data": ...}
    modules.safetensors  parameters, inputs and output gradients in full, delayed-scaling state in full, and every 32nd row of the
                         outputs, input gradients and weight gradients

`layer.safetensors` (TransformerLayer) is made by the same rule, with every fourth row of the weight gradients.

Layout: recorded 1x128 scales are transposed with their rows padded to 4; 128x128 scales have their columns padded to 4; NVFP4's are
padded to 128 x 4. What the padding holds is not defined, so it is cut off before hashing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DATA = Path(__file__).parent / "data"
MODULES = ("linear", "linear_nobias", "lnlinear_ln", "lnlinear_rms", "lnmlp_gelu", "lnmlp_swiglu")
ROW_STEP = 32
KEPT_IN_FULL = ("odd/e4m3/block1d", "allzero/e5m2/current", "ramp/nvfp4")


def digest(tensor: Tensor) -> str:
    """sha256 over dtype, shape and bytes (rows in order)."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def transformer_engine_cases(file: dict[str, Tensor], fmt: str) -> dict[str, dict[str, Tensor]]:
    """{"odd/e4m3/block1d": {buffer name: tensor}} of one TransformerEngine file."""
    cases: dict[str, dict[str, Tensor]] = {}
    for key in sorted({k.rsplit("/", 1)[0] for k in file if f"/{fmt}/" in k}):
        _, distribution, _, quantizer = key.split("/")
        m, k = file[f"quant/{distribution}/x"].shape
        get = {name.rsplit("/", 1)[1]: tensor for name, tensor in file.items() if name.startswith(f"{key}/")}
        if "data" in get:
            case = {"rowwise_data": get["data"], "rowwise_scale_inv": get["scale_inv"]}
            case |= {"amax": get["amax"]} if "amax" in get else {}
        elif quantizer.startswith("block1d"):
            case = dict(get)
            case["rowwise_scale_inv"] = get["rowwise_scale_inv"][:, :m].t().contiguous()
            case["columnwise_scale_inv"] = get["columnwise_scale_inv"][:, :k].t().contiguous()
        else:
            case = dict(get)
            case["rowwise_scale_inv"] = get["rowwise_scale_inv"][:, : -(-k // 128)].contiguous()
            case["columnwise_scale_inv"] = get["columnwise_scale_inv"][:, : -(-m // 128)].contiguous()
        cases[f"{distribution}/{fmt}/{quantizer}"] = case
    return cases


def transformer_engine_nvfp4_cases(file: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Scales only: Hopper does not compute the data of NVFP4, so what was recorded there is all zeros."""
    cases = {}
    for key in sorted({k.rsplit("/", 1)[0] for k in file if "/nvfp4/" in k}):
        distribution = key.split("/")[1]
        m, k = file[f"quant/{distribution}/x"].shape
        assert not file[f"{key}/rowwise_data"].any() and not file[f"{key}/columnwise_data"].any(), key
        cases[f"{distribution}/nvfp4_te"] = {
            "rowwise_scale_inv": file[f"{key}/rowwise_scale_inv"][:m, : k // 16].contiguous(),
            "columnwise_scale_inv": file[f"{key}/columnwise_scale_inv"][:k, : m // 16].contiguous(),
            "amax": file[f"{key}/amax_rowwise"],
        }
    return cases


def torchao_cases(file: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """MXFP8 and NVFP4 of the torchao file."""
    cases = {}
    for distribution in sorted({key.split("/")[0] for key in file}):
        for fmt in ("e4m3", "e5m2"):
            cases[f"{distribution}/{fmt}/mxfp8"] = {
                "rowwise_data": file[f"{distribution}/{fmt}/rowwise_data"],
                "rowwise_scale_inv": file[f"{distribution}/{fmt}/rowwise_scale"],
                "columnwise_data": file[f"{distribution}/{fmt}/columnwise_data"],
                "columnwise_scale_inv": file[f"{distribution}/{fmt}/columnwise_scale"],
            }
        cases[f"{distribution}/nvfp4"] = {
            "rowwise_data": file[f"{distribution}/nvfp4/data"],
            "rowwise_scale_inv": file[f"{distribution}/nvfp4/block_scale"],
            "tensor_scale": file[f"{distribution}/nvfp4/tensor_scale"],
        }
    return cases


def write_quant(golden: Path) -> None:
    e4m3, e5m2 = load_file(golden / "quant_e4m3.safetensors"), load_file(golden / "quant_e5m2.safetensors")
    torchao = load_file(golden / "mx_nvfp4.safetensors")
    inputs = {key.split("/")[1]: tensor for key, tensor in e4m3.items() if key.endswith("/x")}
    for name, x in inputs.items():  # one input serves all three files
        assert torch.equal(x, e5m2[f"quant/{name}/x"]) and torch.equal(x, torchao.get(f"{name}/x", x)), name
    cases = {
        **transformer_engine_cases(e4m3, "e4m3"),
        **transformer_engine_cases(e5m2, "e5m2"),
        **transformer_engine_nvfp4_cases(e4m3),
        **torchao_cases(torchao),
    }
    digests = {key: {name: digest(tensor) for name, tensor in case.items()} for key, case in sorted(cases.items())}
    (DATA / "quant.json").write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
    full = {f"{key}/{name}": tensor.contiguous() for key in KEPT_IN_FULL for name, tensor in cases[key].items()}
    save_file({**{f"{name}/x": x for name, x in inputs.items()}, **full}, DATA / "quant.safetensors")


def write_modules(golden: Path) -> None:
    kept = {}
    for key, tensor in load_file(golden / "module.safetensors").items():
        _, module, *rest = key.split("/")
        if module not in MODULES:
            continue
        output = len(rest) == 2 and rest[0] != "param" and rest[1][0] in "yd"  # y0, y2, dx0, dx2
        if output:
            tensor = tensor.reshape(-1, tensor.shape[-1])[::ROW_STEP]
        elif "grad" in rest and tensor.dim() == 2:
            tensor = tensor[::ROW_STEP]
        kept["/".join([module, *rest])] = tensor.contiguous()
    save_file(kept, DATA / "modules.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/make_golden.py GOLDEN_DIRECTORY")
    write_quant(Path(sys.argv[1]))
    write_modules(Path(sys.argv[1]))
    total = sum(path.stat().st_size for path in DATA.iterdir())
    print(f"{total / 1e6:.2f} MB in {DATA.name}")
    assert total < 6e6, "tests/data must stay under 6 MB"
