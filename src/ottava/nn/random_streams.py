"""`CudaRNGStatesTracker`: named random streams beside torch's own.

Dropout inside a tensor-parallel region must differ between ranks, dropout outside of it must not. A rank draws the former from a
stream of its own, kept here by name, and the latter from torch's default stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MODEL_PARALLEL = "model-parallel-rng"


def _get() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


class CudaRNGStatesTracker:
    """Random streams by name, on the GPU if there is one, else on the CPU.

    >>> tracker = ottava.CudaRNGStatesTracker()
    >>> tracker.add("model-parallel-rng", 1234)
    >>> with tracker.fork():
    ...     mask = torch.rand(8)  # from the named stream; the default stream does not move
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self.forked = False
        """Whether numbers come from a named stream now."""

    def reset(self) -> None:
        """Forgets all streams."""
        self.states_.clear()
        self.seeds_.clear()

    def add(self, name: str, seed: int) -> None:
        """Starts the stream `name` at `seed`; both must be new."""
        if seed in self.seeds_:
            raise ValueError(f"The seed {seed} is taken by another stream: two streams would draw the same numbers.")
        if name in self.states_:
            raise ValueError(f"There is a stream {name!r} already; known: {', '.join(self.states_)}.")
        before = _get()
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all kinds of devices, a millisecond long
        self.states_[name] = _get()
        self.seeds_.add(seed)
        _set(before)

    def get_states(self) -> dict[str, Tensor]:
        """A copy of all streams' states, for a checkpoint."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Restores what `get_states` returned."""
        self.states_ = {name: state.clone() for name, state in states.items()}

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draws from the stream `name` inside the `with` block."""
        if name not in self.states_:
            known = ", ".join(self.states_) or "none"
            raise ValueError(f"There is no stream {name!r} (known: {known}): call add({name!r}, seed) first.")
        before, outside = _get(), self.forked
        _set(self.states_[name])
        self.forked = True
        try:
            yield
        finally:
            self.states_[name] = _get()
            _set(before)
            self.forked = outside


def model_parallel_seed(seed: int, tp_rank: int, dp_rank: int = 0) -> CudaRNGStatesTracker:
    """Seeds torch's default stream, and returns a tracker with a "model-parallel-rng" stream.

    The default stream is equal on all ranks of a tensor-parallel group, for dropout outside of tensor-parallel regions; the other
    one differs between them, for dropout inside. Both differ between data-parallel ranks, if their `dp_rank` is given.

        >>> tracker = model_parallel_seed(1234, tp_rank=meshes.tp.get_local_rank(), dp_rank=meshes.dp_rank)
        >>> layer = ottava.TransformerLayer(64, 128, 4, get_rng_state_tracker=lambda: tracker)
    """
    seed_default(seed, dp_rank)
    tracker = CudaRNGStatesTracker()
    seed_tracker(tracker, seed, tp_rank, dp_rank)
    return tracker


def seed_tracker(tracker: CudaRNGStatesTracker, seed: int, tp_rank: int, dp_rank: int = 0) -> None:
    """Makes the "model-parallel-rng" stream, started as by `model_parallel_seed`, the only one of `tracker`.

    >>> seed_tracker(tracker, seed=1234, tp_rank=1)
    """
    tracker.reset()
    tracker.add(MODEL_PARALLEL, _derived(seed, MODEL_PARALLEL, dp_rank, tp_rank))


def use_tracker(model: nn.Module, tracker: CudaRNGStatesTracker) -> None:
    """Dropout in `model` draws from `tracker` where tensor-parallel ranks hold different heads or tokens.

    Modules that were constructed with a `get_rng_state_tracker` keep it.

        >>> use_tracker(model, model_parallel_seed(1234, tp_rank, dp_rank))
    """
    for module in model.modules():
        if hasattr(module, "get_rng_state_tracker") and module.get_rng_state_tracker is None:
            module.get_rng_state_tracker = lambda: tracker  # type: ignore[assignment]


def seed_default(seed: int, dp_rank: int = 0) -> None:
    """Seeds torch's default stream alone, as `model_parallel_seed` does: on the CPU and on this rank's GPU."""
    derived = _derived(seed, "default", dp_rank)
    torch.default_generator.manual_seed(derived)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(derived)


def _derived(*key: object) -> int:
    """32 bits, which is what torch's CPU generator looks at. Sums such as seed + rank would meet those of other ranks and streams."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
