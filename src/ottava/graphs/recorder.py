"""`Recorder`: records what a function launches, to be launched again as a whole.

[Note: recorded work] A function that is recorded takes no arguments: it reads and writes tensors that stay where they are, and returns
tensors whose values every replay writes anew, in the same memory. It must have run before (`warm_up`), so that kernels are compiled and
libraries have their workspaces. Recording runs nothing: the first replay does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Work = Callable[[], Sequence[Tensor | None]]
Replay = Callable[[], Sequence[Tensor | None]]


class Recorder(Protocol):
    """See [Note: recorded work]."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs where recording will run, and returns what came out."""
        ...

    def record(self, run: Work) -> Replay:
        """What launches the work of `run` again and returns its tensors, the same ones each time."""
        ...

    def apart(self) -> Recorder:
        """Another one, for work that may be replayed at any time between that of this one."""
        ...


class CudaRecorder:
    """Records CUDA graphs on a stream of its own; all of them share a memory pool, so they have to be replayed in the order of recording.

    pool: what `torch.cuda.graph_pool_handle()` gave, to share it with graphs from elsewhere.

        >>> recorder = CudaRecorder()
        >>> recorder.warm_up(work)
        >>> replay = recorder.record(work)
        >>> (out,) = replay()
    """

    def __init__(self, pool: Any = None) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def warm_up(self, run: Callable[[], T]) -> T:
        """On the stream that will record: autograd remembers streams, and libraries have a workspace for each."""
        outside = torch.cuda.current_stream()
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            result = run()
        outside.wait_stream(self.stream)
        return result

    def record(self, run: Work) -> Replay:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # not while recording: to destroy another graph then is an error of CUDA
        collects = gc.isenabled()
        gc.disable()
        try:
            # thread_local: threads that read data or watch the run may allocate and ask for events meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = tuple(run())
        finally:
            if collects:
                gc.enable()

        def replay() -> Sequence[Tensor | None]:
            graph.replay()
            return outputs

        return replay

    def apart(self) -> CudaRecorder:
        """With memory of its own."""
        return CudaRecorder()


class Rerun:
    """Stands for a `CudaRecorder` where there is no GPU: a replay runs the function again, and writes over what it returned before.

    >>> replay = Rerun().record(lambda: (x * 2,))
    >>> replay()[0] is replay()[0]
    True
    """

    def warm_up(self, run: Callable[[], T]) -> T:
        """Runs it."""
        return run()

    def record(self, run: Work) -> Replay:
        """See `Recorder`."""
        kept: list[Tensor | None] = []

        def replay() -> Sequence[Tensor | None]:
            made = run()
            if not kept:
                kept.extend(made)
            with torch.no_grad():
                for old, new in zip(kept, made, strict=True):
                    if old is not None and new is not None and old is not new:
                        old.copy_(new)
            return kept

        return replay

    def apart(self) -> Rerun:
        """Itself: every run has memory of its own."""
        return self
