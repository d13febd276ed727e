"""The hook around waits for communication, under the name that code above `distributed` knows it by (`ottava.overlap.waits`)."""

from ottava.overlap.waits import SHARDS, TENSOR, comm_wait_hook, waiting

__all__ = ["SHARDS", "TENSOR", "comm_wait_hook", "waiting"]
