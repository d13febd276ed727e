"""Faults on purpose: what a run has to survive, or to find."""
