"""How an op is defined: a torch reference, a Triton kernel and a fake (shape) function, chosen by where the tensors are.

    define("double", reference=..., fake=..., cuda=...)

registers `torch.ops.ottava.double`. The reference runs on any device and is the truth; the CUDA version must give its bytes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private

NAMESPACE = "ottava"


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
FUNCTIONS = {"cpu": SimpleNamespace(), "cuda": SimpleNamespace()}
"""By device, what the dispatcher would find for each op."""


def define(
    name: str,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    mutates: tuple[str, ...] = (),
    cuda_launches: bool = False,
    autograd: Callable | None = None,
) -> Any:
    """Registers `ottava::name`. The op's schema is read from the annotations of `reference`.

    cuda_launches: the CUDA version allocates and launches, and autograd sees nothing of it: it is called as it is. Where it gives up
    and calls a reference, that is `without_gradients`.
    autograd: called instead where autograd may record.

    `Library.impl` rather than `torch.library.custom_op`: the latter adds about 20 us of Python to every call on a GPU.
    """
    schema = torch.library.infer_schema(reference, op_name=name, mutates_args=mutates)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_gradients(reference), "CompositeExplicitAutograd")
    if cuda is not None and has_triton():
        _LIBRARY.impl(name, cuda if cuda_launches else without_gradients(cuda), "CUDA")
    setattr(FUNCTIONS["cpu"], name, reference)
    setattr(FUNCTIONS["cuda"], name, cuda if cuda is not None and has_triton() else reference)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.ottava, name).default
    if autograd is not None:
        _LIBRARY.impl(name, autograd, "Autograd")
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _outside_autocast(op), f"Autocast{device}")
    return op


def plain_functions(x: Tensor) -> Any:
    """What has the ops as attributes, to be called on tensors like x: the functions themselves where nobody wants to see the ops,
    `torch.ops.ottava` elsewhere. For where autograd records nothing: inside of a Function, or with detached tensors.

    The dispatcher's way into Python and back takes about 10 us a call, more than a prepared launch.
    """
    device = x.device.type
    if (
        (type(x) is Tensor or type(x) is torch.nn.Parameter)
        and device in FUNCTIONS
        and not torch_private.dispatch_modes()
        and not torch_private.function_modes()
        and not torch_private.transforms_active()
        and not torch_private.is_tracing()
        and not torch_private.profiler_enabled()
        and not torch.is_autocast_enabled(device)
    ):
        return FUNCTIONS[device]
    return torch.ops.ottava


def without_gradients(function: Callable) -> Callable:
    """`function` under `no_grad`: ops are not differentiable, but may be called where gradients are recorded, as by an exported graph."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _outside_autocast(op: Any) -> Callable:
    """The op for where `torch.autocast` is on, which would turn the float32 products inside of it into bf16 ones.

    Registered for the dispatch key of autocast: where that is off, nobody asks.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return op(*args, **kwargs)

    return call


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported. CPU builds of torch come without it; then CUDA tensors take the reference path."""
    return importlib.util.find_spec("triton") is not None
