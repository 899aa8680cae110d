"""The one door of cloud, store and agent to clock, disk, processes and network.

    machine     Machine: what every machine gives; it travels to the instance with the agent
    home        World(Machine): what home and store need beside it
    a simulator subclasses World; there each method is a point where it may yield, fail or kill the caller

Code that takes a `world` touches nothing else: no `time`, `open`, `os`, `subprocess`, `sqlite3` or `urllib` of its own.
That is what lets one seed replay one bad day exactly.
"""

from homing.world.home import Database, DatabaseDamaged, MemoryDatabase, World, reads_only
from homing.world.machine import Completed, HttpRequest, HttpResponse, Machine, NetworkError, PathLike, Process

__all__ = [
    "Completed",
    "Database",
    "DatabaseDamaged",
    "HttpRequest",
    "HttpResponse",
    "Machine",
    "MemoryDatabase",
    "NetworkError",
    "PathLike",
    "Process",
    "World",
    "reads_only",
]
