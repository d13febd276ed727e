"""Scripts written for `transformer_engine`, with Ottava in its place.

From a shell, without touching the script: `python -m ottava.compat train.py --epochs 3`. From Python:

    >>> import ottava.compat
    >>> with ottava.compat.installed():
    ...     import transformer_engine.pytorch as te
    >>> te.Linear is ottava.Linear
    True
"""

from ottava.compat.stand_in import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
