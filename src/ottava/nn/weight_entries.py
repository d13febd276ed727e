"""The entries of a weight in a state dict: made, read, checked and turned into values.

[Note: state dict of a stored weight] A weight that `quantized_model_init` has stored in FP8 has these entries, plain tensors or DTensors
of plain tensors, each true to what it says about itself:

    NAME                        uint8 [M, K]; E2M1 [M, K/2], even columns in the low half
    NAME_scale_inv              float32 [1]; or one a block: [ceil(M/B), ceil(K/B)], [M, ceil(K/B)]; uint8 for MXFP8 and NVFP4
    NAME_amax                   float32 [1], where the scheme has one
    NAME_format                 uint8 [24]: element format and block as text ("e4m3:128x128"), padded with zeros; of rows and columns
                                where they differ ("e4m3:1x32/e4m3:tensor")
    NAME_columnwise             uint8 [M, K], where they are not those of NAME: the bytes that backward multiplies by, not transposed
    NAME_columnwise_scale_inv   one a block of these: [ceil(M/B), K]; or float32 [1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.nn.draw import is_dtensor
from ottava.nn.held import full, held, own_part
from ottava.nn.strategy import like_dtensor
from ottava.notices import warn_once
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, WeightMemory
from ottava.quant.weight_operands import upright
from ottava.quant.weight_place import Extent, blocks_of

ENTRIES = ("scale_inv", "amax", "format", "columnwise", "columnwise_scale_inv")


def state_entries(name: str, parameter: Any) -> dict[str, Tensor]:
    """[Note: state dict of a stored weight] of a parameter: plain tensors where every rank has all, else DTensors."""
    weight: Weight = held(parameter)
    memory = weight.memory
    scheme, (_, rows) = memory.scheme, memory.place.part
    columns, count = memory.place.matrix[1], memory.place.rows
    entries = {}
    for direction in memory.directions:
        key = name if direction == ROWWISE else f"{name}_columnwise"
        width = columns // memory.along(direction).elements_per_byte
        entries[key] = _spread(parameter, memory.data[direction][:count], (rows, width))
        blocks = memory.has_blocks(direction)
        entries[f"{key}_scale_inv"] = _scale_entry(parameter, memory, direction) if blocks else memory.group.scale_inv
    entries[f"{name}_format"] = scheme.as_bytes(weight.device)
    if scheme.needs_tensor_amax:
        entries[f"{name}_amax"] = memory.group.amax
    return entries


def _spread(parameter: Any, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` placed as the parameter is; shape: of the whole."""
    return like_dtensor(parameter, tensor, shape) if is_dtensor(parameter) else tensor


def _scale_entry(parameter: Any, memory: WeightMemory, direction: str) -> Tensor:
    """Scales of the parameter's blocks, rows and columns as in the matrix."""
    extent, scale, block = memory.extent(direction), memory.scales(direction), memory.block(direction)
    (first, rows), columns = memory.place.part, memory.place.matrix[1]
    down, across = blocks_of((first, 0, rows, columns), block)
    shape = (down.stop - down.start, across.stop)
    if extent is Extent.MATRIX:
        return scale[down]
    if not is_dtensor(parameter):
        return scale
    if extent is Extent.OWN:
        return like_dtensor(parameter, scale, shape)
    from torch.distributed.tensor import Replicate

    if not memory.tensor_groups:  # every rank has the scales of all rows
        return scale
    placements = [Replicate()] * (parameter.device_mesh.ndim - 1) + [parameter.placements[-1]]
    return like_dtensor(parameter, scale, shape, placements)


def load_entries(name: str, parameter: Any, loaded: Mapping[str, Tensor]) -> str | None:
    """Copies the entries of a stored weight into it; what is wrong with them, if anything."""
    targets = state_entries(name, parameter)
    for key, target in targets.items():
        if key not in loaded:
            return f"{name} is stored in FP8 and its bytes are there, but {key!r} is missing: they mean nothing without it."
        source = loaded[key]
        # torch's loading of full state dicts gives bytes that hold two elements the shape of the parameter.
        shape = tuple(source.shape) if not (key == name and is_dtensor(source)) else tuple(target.shape)
        if shape != tuple(target.shape) or source.dtype != target.dtype:
            return (
                f"{key} is {source.dtype} of shape {tuple(source.shape)} in the state dict, but {target.dtype} of shape "
                f"{tuple(target.shape)} here."
            )
        if key.endswith("_format"):
            if not torch.equal(target.cpu(), source.cpu()):
                return f"{name} is stored as {weight_format(target)} here, but as {weight_format(source)} in the state dict."
            continue
        mine, other = held(target), own_part(target, source)
        if mine.shape != other.shape:
            return f"{key}: this rank holds {tuple(mine.shape)} of it, but the state dict gives {tuple(other.shape)}."
        if mine.data_ptr() != other.data_ptr() or mine.numel() == 0:
            mine.copy_(other)
    held(parameter).memory.bytes_were_loaded()
    return None


def are_values_of(parameter: Any, value: Any) -> bool:
    """Whether an entry has the parameter's values in high precision: all of them, or spread as the parameter is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or isinstance(held(value), QuantizedTensor):
        return False
    if value.shape != parameter.shape or value.is_meta:
        return False
    spread = is_dtensor(value)
    return not spread or (is_dtensor(parameter) and value.placements == parameter.placements)  # type: ignore[attr-defined]


def is_bytes(value: Any) -> bool:
    """Whether an entry is that of a stored weight."""
    plain = isinstance(value, Tensor) and value.dtype == torch.uint8
    return plain and not isinstance(held(value), QuantizedTensor)


def taken(state: dict[str, Any], key: str) -> dict[str, Tensor]:
    """The entries of a weight by what their names end with; all but the first leave the state."""
    found = {"": state[key]}
    return found | {f"_{n}": state.pop(f"{key}_{n}") for n in ENTRIES if f"{key}_{n}" in state}


def drop_own(state: dict[str, Any], prefix: str, entries: Mapping[str, Tensor]) -> None:
    """Takes a weight's own scales out of a state that has only values for it: what torch lists of a model and does not find, it leaves."""
    for key, tensor in list(entries.items())[1:]:
        found = state.get(prefix + key)
        own = isinstance(found, Tensor) and held(found).data_ptr() == held(tensor).data_ptr()
        if own or (found is not None and key.endswith("_format")):  # (made anew each time)
            del state[prefix + key]


def warn_of_zeros(name: str, parameter: Any) -> None:
    """A checkpoint of values that `dcp.load(planner=DefaultLoadPlanner(allow_partial_load=True))` has read into bytes: torch makes whole
    numbers of values, nearly all of them 0, and leaves the scales as they were."""
    memory = held(parameter).memory
    data = memory.data[ROWWISE]
    scales = memory.scales(ROWWISE) if memory.has_blocks(ROWWISE) else memory.group.scale_inv
    if data.is_meta or data.numel() < 64 or int((data != 0).sum()) > data.numel() // 100:
        return
    if bool((scales != (0 if scales.dtype == torch.uint8 else 1)).any()):
        warn_once(
            f"ottava: nearly all FP8 bytes that were loaded for {name} are 0, and their scales are not those of zeros. If the checkpoint "
            "has values in high precision, load it into a model without quantized_model_init, and its state dict into this one."
        )


def copies_of_scales(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scales and amax among the entries, as they are now."""
    return {key: tensor.clone() for key, tensor in entries.items() if key.endswith(("scale_inv", "amax"))}


def bytes_taken_for_values(name: str, value: Any) -> str | None:
    """What is wrong if the value of a weight that is not stored in FP8 is the bytes of one that is, as they are or as numbers.

    torch copies uint8 into a float32 parameter without a word: `dcp.load` of a file that was written by a model with stored weights, and
    `StateDictOptions(full_state_dict=True)`. Then every number is a whole one from 0 to 255, about half of them, the negative values, above
    127, and none is 127 or 255, a NaN of E4M3.
    """
    if not isinstance(value, Tensor) or isinstance(held(value), QuantizedTensor) or value.dim() != 2:
        return None
    numbers = held(value).detach()
    if numbers.dtype != torch.uint8:
        if numbers.is_meta or torch_private.is_fake(numbers) or numbers.numel() < 64 or not _are_bytes(numbers[:1]):
            return None
        if not _are_bytes(numbers) or not 0.2 < (numbers > 127).float().mean() < 0.8:
            return None
    return (
        f"{name} is not stored in FP8 here, but what was loaded for it is the FP8 bytes of a weight that is, not values: they mean nothing "
        f"without {name}_scale_inv and {name}_format. Load such a file into a model that was made inside quantized_model_init, or make "
        "values of it first, in one process without FSDP: torch's dcp_to_torch_save, load_state_dict() of that, and save the state_dict()."
    )


def _are_bytes(numbers: Tensor) -> bool:
    within = (numbers >= 0) & (numbers < 255) & (numbers != 127) & (numbers == numbers.round())
    return bool(within.all())


def as_entries(key: str, value: Any, weight: Weight | None) -> dict[str, Tensor]:
    """A quantized tensor in a state dict, as versions before 0.2 have them, as entries of plain tensors; {} for anything else."""
    if type(value) is not QuantizedTensor or weight is None or value.scheme != weight.scheme:
        return {}
    scheme, parts = value.scheme, value._parts
    entries = {key: parts["rowwise_data"], f"{key}_scale_inv": parts["rowwise_scale_inv"]}
    entries[f"{key}_format"] = scheme.as_bytes(value.device)
    if scheme.needs_tensor_amax and "rowwise_amax" in parts:
        entries[f"{key}_amax"] = parts["rowwise_amax"]
    if weight.memory.two_copies:
        entries[f"{key}_columnwise"] = upright(parts["columnwise_data"], scheme.along(COLUMNWISE))
        entries[f"{key}_columnwise_scale_inv"] = parts["columnwise_scale_inv"].t()
    return entries


def to_values(state: dict[str, Any], key: str) -> None:
    """Entries of a stored weight become its values, for a parameter that is not stored in FP8."""
    if is_bytes(state.get(key)) and f"{key}_format" in state:
        entries = {f"value{ending}": full(tensor) for ending, tensor in taken(state, key).items()}
        state[key] = dequantized_entries("value", entries, torch.float32)


def weight_format(entry: Tensor) -> str:
    """The text of an entry NAME_format.

    >>> weight_format(Scheme.parse("e4m3:128x128:pow2").as_bytes())
    'e4m3:128x128'
    """
    return bytes(entry.cpu().tolist()).rstrip(b"\0").decode("ascii", "replace")


def dequantized_entries(name: str, loaded: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The values of a stored weight, whole, from its entries in a state dict."""
    scheme = Scheme.parse(weight_format(loaded[f"{name}_format"]))
    amax = loaded.get(f"{name}_amax", torch.empty(0, dtype=torch.float32))
    return torch.ops.ottava.dequantize(
        loaded[name], loaded[f"{name}_scale_inv"], amax, str(scheme.along(ROWWISE)), dtype
    )
