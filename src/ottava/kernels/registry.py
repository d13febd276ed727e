"""How an op is defined: a torch reference, a Triton kernel and a fake (shape) function, chosen by where the tensors are.

    define("double", reference=..., fake=..., cuda=...)

registers `torch.ops.ottava.double`. The reference runs on any device and is the truth; the CUDA version must give its bytes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ottava"


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define(
    name: str,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Registers `ottava::name`. The op's schema is read from the annotations of `reference`.

    `Library.impl` rather than `torch.library.custom_op`: the latter adds about 20 us of Python to every call on a GPU.
    """
    schema = torch.library.infer_schema(reference, op_name=name, mutates_args=mutates)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _without_autocast(reference), "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, _without_autocast(cuda if has_triton() else reference), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ottava, name).default


def _without_autocast(function: Callable) -> Callable:
    """`function` outside of `torch.autocast`, which would turn the float32 products inside of it into bf16 ones."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_grad_enabled()
        ):  # called outside of an autograd Function, as by an exported graph: ops are not differentiable
            with torch.no_grad():
                return call(*args, **kwargs)
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported. CPU builds of torch come without it; then CUDA tensors take the reference path."""
    return importlib.util.find_spec("triton") is not None
