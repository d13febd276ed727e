"""`ottava doctor`: are these machines sound? Asked before a run, on one machine or on all ranks together."""

from ottava.doctor.examine import Options, examine
from ottava.doctor.finding import Finding, Report

__all__ = ["Finding", "Options", "Report", "examine"]
