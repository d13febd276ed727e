"""How an op is defined: a torch reference, a Triton kernel and a fake (shape) function, chosen by where the tensors are.

    define("double", reference=..., fake=..., cuda=...)

registers `torch.ops.ottava.double`. The reference runs on any device and is the truth; the CUDA version must give its bytes.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ottava"
log = logging.getLogger("ottava")


def define(
    name: str,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Registers `ottava::name`. The op's schema is read from the annotations of `reference`."""
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", reference, mutates_args=mutates)
    op.register_fake(fake)
    if cuda is not None:
        op.register_kernel("cuda", functools.partial(_pick, cuda, reference))
    return op._opoverload if hasattr(op, "_opoverload") else getattr(torch.ops.ottava, name)


def _pick(cuda: Callable, reference: Callable, *args: Any, **kwargs: Any) -> Any:
    return (cuda if has_triton() else reference)(*args, **kwargs)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported. CPU builds of torch come without it; then CUDA tensors take the reference path."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def say_once(message: str) -> None:
    """Logs `message` at INFO level the first time it is given."""
    log.info(message)
