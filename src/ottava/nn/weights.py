"""The weights of a module: how they are registered, stored in FP8, given first values and spread over ranks.

What several parameters of one matrix are called, `fused_names` says; what becomes of them in a state dict, `saves_weights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ottava.nn.draw import InitMethod, is_dtensor
from ottava.nn.fused_names import fused
from ottava.nn.held import cut_to, full, held
from ottava.nn.strategy import REPLICATED, Layout
from ottava.nn.weight_entries import ENTRIES, state_entries
from ottava.quant.scheme import weight_scheme
from ottava.quant.state import CURRENT
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import State, Weight
from ottava.quant.weight_memory import Groups, WeightMemory
from ottava.quant.weight_parts import join_parts, link_parts
from ottava.quant.weight_writes import mark_written


def default_init(weight: Tensor) -> Tensor:
    """Normal with a standard deviation of 0.023, TransformerEngine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


class WeightModule(nn.Module):
    """What `QuantizedModule` does with its weights; `SavesWeights` adds state dicts."""

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
            return fused([parameters[part] for part in self.fused[name]])
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
            elif name in own["_parameters"] and not isinstance(weight, Weight):
                self._refuse_columns(name, value)
        super().__setattr__(name, value)

    def _refuse_columns(self, name: str, value: Any) -> None:
        """`fully_shard` has put values in the place of a stored weight, which can be cut into rows alone."""
        cut = [placement for placement in value.placements if placement.is_shard() and placement.dim != 0]
        before = self.stored_weights().get(name)
        if cut and before is not None and before.state is State.WHOLE:
            raise ValueError(
                f"{self.describe(name)} is stored in FP8, and FSDP can cut it into rows only, not by {cut[0]}: let shard_placement_fn "
                "return None for weights that quantized_model_init has made."
            )

    @torch.no_grad()
    def _assign_parts(self, names: list[str], value: Tensor) -> None:
        """Writes the rows of `value` into the parameters `names`, one under the other."""
        parts = {name: getattr(self, name) for name in names}
        stored = self.stored_weights()
        if any(name not in stored for name in names):
            for part, rows in zip(parts.values(), value.split([part.shape[0] for part in parts.values()]), strict=True):
                part.copy_(rows)
            return
        whole = full(value)
        whole = whole.dequantize() if isinstance(whole, QuantizedTensor) else whole
        rows_of = whole.split([part.shape[0] for part in parts.values()])
        self._quantize({name: cut_to(parts[name], rows) for name, rows in zip(parts, rows_of, strict=True)})

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
                drawn[name] = cut_to(weight, target)
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
        # torch exchanges weights like these as whole objects, with what a program has attached to them (`main_grad`, marks of its own).
        attached = {name: dict(vars(p)) for name, p in self._parameters.items() if p is not None}
        result = super()._apply(fn, recurse)
        for name, attributes in attached.items():
            for key in attributes.keys() - vars(self._parameters[name]).keys():
                setattr(self._parameters[name], key, attributes[key])
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

    def _entries(self, name: str) -> dict[str, Tensor]:
        """[Note: state dict of a stored weight], sharing memory with the weight."""
        return state_entries(name, getattr(self, name))


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
