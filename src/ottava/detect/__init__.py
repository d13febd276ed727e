"""Detectors of the ways in which a distributed run is slow or wrong and says nothing. See docs/failure-modes.md.

The trainer, `ottava doctor` and a user of the library share them:

    >>> import ottava
    >>> for finding in ottava.diagnose(model):
    ...     print(finding.level, finding.message)
"""

from ottava.detect.exposed import ExposedCommunication, Setup
from ottava.detect.fabric import Fabric
from ottava.detect.finding import MODES, Finding, enforce
from ottava.detect.machine import Launch, Machine
from ottava.detect.model import diagnose

__all__ = ["MODES", "ExposedCommunication", "Fabric", "Finding", "Launch", "Machine", "Setup", "diagnose", "enforce"]
