"""`ottava train [CONFIG.toml | PRESET] [--section.key VALUE ...] [--dry-run]`. The options are those of the configuration."""

from __future__ import annotations

import sys

from ottava.cli.streams import refuse


def run(arguments: list[str]) -> int:
    """Parses, and trains or shows what would run."""
    try:
        from ottava.train.arguments import parse
        from ottava.train.launch import launch
    except ImportError as error:
        print(f"ottava train needs more packages: pip install 'ottava[train]' ({error}).", file=sys.stderr)
        return 2
    config, dry_run = parse(arguments)
    if dry_run:
        from ottava.plan.dry_run import describe

        try:
            print(describe(config))
        except (ValueError, OSError) as error:
            return refuse("ottava train", error)
        return 0
    return launch(config)
