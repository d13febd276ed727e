"""Prepared launches: settled once, replayed with addresses. A kernel that only notes what it is launched with stands in for Triton's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="launch.py needs Triton, which CPU builds of torch come without")

from ottava import torch_private
from ottava.kernels.launch import Launcher


class Kernel:
    """kernel(x_ptr, out_ptr, n, BLOCK): notes compilations and launches."""

    arg_names = ("x_ptr", "out_ptr", "n", "BLOCK")
    constexprs = (3,)

    def __init__(self) -> None:
        self.compilations: list[tuple] = []
        self.launches: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*values: Any, **options: Any) -> Any:
            self.compilations.append(values)
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.function, self.packed_metadata = kernel, "function", "metadata"
        self.run = lambda *args: kernel.launches.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.kernel.launches.append(("through Triton", grid, *values))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 77)
    return Kernel()


def test_a_replay_brings_new_addresses_and_the_stream_in_force(kernel: Kernel) -> None:
    launch = Launcher(kernel).prepare((5,), 4, {"n": 40, "BLOCK": 8}, ("x_ptr", "out_ptr"))
    x, out, other = torch.zeros(40), torch.zeros(40), torch.ones(40)
    launch(x, out)
    assert len(kernel.compilations) == 1 and kernel.compilations[0][0] is x and not kernel.launches
    launch(other, out)
    (args,) = kernel.launches
    assert args[:5] == (5, 1, 1, 77, "function") and args[-4:] == (other.data_ptr(), out.data_ptr(), 40, 8)


def test_what_triton_compiles_apart_is_looked_up_apart(kernel: Kernel) -> None:
    """A pointer that is no multiple of 16."""
    launch = Launcher(kernel).prepare((5,), 4, {"n": 40, "BLOCK": 8}, ("x_ptr", "out_ptr"))
    x, out = torch.zeros(48), torch.zeros(40)
    assert x.data_ptr() % 16 == 0
    for tensor in (x, x[1:41], x, x[1:41]):
        launch(tensor, out)
    assert len(kernel.compilations) == 2 and len(kernel.launches) == 2
    assert [args[-4] for args in kernel.launches] == [x.data_ptr(), x[1:].data_ptr()]


def test_a_launch_goes_to_the_device_of_its_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current, streams = [0], {0: 77, 1: 88}

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch_private, "current_device", lambda: current[0])
    monkeypatch.setattr(torch_private, "current_stream", streams.__getitem__)
    launch = Launcher(kernel).prepare((5,), 4, {"n": 40, "BLOCK": 8}, ("x_ptr", "out_ptr"))
    x, out = torch.zeros(40), torch.zeros(40)
    for place in (0, 1, 0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, place=place: place)
        launch(x, out)
    assert len(kernel.compilations) == 2 and [args[3] for args in kernel.launches] == [77, 88] and current == [0]


def test_the_same_variant_is_compiled_once_for_all_launches(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for n in (40, 56):  # neither 1 nor a multiple of 16: one variant
        launcher.prepare((5,), 4, {"n": n, "BLOCK": 8}, ("x_ptr", "out_ptr"))(torch.zeros(64), torch.zeros(64))
    assert len(kernel.compilations) == 1 and kernel.launches[0][0] == "through Triton"


def test_a_wrong_number_of_tensors_is_an_error(kernel: Kernel) -> None:
    launch = Launcher(kernel).prepare((5,), 4, {"n": 40, "BLOCK": 8}, ("x_ptr", "out_ptr"))
    with pytest.raises(ValueError, match="zip"):
        launch(torch.zeros(40))


def test_who_hooks_into_launches_is_told_by_triton(kernel: Kernel) -> None:
    from triton import knobs

    launch = Launcher(kernel).prepare((5,), 4, {"n": 40, "BLOCK": 8}, ("x_ptr", "out_ptr"))
    x = SimpleNamespace(seen=[])
    launch(torch.zeros(40), torch.zeros(40))
    knobs.runtime.launch_enter_hook.add(x.seen.append)
    try:
        launch(torch.zeros(40), torch.zeros(40))
    finally:
        knobs.runtime.launch_enter_hook.remove(x.seen.append)
    assert kernel.launches[0][0] == "through Triton"
