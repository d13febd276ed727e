"""`ottava train CONFIG --dry-run`: what would run, without running it."""

from __future__ import annotations

from ottava.train.config import Config


def describe(config: Config) -> str:
    """Text."""
    from ottava.train.arguments import to_toml

    return to_toml(config)
