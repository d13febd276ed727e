"""The protocol of mailboxes, played by threads: what is sent arrives, in any order of methods, and no mailbox is written too early.

On a GPU the same code gives copies and signals to streams; here they run where they are given (tests/gpu/test_overlap.py has the GPU).
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.nn.operand import Operand
from ottava.overlap import bulk, pipeline, ring
from ottava.overlap.symmetric_memory import (
    HALVES,
    SMALLEST,
    Place,
    SymmetricMemory,
    Workspace,
    misplaced_because,
    missing_because,
)


class Shared:
    """What the threads share: buffers, signal pads and a barrier."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.lock = size, threading.Barrier(size), threading.Lock()
        self.workspaces: dict[int, tuple[list[Tensor], dict[tuple[int, int, int], int]]] = {}


class Signals:
    """`put_signal` turns a remote 0 into 1, `wait_signal` a local 1 into 0; both wait until they can, as torch's do."""

    def __init__(self, shared: Shared, pad: dict[tuple[int, int, int], int], rank: int) -> None:
        self.shared, self.pad, self.rank = shared, pad, rank

    def _turn(self, key: tuple[int, int, int], expected: int) -> None:
        deadline = time.monotonic() + 20
        while True:
            with self.shared.lock:
                if self.pad.get(key, 0) == expected:
                    self.pad[key] = 1 - expected
                    return
            assert time.monotonic() < deadline, ("nobody signals", key, expected)
            time.sleep(0)

    def put_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        self._turn((rank, channel, self.rank), 0)

    def wait_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        self._turn((self.rank, channel, rank), 1)


class Inline:
    """Lanes whose work is done when it is given."""

    def mark(self) -> None:
        return None

    def follow(self, event: Any) -> None:
        pass

    @contextlib.contextmanager
    def lane(self, which: str, after: Any) -> Iterator[None]:
        yield


class Threaded(SymmetricMemory):
    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.size, self.rank = shared, shared.size, rank
        self.lanes, self.timeout_ms, self.made = Inline(), 0, 0  # type: ignore[assignment]
        self._start()

    def settle(self) -> None:
        self.shared.barrier.wait()

    def allocate(self, mailbox: int) -> Workspace:
        self.made += 1
        with self.shared.lock:
            if self.made not in self.shared.workspaces:
                count = HALVES * self.size * mailbox
                buffers = [torch.full((count,), 99, dtype=torch.uint8) for _ in range(self.size)]
                self.shared.workspaces[self.made] = (buffers, {})
            buffers, pad = self.shared.workspaces[self.made]
        return Workspace(buffers, Signals(self.shared, pad, self.rank), mailbox)


def play(transport: Threaded, seed: int, turns: int) -> None:
    """The same methods in the same order on all ranks, at their own pace; every result is checked."""
    size, rank = transport.size, transport.rank
    plan, pace = random.Random(seed), random.Random(seed * 100 + rank)
    open_gathers: list[Callable[[], None]] = []

    def multiply(operands: list[Operand]) -> Tensor:
        time.sleep(pace.random() * 2e-4)
        return operands[0].data * 2.0

    for turn in range(turns):
        method, rows = plan.choice(["ring", "pipeline", "scatter", "bulk"]), plan.choice([8, 24, 200])
        parts = [torch.full((rows, 3), float(100 * turn + r)) for r in range(size)]
        whole = torch.cat(parts)
        if method in ("ring", "pipeline"):
            own = [Operand(parts[rank])]
            done = (
                ring.gather_multiply(transport, own, multiply, lambda: None)
                if method == "ring"
                else pipeline.gather_multiply(transport, own, multiply, lambda: None, 4)
            )
            assert torch.equal(done[0], whole * 2.0) and torch.equal(done[1][0].data, whole)
        elif method == "scatter":
            y = pipeline.multiply_scatter(transport, [Operand(whole + rank)], multiply, 4)(None)
            assert torch.equal(y, sum(2.0 * (parts[rank] + r) for r in range(size)))
        else:
            arrive = bulk.begin_gather(transport, [Operand(parts[rank])])

            def check(arrive: Callable[[], Any] = arrive, whole: Tensor = whole) -> None:
                assert torch.equal(arrive()[0].data, whole)

            open_gathers.append(check)  # waited for some turns later
        while len(open_gathers) > plan.randrange(3):
            open_gathers.pop(0)()


@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_whatever_the_order_and_the_pace(size: int) -> None:
    shared = Shared(size)
    assert in_threads(lambda rank: play(Threaded(shared, rank), seed=size, turns=40), size) == []


def test_a_longer_message_gets_a_larger_workspace() -> None:
    shared = Shared(2)

    def work(rank: int) -> None:
        transport = Threaded(shared, rank)
        for rows in (4, SMALLEST // 16, 4):
            parts = [torch.full((rows, 8), float(r)) for r in range(2)]
            gathered = bulk.begin_gather(transport, [Operand(parts[rank])])()
            assert torch.equal(gathered[0].data, torch.cat(parts))
        assert transport.made == 2

    assert in_threads(work, 2) == []


def in_threads(work: Callable[[int], None], size: int) -> list[BaseException]:
    """`work(rank)` in a thread for each rank: what they raised."""
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.mark.parametrize("method", ["ring", "scatter"])
def test_an_error_between_messages_is_not_a_wait_for_ever(method: str) -> None:
    """All ranks fail in their second product, as when memory is short: what comes next says so at once."""
    shared = Shared(4)

    def work(rank: int) -> None:
        transport, products = Threaded(shared, rank), 0

        def multiply(operands: list[Operand]) -> Tensor:
            nonlocal products
            products += 1
            if products == 2:
                raise MemoryError("no room")
            return operands[0].data * 2.0

        operands = [Operand(torch.ones(64, 3))]
        with pytest.raises(MemoryError):
            if method == "ring":
                ring.gather_multiply(transport, operands, multiply, lambda: None)
            else:
                pipeline.multiply_scatter(transport, operands, multiply, 4)
        with pytest.raises(RuntimeError, match="ended in MemoryError before all of its messages were sent"):
            bulk.begin_gather(transport, operands)

    assert in_threads(work, 4) == []


def test_an_error_behind_the_last_message_leaves_the_mailboxes_in_order() -> None:
    shared = Shared(2)

    def work(rank: int) -> None:
        transport = Threaded(shared, rank)
        parts = [torch.full((8, 3), float(r)) for r in range(2)]

        def fail(operands: list[Operand]) -> Tensor:
            raise MemoryError("no room")

        for _ in range(3):
            with pytest.raises(MemoryError):
                pipeline.gather_multiply(transport, [Operand(parts[rank])], fail, lambda: None, 4)
            bulk.begin_gather(transport, [Operand(parts[rank])])  # and never waited for
            gathered = bulk.begin_gather(transport, [Operand(parts[rank])])()
            assert torch.equal(gathered[0].data, torch.cat(parts))

    assert in_threads(work, 2) == []


def test_what_is_copied_is_waited_for_even_if_nobody_finishes() -> None:
    """On a GPU its memory would be given to others under the copy."""
    shared, followed = Shared(2), [0, 0]

    def work(rank: int) -> None:
        transport = Threaded(shared, rank)

        def count(event: Any) -> None:
            followed[rank] += 1

        transport.lanes.follow = count  # type: ignore[method-assign]
        transport.lanes.mark = object  # type: ignore[method-assign,assignment]
        begun = bulk.begin_gather(transport, [Operand(torch.ones(8, 3))])
        shared.barrier.wait()
        assert followed[rank] == 0
        del begun
        gc.collect()
        assert followed[rank] == 2  # what arrived, and what left

    assert in_threads(work, 2) == []


def test_places_that_speak_against_it_are_named() -> None:
    here, there = Place(1, 10, 0), Place(2, 11, 0)
    assert misplaced_because([here, here._replace(gpu=11)]) is None
    assert misplaced_because([here, there]) == "the group's ranks are on 2 machines"
    shared = misplaced_because([here, here._replace(may_share=1)])
    assert shared is not None and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, in all of them" in shared
    assert misplaced_because([here._replace(may_share=1)] * 2) is None
    many = misplaced_because([here._replace(gpu=n) for n in range(73)])
    assert many is not None and "73 ranks" in many


def test_a_cpu_has_none_and_it_says_so() -> None:
    assert missing_because(None, torch.device("cpu")) == "tensors lie on cpu, and it is CUDA's"
