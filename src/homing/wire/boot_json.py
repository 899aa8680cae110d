"""boot.json: the configuration that an instance gets at start.

The agent reads only its own part, which agent_orders.py defines. This module adds the parts for the programs that the
agent starts: the store and the inputs for sync, the requirements of a bare machine for the bootstrap, and the planned
speeds for the lookout.
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
    path: str  # path relative to the instance's work folder
    num_bytes: int
    sha256: str
    url: str = ""  # address of open weights on the Hub, which the instance downloads itself without a token


@dataclass(frozen=True)
class Bootstrap:
    """What the machine must have before training; a part with an empty value is skipped."""

    folders: List[str] = field(default_factory=list)  # folders to create in addition to run/ and data/
    disk_bytes: int = 0
    code: str = ""  # name of a wheel in the work folder, which is unpacked into code_dir
    code_sha256: str = ""
    code_dir: str = ""
    lock: List[str] = field(default_factory=list)  # name==version --hash=..., without torch
    torch: str = ""  # torch==version, installed unless the version in the image is in torch_range (from, below)
    torch_lock: List[str] = field(default_factory=list)  # requirements with hashes for torch and all its dependencies
    uv: str = ""  # uv==version --hash=..., installed if it is needed and missing
    torch_range: List[str] = field(default_factory=list)
    cuda: str = ""  # CUDA version of the torch in the index; a driver older than that gets a different wheel
    older_cuda: List[str] = field(default_factory=list)  # CUDA versions of those different wheels, best first
    torch_index: str = ""  # where to find those wheels: <torch_index>/cu129
    python: str = ""  # the interpreter from which the environment is created
    env_dir: str = ""  # a fingerprint is appended to this path, and <work folder>/env links to the result
    # names under which the driver may report the GPU, in a-z0-9 only
    gpu_names: List[str] = field(default_factory=list)
    num_gpus: int = 0
    may_add: bool = False  # system packages may be installed, because no one else uses the machine after the run
    inputs_dir: str = ""  # folder that keeps inputs by hash, so that a later instance need not fetch them again
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
class Boot(Orders, _Run):  # the order of the bases matters: the fields of _Run have no defaults and must come first
    fence: int = 0  # number of the lease under which the instance was launched; 0 for no lease
    notice_url: str = ""  # where the provider announces a preemption; any 200 response is a notice
    notice_token_url: str = ""  # a PUT there returns the token that notice_url requires, as in EC2's metadata service
    # phase -> tokens per second; less than a third of it counts as slow
    planned_speeds: Dict[str, float] = field(default_factory=dict)
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    bootstrap: Optional[Bootstrap] = None  # None if the machine has everything it needs
    leave_s: float = 0.0  # seconds after billing began at which the run must move to another instance; 0 for never
    mailbox: str = ""  # URL that receives the log by HTTP PUT if booting fails before the store can be reached
