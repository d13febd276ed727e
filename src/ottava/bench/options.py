"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A command-line number that must be at least 1.

    >>> count("3")
    3
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
