"""Communication under the GEMM: the engine behind the tensor-parallel strategies (`docs/overlap.md`).

schedule.py      which method serves which collective: what a user asks for
cost.py          what a schedule would take: where chunks would lose, nothing is cut
engine.py        `Engine`: what strategies call
ring.py, pipeline.py, bulk.py          the methods
chunks.py, sums.py                     operands cut by tokens; partial results added in the order of ranks
bits.py          which chunks have the bits of the whole product
collectives.py, opaque.py              collectives that are waited for; all of this as ops for a compiler
transport.py, transports.py            what moves bytes, and which one serves a group
point_to_point.py, symmetric_memory.py, virtual_link.py
meter.py, waits.py                     bytes sent, time in flight, time that computing waited
"""

from ottava.overlap.cost import Choice, Machine, Product, choose, crossing, machine_of
from ottava.overlap.engine import Engine
from ottava.overlap.meter import Meter, measuring
from ottava.overlap.point_to_point import PointToPoint, RankLost
from ottava.overlap.schedule import METHODS, TRANSPORTS, Schedule
from ottava.overlap.symmetric_memory import SymmetricMemory
from ottava.overlap.transport import Exchange, Hop, Transport, wrapping
from ottava.overlap.transports import transport_of
from ottava.overlap.virtual_link import VirtualLink

__all__ = [
    "METHODS",
    "TRANSPORTS",
    "Choice",
    "Engine",
    "Exchange",
    "Hop",
    "Machine",
    "Meter",
    "PointToPoint",
    "Product",
    "RankLost",
    "Schedule",
    "SymmetricMemory",
    "Transport",
    "VirtualLink",
    "choose",
    "crossing",
    "machine_of",
    "measuring",
    "transport_of",
    "wrapping",
]
