"""Gives the cloud, store and agent code its only access to the clock, the disk, processes and the network.

    machine     Machine: what every machine has; ships to the instance with the agent
    world       World(Machine): adds what the user's computer and the store code need
    retries     Retries: how many times a call is tried, and how long to wait in between

The simulator subclasses World. Each of its methods may switch to another process, fail, or kill the caller. Code that
takes a `world` does not use `time`, `open`, `os`, `subprocess`, `sqlite3` or `urllib` directly, so that a failure
scenario can be replayed exactly from its seed.
"""

from homing.world.machine import Completed, HttpRequest, HttpResponse, Machine, NetworkError, PathLike, Process
from homing.world.retries import Retries
from homing.world.world import Database, DatabaseDamaged, MemoryDatabase, World, reads_only

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
    "Retries",
    "World",
    "reads_only",
]
