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


def counts(text: str) -> list[int]:
    """Several of them, with commas.

    >>> counts("8192,32768")
    [8192, 32768]
    """
    return [count(word) for word in text.split(",")]
