"""What `QuantizedModule` does with its weights in state dicts: it saves their entries, and loads what entries there are.

A file may have been written by another kind of module: bytes for a weight that is in high precision here, or values for one that is stored
in FP8; a fused weight whole or in parts; quantized tensors of versions before 0.2. Bytes that would mean something else here are an
error of `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.nn.draw import is_dtensor
from ottava.nn.fused_names import join_entries, split_entries
from ottava.nn.held import held, own_part, placed_like
from ottava.nn.initialize import leave_meta_
from ottava.nn.weight_entries import (
    are_values_of,
    as_entries,
    bytes_taken_for_values,
    copies_of_scales,
    dequantized_entries,
    drop_own,
    is_bytes,
    load_entries,
    taken,
    to_values,
    warn_of_zeros,
)
from ottava.nn.weights import WeightModule
from ottava.quant.weight import Weight
from ottava.quant.weight_operands import tensors_of


class SavesWeights(WeightModule):
    """See above; `weight_entries` has [Note: state dict of a stored weight]."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        seen: set[int] = set()
        for name, weight in self.stored_weights().items():
            weight.memory.check_scales()
            if len(weight.memory.group.parts) > 1:
                # The memory that parts share: made by the first forward only, it would be another than these entries.
                tensors_of(weight)
            weight.memory.lay_rows_first()
            for key, tensor in self._entries(name).items():
                # A scale that parts of a matrix share is live in the first one's entry. Others are copies: files hold each by itself.
                shared = tensor.dim() == 1 and tensor.data_ptr() in seen and not tensor.is_meta
                seen.add(tensor.data_ptr())
                destination[prefix + key] = tensor.clone() if shared else tensor

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in torch. To torch's `set_model_state_dict` scales and other entries of stored weights are buffers: with
        `broadcast_from_rank0=True` it sends to other ranks what has the name of a parameter or a buffer, and nothing else."""
        found = super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse or not torch_private.lists_model_state():
            return found
        entries = ((name, key, tensor) for name in self.stored_weights() for key, tensor in self._entries(name).items())
        start = f"{prefix}." if prefix else ""
        # Views: a scale that parts of a matrix share is an entry of each.
        return chain(found, ((start + key, tensor.detach()) for name, key, tensor in entries if key != name))

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
        # First what is to be done before loading: FSDP2 goes back from gathered weights to its shards, somebody's hook renames entries.
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():
            hook(state, prefix, local_metadata, strict, missing, unexpected, errors)
        stored = self.stored_weights()
        for name, weight in stored.items():
            state.update(as_entries(prefix + name, state.get(prefix + name), weight))
        self._rename(state, prefix, stored, errors)
        assign = local_metadata.get("assign_to_params_buffers", False)
        stored = self._off_meta(state, prefix, assign, errors)
        for name, weight in stored.items():
            # torch has copied bytes into the parameter itself (`broadcast_from_rank0`).
            if weight.memory.without_scales:
                state[prefix + name] = self._entries(name)[name]
        given = {name: taken(state, prefix + name) for name in stored if is_bytes(state.get(prefix + name))}
        before = {name: copies_of_scales(self._entries(name)) for name in stored if name not in given}
        for name, entries in given.items():
            parameter = getattr(self, name)
            entries = {f"{name}{ending}": tensor for ending, tensor in entries.items()}
            problem = load_entries(name, parameter, entries)
            given[name] = entries
            if problem is not None:
                errors.append(problem)
            state[prefix + name] = parameter
            warn_of_zeros(name, parameter)
        if given and not errors:
            errors.extend(self._changed_scales(given | before))
        for name in before:
            drop_own(state, prefix, self._entries(name))
        self._store_given(state, prefix, [name for name in stored if name not in given], assign)
        self._dequantize_entries(state, prefix)
        names = (name for names in self.gemm_weights for name in names if name not in stored)
        problems = (bytes_taken_for_values(prefix + name, state.get(prefix + name)) for name in names)
        errors.extend(problem for problem in problems if problem is not None)
        self.__dict__["_load_state_dict_pre_hooks"] = type(hooks)()  # torch would run them once more
        try:
            super()._load_from_state_dict(state, prefix, local_metadata, strict, missing, unexpected, errors)
        finally:
            self.__dict__["_load_state_dict_pre_hooks"] = hooks

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
        given = {name: pair for name, pair in found.items() if assign or are_values_of(*pair)}
        if given:
            self._quantize({name: own_part(parameter, value) for name, (parameter, value) in given.items()})
        state.update({prefix + name: parameter for name, (parameter, _) in given.items()})

    def _changed_scales(self, wanted: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """What is wrong with weights that share scales: loading one has changed another's."""
        problems = []
        for name, entries in wanted.items():
            now = self._entries(name)
            if held(getattr(self, name)).is_meta:
                continue
            for key, tensor in entries.items():
                if key.endswith(("scale_inv", "amax")) and key in now:
                    mine = held(now[key])
                    if not torch.equal(mine, own_part(now[key], tensor).to(mine.device)):
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
            entries = {f"{name}{ending}": tensor for ending, tensor in taken(state, key).items()}
            if state[key].dtype == torch.uint8 and name not in self.stored_weights():
                state[key] = placed_like(parameter, dequantized_entries(name, entries, parameter.dtype))

    def _rename(self, state: dict[str, Any], prefix: str, stored: Mapping[str, Weight], errors: list[str]) -> None:
        """Entries under the name of a whole, where its parts are parameters, and the other way round ([Note: fused names])."""
        for whole, rows in self.fused.items():
            if prefix + whole in state and not any(prefix + part in state for part in rows):
                first = next(iter(rows))
                state.update(as_entries(prefix + whole, state[prefix + whole], stored.get(first)))
                if first not in stored:
                    to_values(state, prefix + whole)
                split_entries(state, prefix, whole, rows, {part: getattr(self, part) for part in rows})
        for whole, rows in self.unsplit.items():
            wanted = self._parameters.get(whole) is not None and prefix + whole not in state
            if wanted and all(prefix + part in state for part in rows):
                for part in rows if whole not in stored else ():
                    to_values(state, prefix + part)
                errors.extend(join_entries(state, prefix, whole, rows, getattr(self, whole)))
