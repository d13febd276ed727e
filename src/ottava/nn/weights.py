"""The weights of a module: how they are registered, stored in FP8, split over ranks, saved and loaded.

[Note: state dict of a stored weight] A weight that `quantized_model_init` has stored in FP8 has these entries, plain tensors or DTensors
of plain tensors, each true to what it says about itself:

    NAME                        uint8 [M, K]; E2M1 [M, K/2], even columns in the low half
    NAME_scale_inv              float32 [1]; or one a block: [ceil(M/B), ceil(K/B)], [M, ceil(K/B)]; uint8 for MXFP8 and NVFP4
    NAME_amax                   float32 [1], where the scheme has one
    NAME_format                 uint8 [24]: element format and block as text ("e4m3:128x128"), padded with zeros
    NAME_columnwise             uint8 [M, K], 1-D blocks only: the bytes that backward multiplies by, not transposed
    NAME_columnwise_scale_inv   one a block of these: [ceil(M/B), K]

[Note: fused names] Gate and up of a gated MLP (and q, k, v of a fused projection that is not interleaved) lie one under the other in one
matrix. Tensor-parallel ranks split each by itself, which one DTensor cannot say: so where a module can be split they are parameters
of their own, over one memory. The name of the whole stays usable: it can be read, assigned and loaded. A module that cannot be split
has the whole as its parameter, and loads parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ottava import exchange, torch_private
from ottava.nn.draw import is_dtensor
from ottava.nn.initialize import leave_meta_
from ottava.nn.strategy import REPLICATED, Layout, like_dtensor
from ottava.quant.scheme import Scheme, weight_scheme
from ottava.quant.state import CURRENT
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, Groups, WeightMemory
from ottava.quant.weight_operands import tensors_of, upright
from ottava.quant.weight_parts import join_parts, link_parts
from ottava.quant.weight_place import Extent, blocks_of
from ottava.quant.weight_writes import mark_written

InitMethod = Callable[[Tensor], Any]
ENTRIES = ("scale_inv", "amax", "format", "columnwise", "columnwise_scale_inv")


def default_init(weight: Tensor) -> Tensor:
    """Normal with a standard deviation of 0.023, TransformerEngine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def held(parameter: Any) -> Any:
    """What this rank holds of a parameter: that of a DTensor (the object itself), or the parameter."""
    return torch_private.local_tensor(parameter) if is_dtensor(parameter) else parameter


class WeightModule(nn.Module):
    """What `QuantizedModule` does with its weights."""

    params_dtype: torch.dtype
    device_at_init: torch.device
    layouts: dict[str, Layout]
    weight_mesh: Any
    parallel: Any
    describe: Callable[[str], str]

    def _remember_init(self) -> None:
        """How weights are to be stored, asked once, when the module is constructed."""
        self.quantized_init = CURRENT.init
        self.fused: dict[str, dict[str, int]] = {}
        """[Note: fused names]: name of the whole -> {parameter: its rows in one process}."""
        self.unsplit: dict[str, dict[str, int]] = {}
        """Parameter -> {name: rows} of the parts that it would be where the module can be split: such entries load, too."""

    @property
    def gemm_weights(self) -> list[list[str]]:
        """For each GEMM the parameters that it multiplies by, one under the other."""
        return [list(self.weight_names)]  # type: ignore[arg-type]

    def stored_weights(self) -> dict[str, Weight]:
        """What this rank holds of the parameters that are stored in FP8, by name."""
        found = {name: held(p) for name, p in self._parameters.items() if p is not None}
        return {n: w for n, w in found.items() if isinstance(w, Weight) and w.stored_quantized}

    # ----------------------------------------------------------------------------------------------------------- registering

    def add_parameter(
        self, name: str, shape: tuple[int, ...], split: Mapping[str, int] | None = None, layout: Layout = REPLICATED
    ) -> list[str]:
        """Registers `name`, or the parameters of `split` ({name: rows}), as slices of one buffer. Returns their names.

        shape, split: of the whole; with tp_size > 1 only this rank's part is allocated. Slices of one buffer can be multiplied as
        one matrix without copying them together. A matrix is stored in FP8 if the module is constructed inside
        `quantized_model_init`.
        """
        size = self.parallel.size
        parts = dict(split or {name: shape[0]})
        for part_name, whole in parts.items():
            layout.check(self.describe(part_name), (whole, *shape[1:]), size)
            self.layouts[part_name] = layout
        own = list(shape)
        rows = list(parts.values())
        if layout.dim is not None:
            own[layout.dim] //= size
            rows = [n // size for n in rows] if layout.dim == 0 else rows
        if self.quantized_init is not None and len(shape) == 2:
            self._register_stored(parts, rows, own[1])
            return list(parts)
        buffer = torch.empty(own, dtype=self.params_dtype, device=self.device_at_init)
        for part_name, part in zip(parts, buffer.split(rows), strict=True):
            self.register_parameter(part_name, nn.Parameter(part if split else buffer))
        return list(parts)

    def _register_stored(self, names: Iterable[str], rows: list[int], columns: int) -> None:
        recipe = self.quantized_init.recipe  # type: ignore[union-attr]
        scheme = weight_scheme(recipe)
        made = []
        for name, count in zip(names, rows, strict=True):
            if count % scheme.feature_multiple or columns % scheme.feature_multiple:
                raise ValueError(
                    f"{self.describe(name)} of shape {(count, columns)} cannot be stored by {type(recipe).__name__}: both sizes must be "
                    f"multiples of {scheme.feature_multiple}."
                )
            made.append(
                Weight.stored(self.describe(name), (count, columns), scheme, self.params_dtype, self.device_at_init)
            )
            made[-1].memory.recipe = recipe
        if len(made) > 1:
            join_parts(made)
            for weight in made:  # who has which scales may be another matter now
                weight.memory.forget_bytes()
            for weight in made:
                weight.memory.allocate(self.device_at_init)
        for name, weight in zip(names, made, strict=True):
            self.register_parameter(name, nn.Parameter(weight))

    def fuse_names(self, name: str, rows: Mapping[str, int]) -> None:
        """`name` stands for the parameters `rows`, one under the other ([Note: fused names])."""
        self.fused[name] = dict(rows)
        self.unsplit.pop(name, None)

    def split_rows(self, name: str, rows: Mapping[str, int]) -> None:
        """Makes the parameter `name` several, over its memory ([Note: fused names]). Before it is spread over a mesh."""
        whole = self._parameters.pop(name)
        layout = self.layouts.pop(name)
        assert whole is not None
        size = 1 if layout.dim is None else self.parallel.size
        counts = [n // size for n in rows.values()]
        if isinstance(whole, Weight):
            parts: Iterable[Any] = whole.split_parts(counts)
        else:
            parts = whole.detach().split(counts)
        for part_name, part in zip(rows, parts, strict=True):
            self.register_parameter(part_name, nn.Parameter(part, requires_grad=whole.requires_grad))
            self.layouts[part_name] = layout
        self.fuse_names(name, rows)

    def __getattr__(self, name: str) -> Any:
        # First what is read in every forward, as nn.Module looks for it.
        own = self.__dict__
        if "_parameters" not in own:
            return super().__getattr__(name)
        parameters = own["_parameters"]
        if name in parameters:
            return parameters[name]
        if name in own["_modules"]:
            return own["_modules"][name]
        if name in own.get("fused", ()):
            return _fused([parameters[part] for part in self.fused[name]])
        for weight in parameters:
            if name.startswith(f"{weight}_") and name[len(weight) + 1 :] in ENTRIES:
                entries = self._entries(weight) if isinstance(held(parameters[weight]), Weight) else {}
                if name in entries:
                    return entries[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "fused" in own and name in own["fused"]:
            self._assign_parts(list(self.fused[name]), value.detach())
            return
        if isinstance(value, nn.Parameter) and is_dtensor(value):
            # `fully_shard` alone: before the first forward an optimizer's step or a load may come
            weight = held(value)
            if isinstance(weight, Weight) and weight.stored_quantized:
                self._bind(weight.memory, value)
        super().__setattr__(name, value)

    @torch.no_grad()
    def _assign_parts(self, names: list[str], value: Tensor) -> None:
        """Writes the rows of `value` into the parameters `names`, one under the other."""
        parts = {name: getattr(self, name) for name in names}
        stored = self.stored_weights()
        if any(name not in stored for name in names):
            for part, rows in zip(parts.values(), value.split([part.shape[0] for part in parts.values()]), strict=True):
                part.copy_(rows)
            return
        whole = _full(value)
        whole = whole.dequantize() if isinstance(whole, QuantizedTensor) else whole
        rows_of = whole.split([part.shape[0] for part in parts.values()])
        self._quantize({name: _cut_to(parts[name], rows) for name, rows in zip(parts, rows_of, strict=True)})

    # ---------------------------------------------------------------------------------------------------------- first values

    def initialize_weight(self, names: Iterable[str], init_method: InitMethod | None) -> None:
        """Draws weights that are not on the meta device."""
        drawn: dict[str, Tensor] = {}
        for name in names:
            weight = getattr(self, name)
            if weight.is_meta:
                continue
            stored = isinstance(held(weight), Weight) and held(weight).stored_quantized
            target = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if stored else weight
            with torch.no_grad(), self._initial_stream():
                (init_method or default_init)(target)
            if stored:
                drawn[name] = _cut_to(weight, target)
        if drawn:
            self.store_values(drawn)

    def _initial_stream(self) -> Any:
        """Ranks draw different parts of a weight from different streams, if they were given a tracker of such streams."""
        tracker = self.parallel.get_rng_state_tracker
        if tracker is None or self.parallel.size == 1:
            return contextlib.nullcontext()
        return tracker().fork()

    def store_values(self, values: Mapping[str, Tensor]) -> None:
        """First values of stored weights: what this rank holds, in high precision and by name. Every rank has to call it."""
        self._quantize(values)
        if self.quantized_init is not None and self.quantized_init.preserve:
            for name, value in values.items():
                held(getattr(self, name)).memory.keep_first_values(value.detach().cpu().clone())

    def _quantize(self, values: Mapping[str, Tensor]) -> None:
        """Writes into stored weights, all at once."""
        self.link_weights()
        weights = [held(getattr(self, name)) for name in values]
        for name, weight in zip(values, weights, strict=True):
            self._bind(weight.memory, getattr(self, name))
        Weight.requantize_together_(weights, list(values.values()))
        mark_written(weights)

    def _bind(self, memory: WeightMemory, parameter: Any) -> None:
        """Tells a sharded weight with whom it shares scales, from what its DTensor says."""
        if memory.place.world > 1 and not memory.shard_groups:
            memory.bind(shard_groups_of(parameter, memory.tensor_groups), parameter.device_mesh.device_type)

    # ------------------------------------------------------------------------------------------------------------- many ranks

    def link_weights(self) -> None:
        """Parameters that hold rows of one matrix share its scales again, after something has copied them one by one."""
        for names in self.gemm_weights:
            parts = [held(getattr(self, name)) for name in names]
            if len(parts) > 1 and all(isinstance(p, Weight) and p.stored_quantized for p in parts):
                link_parts(parts)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.link_weights()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.link_weights()

    def place_weight(self, name: str, weight: Weight) -> None:
        """Tells a weight that it is this tensor-parallel rank's box of a larger one."""
        dim, memory = self.layouts[name].dim, weight.memory
        memory.weight_group = None if self.weight_mesh is None else self.weight_mesh.get_group()
        if dim is not None and self.parallel.size > 1:
            memory.place = memory.place.enlarged(dim, self.tp_rank, self.parallel.size)  # type: ignore[attr-defined]
            memory.tensor_groups = (self.parallel.group,)

    def join_ranks(self) -> None:
        """Weights that ranks have made for themselves become boxes of one: they get the scales that one process would give them.

        Where `tp_size` was given at construction. Every rank has to call it.
        """
        weights = {n: w for n, w in self.stored_weights().items() if not w.memory.tensor_groups}
        kept = {n: w.memory.preserved for n, w in weights.items()}
        values = []
        for name, weight in weights.items():
            first = kept[name]
            values.append((weight._values(torch.float32) if first is None else first).to(weight.device))
        for name, weight in weights.items():
            self.place_weight(name, weight)
        if any(weight.is_meta for weight in weights.values()):
            for weight in weights.values():
                weight.memory.allocate("meta")
            return
        Weight.requantize_together_(list(weights.values()), values)
        for name, weight in weights.items():
            weight.memory.preserved = kept[name]

    # --------------------------------------------------------------------------------------------------------- saving, loading

    def _entries(self, name: str) -> dict[str, Tensor]:
        """[Note: state dict of a stored weight], sharing memory with the weight."""
        return state_entries(name, getattr(self, name))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        seen: set[int] = set()
        for name, weight in self.stored_weights().items():
            weight.memory.check_scales()
            if len(weight.memory.group.parts) > 1:
                tensors_of(
                    weight
                )  # the memory that parts share: made by the first forward, these entries would be another
            weight.memory.lay_rows_first()
            for key, tensor in self._entries(name).items():
                # A scale that parts of a matrix share is live in the first one's entry. Others are copies: files hold each by itself.
                shared = tensor.dim() == 1 and tensor.data_ptr() in seen and not tensor.is_meta
                seen.add(tensor.data_ptr())
                destination[prefix + key] = tensor.clone() if shared else tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        state = dict(state_dict)
        stored = self.stored_weights()
        for name, weight in stored.items():
            state.update(_as_entries(prefix + name, state.get(prefix + name), weight))
        self._rename(state, prefix, stored, errors)
        assign = local_metadata.get("assign_to_params_buffers", False)
        stored = self._off_meta(state, prefix, assign, errors)
        for name, weight in stored.items():
            # torch has copied bytes into the parameter itself (`broadcast_from_rank0`).
            if weight.memory.without_scales:
                state[prefix + name] = state_entries(name, getattr(self, name))[name]
        given = {name: _taken(state, prefix + name) for name in stored if _is_bytes(state.get(prefix + name))}
        before = {name: _copies(state_entries(name, getattr(self, name))) for name in stored if name not in given}
        for name, entries in given.items():
            parameter = getattr(self, name)
            entries = from_one_rank(parameter, {f"{name}{ending}": tensor for ending, tensor in entries.items()})
            problem = load_entries(name, parameter, entries)
            given[name] = entries
            if problem is not None:
                errors.append(problem)
            state[prefix + name] = parameter
        if given and not errors:
            errors.extend(self._changed_scales(given | before))
        self._store_given(state, prefix, [name for name in stored if name not in given], assign)
        self._dequantize_entries(state, prefix)
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing, unexpected, errors)

    def _off_meta(self, state: Mapping[str, Any], prefix: str, assign: bool, errors: list[str]) -> dict[str, Weight]:
        """`stored_weights` that can be loaded into: those on the meta device get memory where what is to be loaded lies.

        With `assign=True`. Without it torch loads nothing into a plain parameter on the meta device, with a warning.
        """
        loaded = {}
        for name, weight in self.stored_weights().items():
            value = state.get(prefix + name)
            if not weight.is_meta or value is None or value.is_meta:
                loaded[name] = weight
            elif assign:
                leave_meta_(self._parameters[name], value.device)
                loaded[name] = held(self._parameters[name])
            else:
                errors.append(
                    f"{name} is on the meta device: load_state_dict(assign=True), or give it memory first (to_empty, reset_parameters)."
                )
        self.link_weights()
        return loaded

    def _store_given(self, state: dict[str, Any], prefix: str, names: Iterable[str], assign: bool) -> None:
        """Quantizes values in high precision into stored weights, all at once: one by one, those that share a scale would be rounded again
        with each. (And `assign=True` would replace the parameters.) What is not such values is left to torch."""
        found = {n: (self._parameters[n], state[prefix + n]) for n in names if state.get(prefix + n) is not None}
        given = {name: pair for name, pair in found.items() if assign or _are_values_of(*pair)}
        if given:
            self._quantize({name: _own_part(parameter, value) for name, (parameter, value) in given.items()})
        state.update({prefix + name: parameter for name, (parameter, _) in given.items()})

    def _changed_scales(self, wanted: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """What is wrong with weights that share scales: loading one has changed another's."""
        problems = []
        for name, entries in wanted.items():
            now = state_entries(name, getattr(self, name))
            if held(getattr(self, name)).is_meta:
                continue
            for key, tensor in entries.items():
                if key.endswith(("scale_inv", "amax")) and key in now:
                    mine = held(now[key])
                    if not torch.equal(mine, _own_part(now[key], tensor).to(mine.device)):
                        problems.append(
                            f"{key} is shared with other weights of {type(self).__name__}, and what was loaded for them differs from "
                            f"what {name} has: load all of {self._partners_of(name)} from the state dict of one module."
                        )
        return problems

    def _partners_of(self, name: str) -> list[str]:
        return next((names for names in self.gemm_weights if name in names), [name])

    def _dequantize_entries(self, state: dict[str, Any], prefix: str) -> None:
        """Bytes of weights that are not stored in FP8 here become values."""
        for name, parameter in self._parameters.items():
            key = prefix + name
            if parameter is None or f"{key}_format" not in state or key not in state or is_dtensor(state[key]):
                continue
            entries = {name: state[key]} | {
                f"{name}_{n}": state.pop(f"{key}_{n}") for n in ENTRIES if f"{key}_{n}" in state
            }
            if state[key].dtype == torch.uint8 and name not in self.stored_weights():
                state[key] = _placed_like(parameter, dequantized_entries(name, entries, parameter.dtype))

    def _rename(self, state: dict[str, Any], prefix: str, stored: Mapping[str, Weight], errors: list[str]) -> None:
        """Entries under the name of a whole, where its parts are parameters, and the other way round ([Note: fused names])."""
        for whole, rows in self.fused.items():
            if prefix + whole in state and not any(prefix + part in state for part in rows):
                first = next(iter(rows))
                state.update(_as_entries(prefix + whole, state[prefix + whole], stored.get(first)))
                if first not in stored:
                    _to_values(state, prefix + whole)
                _split_entries(state, prefix, whole, rows, {part: getattr(self, part) for part in rows})
        for whole, rows in self.unsplit.items():
            wanted = self._parameters.get(whole) is not None and prefix + whole not in state
            if wanted and all(prefix + part in state for part in rows):
                for part in rows if whole not in stored else ():
                    _to_values(state, prefix + part)
                errors.extend(_join_entries(state, prefix, whole, rows, getattr(self, whole)))


def _fused(parts: list[Any]) -> Tensor:
    """The parts under one another, with their gradients where all have one."""
    whole = torch.cat(parts)
    if all(part.grad is not None for part in parts):
        whole.grad = torch.cat([part.grad for part in parts])
    return whole


def shard_groups_of(parameter: Any, tensor_groups: Groups) -> Groups:
    """The groups among which FSDP shares a DTensor: those of its sharded dimensions that are not tensor parallelism's."""
    mesh = parameter.device_mesh
    tensor = [torch.distributed.get_process_group_ranks(group) for group in tensor_groups]
    found = []
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() or placement.is_partial() or mesh.size(dim) == 1:
            continue
        group = mesh.get_group(dim)
        if torch.distributed.get_process_group_ranks(group) not in tensor:
            found.append(group)
    return tuple(found)


def _cut_to(parameter: Any, whole: Tensor) -> Tensor:
    """What this rank holds of `whole`, a tensor of the parameter's full shape."""
    if not is_dtensor(parameter):
        return whole
    shape, offset = torch_private.local_box(parameter)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))]


# ----------------------------------------------------------------------------------------------------- entries of a state dict


def state_entries(name: str, parameter: Any) -> dict[str, Tensor]:
    """[Note: state dict of a stored weight] of a parameter: plain tensors where every rank has all, else DTensors."""
    weight: Weight = held(parameter)
    memory = weight.memory
    scheme, (_, rows) = memory.scheme, memory.place.part
    columns, count = memory.place.matrix[1], memory.place.rows
    width = columns // scheme.elements_per_byte
    entries = {
        name: _spread(parameter, memory.data[ROWWISE][:count], (rows, width)),
        f"{name}_format": scheme.as_bytes(weight.device),
    }
    if scheme.needs_tensor_amax:
        entries[f"{name}_amax"] = memory.group.amax
    if scheme.per_tensor:
        entries[f"{name}_scale_inv"] = memory.group.scale_inv
        return entries
    entries[f"{name}_scale_inv"] = _scale_entry(parameter, memory, ROWWISE)
    if memory.two_copies:
        entries[f"{name}_columnwise"] = _spread(parameter, memory.data[COLUMNWISE][:count], (rows, width))
        entries[f"{name}_columnwise_scale_inv"] = _scale_entry(parameter, memory, COLUMNWISE)
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
        mine, other = held(target), _own_part(target, source)
        if mine.shape != other.shape:
            return f"{key}: this rank holds {tuple(mine.shape)} of it, but the state dict gives {tuple(other.shape)}."
        if mine.data_ptr() != other.data_ptr() or mine.numel() == 0:
            mine.copy_(other)
    held(parameter).memory.bytes_were_loaded()
    return None


def _are_values_of(parameter: Any, value: Any) -> bool:
    """Whether an entry has the parameter's values in high precision: all of them, or spread as the parameter is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or isinstance(held(value), QuantizedTensor):
        return False
    if value.shape != parameter.shape or value.is_meta:
        return False
    spread = is_dtensor(value)
    return not spread or (is_dtensor(parameter) and value.placements == parameter.placements)  # type: ignore[attr-defined]


def _own_part(target: Any, source: Tensor) -> Tensor:
    """What this rank holds of an entry: of a DTensor what it has, of a whole tensor what the target's place says."""
    return held(source) if is_dtensor(source) else _cut_to(target, source)


def from_one_rank(parameter: Any, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries, where some ranks may have fewer: they take them from a rank that has them. Every rank has to call it.

    `set_model_state_dict(broadcast_from_rank0=True)` sends what has the name of a parameter or a buffer, so of a stored weight the
    bytes alone; scales stay where they were read.
    """
    if not is_dtensor(parameter):
        return entries
    mesh = parameter.device_mesh
    for dim in range(mesh.ndim):
        group, size = mesh.get_group(dim), mesh.size(dim)
        if size == 1:
            continue
        kinds = {key: (tuple(t.shape), t.dtype) for key, t in entries.items() if not is_dtensor(t)}
        known = exchange.all_gather((sorted(entries), kinds), group, parameter.device)
        most = max(range(size), key=lambda rank: (len(known[rank][0]), -rank))
        if all(names == known[most][0] for names, _ in known):
            continue
        source = torch.distributed.get_global_rank(group, most)
        for key, (shape, dtype) in sorted(known[most][1].items()):
            if all(key in names for names, _ in known):
                continue
            tensor = entries.get(key)
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype, device=parameter.device)
            sent = tensor.to(parameter.device).contiguous()
            torch.distributed.broadcast(sent, source, group=group)
            entries = entries | {key: sent}
    return entries


def _is_bytes(value: Any) -> bool:
    """Whether an entry is that of a stored weight."""
    plain = isinstance(value, Tensor) and value.dtype == torch.uint8
    return plain and not isinstance(held(value), QuantizedTensor)


def _taken(state: dict[str, Any], key: str) -> dict[str, Tensor]:
    """The entries of a weight by what their names end with; all but the first leave the state."""
    found = {"": state[key]}
    return found | {f"_{n}": state.pop(f"{key}_{n}") for n in ENTRIES if f"{key}_{n}" in state}


def _copies(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of scales: bytes are not looked at."""
    return {key: tensor.clone() for key, tensor in entries.items() if key.endswith(("scale_inv", "amax"))}


def _as_entries(key: str, value: Any, weight: Weight | None) -> dict[str, Tensor]:
    """A quantized tensor in a state dict, as versions before 0.2 have them, as entries of plain tensors; {} for anything else."""
    if type(value) is not QuantizedTensor or weight is None or value.scheme != weight.scheme:
        return {}
    scheme, parts = value.scheme, value._parts
    entries = {key: parts["rowwise_data"], f"{key}_scale_inv": parts["rowwise_scale_inv"]}
    entries[f"{key}_format"] = scheme.as_bytes(value.device)
    if scheme.needs_tensor_amax and "rowwise_amax" in parts:
        entries[f"{key}_amax"] = parts["rowwise_amax"]
    if weight.memory.two_copies:
        entries[f"{key}_columnwise"] = upright(parts["columnwise_data"], scheme)
        entries[f"{key}_columnwise_scale_inv"] = parts["columnwise_scale_inv"].t()
    return entries


def _join_entries(state: dict[str, Any], prefix: str, whole: str, rows: Mapping[str, int], parameter: Any) -> list[str]:
    """Puts the entries of parts under the name of the whole; what is wrong with them."""
    found = {name: {e: _full(t) for e, t in _taken(state, prefix + name).items()} for name in rows}
    for name in rows:
        del state[prefix + name]
    values = [entries.pop("") for entries in found.values()]
    state[prefix + whole] = _placed_like(parameter, torch.cat(values))
    weight = held(parameter)
    if not isinstance(weight, Weight) or not _is_bytes(values[0]):
        return []
    for entry in next(iter(found.values())):
        parts = [entries.get(entry) for entries in found.values()]
        if any(part is None for part in parts):
            continue  # `load_entries` says what is missing
        joined = _joined_entry(parts, entry.removeprefix("_"), weight.memory, list(rows.values()))  # type: ignore[arg-type]
        if joined is None:
            return [f"{list(rows)} have different {entry[1:]}, so that their bytes cannot be {whole}'s."]
        state[f"{prefix}{whole}{entry}"] = joined
    return []


def _joined_entry(parts: list[Tensor], entry: str, memory: WeightMemory, rows: list[int]) -> Tensor | None:
    """One entry of the matrix from those of its parts; None if they differ where they have to agree."""
    if parts[0].dim() == 1:
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else None
    if entry == "columnwise":
        return torch.cat(parts)
    block = memory.block(COLUMNWISE if entry.startswith(COLUMNWISE) else ROWWISE)[0]
    joined, first = parts[0].new_empty(-(-sum(rows) // block), parts[0].shape[1]), 0
    for part, count in zip(parts, rows, strict=True):
        top = first // block
        if first % block and not torch.equal(joined[top], part[0]):  # a block that begins in the part before
            return None
        joined[top : top + part.shape[0]] = part
        first += count
    return joined


def _to_values(state: dict[str, Any], key: str) -> None:
    """Entries of a stored weight become its values, for a parameter that is not stored in FP8."""
    if _is_bytes(state.get(key)) and f"{key}_format" in state:
        entries = {f"value{ending}": _full(tensor) for ending, tensor in _taken(state, key).items()}
        state[key] = dequantized_entries("value", entries, torch.float32)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def weight_format(entry: Tensor) -> str:
    """The text of an entry NAME_format.

    >>> weight_format(Scheme.parse("e4m3:128x128:pow2").as_bytes())
    'e4m3:128x128'
    """
    return bytes(entry.cpu().tolist()).rstrip(b"\0").decode("ascii", "replace")


def dequantized_entries(name: str, loaded: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The values of a stored weight, whole, from its entries in a state dict."""
    scheme = Scheme.parse(weight_format(loaded[f"{name}_format"]))
    amax = loaded.get(f"{name}_amax", torch.empty(0))
    return torch.ops.ottava.dequantize(loaded[name], loaded[f"{name}_scale_inv"], amax, str(scheme), dtype)


def _split_entries(
    state: dict[str, Any], prefix: str, whole: str, rows: Mapping[str, int], parts: Mapping[str, Any]
) -> None:
    """Puts the entries of `whole` under the names of its parts, each with its rows."""
    value = state.pop(prefix + whole)
    extra = {n: state.pop(f"{prefix}{whole}_{n}") for n in ENTRIES if f"{prefix}{whole}_{n}" in state}
    own = list(rows.values())
    if not is_dtensor(next(iter(parts.values()))):  # a plain part of a tensor-parallel rank may be smaller
        own = [parts[name].shape[0] for name in rows]
    first = 0
    for name, count in zip(rows, own, strict=True):
        part = parts[name]
        state[prefix + name] = _placed_like(part, value[first : first + count])
        if not extra:
            first += count
            continue
        for entry, tensor in extra.items():
            state[f"{prefix}{name}_{entry}"] = _rows_of_entry(tensor, entry, held(part).memory, first, count)
        first += count


def _rows_of_entry(tensor: Tensor, entry: str, memory: WeightMemory, first: int, count: int) -> Tensor:
    """The entry of rows [first, first + count) of a whole matrix."""
    if entry == "format" or tensor.dim() == 1:
        return tensor
    if entry == "columnwise":
        return tensor[first : first + count]
    block = memory.block(COLUMNWISE if entry.startswith(COLUMNWISE) else ROWWISE)
    return tensor[blocks_of((first, 0, count, 1), block)[0]]


def _placed_like(parameter: Any, value: Tensor) -> Tensor:
    """A plain tensor of a parameter's full shape, spread as the parameter is."""
    if not is_dtensor(parameter) or is_dtensor(value):
        return value
    return like_dtensor(parameter, _cut_to(parameter, value).to(parameter.device), tuple(value.shape))


__all__ = [
    "ENTRIES", "InitMethod", "WeightModule", "default_init", "held", "load_entries", "shard_groups_of", "state_entries",
]  # fmt: skip
