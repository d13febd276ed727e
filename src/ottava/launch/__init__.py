"""Starts a run on the scheduler that people have: `ottava launch CONFIG --on local|ssh|slurm|ray|kubernetes`. One launcher a file.

A launcher turns a `Job` into files (`files`) and hands those over (`submit`). The engine is torchrun everywhere but on Ray, whose Train
library has its own; `agent.py` is torchrun that ends with the exit code of its ranks, and `policy.py` says what follows from that code.
"""
