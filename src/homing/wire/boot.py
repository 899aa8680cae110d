"""boot.json: all that an instance is told at start. The agent reads its own part, orders.py; here is what the programs
that it starts read beside it: sync the store and the inputs, the bootstrap what a bare machine needs, the lookout what
was planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.codec import record
from homing.wire.orders import EndBilling, Orders

__all__ = ["Boot", "Bootstrap", "EndBilling", "Input"]


@dataclass(frozen=True)
class Input:
    """A file that must lie on the instance before training: its key in the store, its place, its hash."""

    key: str  # "" where `url` says where it is
    path: str  # relative to the instance's work folder
    num_bytes: int
    sha256: str
    url: str = ""  # of open weights on the Hub, taken from there by the instance itself and without any token


@dataclass(frozen=True)
class Bootstrap:
    """What the machine must have before training: each part is left out where its value is empty."""

    folders: List[str] = field(default_factory=list)  # to be made, beside run/ and data/
    disk_bytes: int = 0
    code: str = ""  # a wheel in the work folder, unpacked into code_dir
    code_sha256: str = ""
    code_dir: str = ""
    lock: List[str] = field(default_factory=list)  # name==version --hash=..., without torch
    torch: str = ""  # torch==version, unless the image's own is in torch_range (from, below)
    torch_lock: List[str] = field(default_factory=list)  # the same with hashes, and all that it needs
    uv: str = ""  # uv==version --hash=..., to bring where it is needed and the machine has none
    torch_range: List[str] = field(default_factory=list)
    cuda: str = ""  # that the index's torch of this range is built for; a card with an older driver gets another wheel
    older_cuda: List[str] = field(default_factory=list)  # that such wheels are built for, the best first
    torch_index: str = ""  # where they are: <torch_index>/cu129
    python: str = ""  # from which the environment is made
    env_dir: str = ""  # its fingerprint is appended; <work folder>/env leads there
    gpu_names: List[str] = field(default_factory=list)  # as a driver may call the card: a-z0-9 only
    num_gpus: int = 0
    may_add: bool = False  # packages of the system: the machine is nobody's after the run
    inputs_dir: str = ""  # what an earlier instance here fetched, by hash: it is not fetched again
    probe_argv: List[str] = field(default_factory=list)
    probe_floor: Dict[str, float] = field(default_factory=dict)  # figure -> the least that is not far too slow


@dataclass(frozen=True)
class _Run:
    run_id: str
    run_name: str
    store: str
    inputs: List[Input]


@record("boot", 1)
@dataclass(frozen=True)
class Boot(Orders, _Run):  # in this order: the fields of _Run, which have no defaults, come first
    fence: int = 0  # the lease under which it was launched; 0: none was taken
    notice_url: str = ""  # where the machine tells of its preemption: any 200 is a notice
    notice_token_url: str = ""  # PUT there gives the token that notice_url asks for, as EC2's metadata service does
    planned_speeds: Dict[str, float] = field(default_factory=dict)  # tokens/s by phase; a third of it is slow
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    bootstrap: Optional[Bootstrap] = None  # None: the machine has all it needs
    leave_s: float = 0.0  # so long after billing began the run must leave this machine, to go on on another; 0: never
    mailbox: str = ""  # takes the log by HTTP PUT when booting failed before anything could reach the store
