"""CUDA graphs: work that is recorded once and launched again as a whole, without the host's Python (docs/design/0007-graphs.md)."""

from ottava.graphs.callables import make_graphed_callables
from ottava.graphs.recorder import CudaRecorder, Recorder, Rerun

__all__ = ["CudaRecorder", "Recorder", "Rerun", "make_graphed_callables"]
