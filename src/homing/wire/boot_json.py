"""boot.json: the configuration that an instance gets at start.

The agent reads only its own part, agent_orders.py. This module adds the parts for the programs that it starts: the
store and the inputs for sync, the requirements of a bare machine for the bootstrap, the planned speeds for the lookout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.agent_orders import EndBilling, Orders
from homing.wire.codec import record

__all__ = ["Boot", "Bootstrap", "EndBilling", "Input"]


@dataclass(frozen=True)
class Input:
    """A file that the instance needs before training: its key in the store, its path and its hash."""

    key: str  # "" if `url` is set
    path: str  # relative to the instance's work folder
    num_bytes: int
    sha256: str
    url: str = ""  # open weights on the Hub, which the instance downloads itself, without a token


@dataclass(frozen=True)
class Bootstrap:
    """What the machine must have before training; a part with an empty value is skipped."""

    folders: List[str] = field(default_factory=list)  # to create, in addition to run/ and data/
    disk_bytes: int = 0
    code: str = ""  # a wheel in the work folder, unpacked into code_dir
    code_sha256: str = ""
    code_dir: str = ""
    lock: List[str] = field(default_factory=list)  # name==version --hash=..., without torch
    torch: str = ""  # torch==version, unless the image's torch is in torch_range (from, below)
    torch_lock: List[str] = field(default_factory=list)  # torch and all its dependencies, with hashes
    uv: str = ""  # uv==version --hash=..., to install if it is needed and missing
    torch_range: List[str] = field(default_factory=list)
    cuda: str = ""  # CUDA version of the index's torch in this range; with an older driver, a different wheel is used
    older_cuda: List[str] = field(default_factory=list)  # CUDA versions of those other wheels, best first
    torch_index: str = ""  # where to find them: <torch_index>/cu129
    python: str = ""  # interpreter from which the environment is created
    env_dir: str = ""  # a fingerprint is appended; <work folder>/env links to it
    gpu_names: List[str] = field(default_factory=list)  # names under which the driver may report the GPU: a-z0-9 only
    num_gpus: int = 0
    may_add: bool = False  # whether system packages may be installed: no one else uses the machine after the run
    inputs_dir: str = ""  # folder of inputs by hash: those that an earlier instance fetched there are not fetched again
    probe_argv: List[str] = field(default_factory=list)
    probe_floor: Dict[str, float] = field(default_factory=dict)  # measurement -> the lowest acceptable value


@dataclass(frozen=True)
class _Run:
    run_id: str
    run_name: str
    store: str
    inputs: List[Input]


@record("boot", 1)
@dataclass(frozen=True)
class Boot(Orders, _Run):  # base order matters: the fields of _Run have no defaults and must come first
    fence: int = 0  # number of the lease under which it was launched; 0: no lease
    notice_url: str = ""  # where the provider announces a preemption: any 200 response is a notice
    notice_token_url: str = ""  # a PUT there returns the token that notice_url requires, as in EC2's metadata service
    planned_speeds: Dict[str, float] = field(default_factory=dict)  # tokens/s by phase; a third of it counts as slow
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    bootstrap: Optional[Bootstrap] = None  # None: the machine has everything it needs
    leave_s: float = 0.0  # seconds after billing began at which the run must move to another instance; 0: never
    mailbox: str = ""  # receives the log by HTTP PUT if booting failed before the store could be reached
