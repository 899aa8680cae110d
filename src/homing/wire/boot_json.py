"""boot.json: the configuration that an instance receives at startup.

The agent reads only its own part, which boot_json_agent.py defines. This module adds the parts for the programs that
the agent starts: the store and the inputs for sync, the requirements of a bare machine for the bootstrap, and the
planned speeds for the monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from homing.wire.boot_json_agent import EndBilling, Orders
from homing.wire.codec import record

__all__ = ["Boot", "Bootstrap", "EndBilling", "Input"]


@dataclass(frozen=True)
class Input:
    """A file that the instance needs before training: its key in the store, its path and its hash."""

    key: str  # the file's key in the store; "" if `url` is set
    path: str  # path relative to the instance's work folder
    num_bytes: int
    sha256: str
    url: str = ""  # URL of open weights on the Hub, which the instance downloads directly, without a token


@dataclass(frozen=True)
class Bootstrap:
    """What the machine must have before training. The bootstrap skips a requirement whose value is empty."""

    folders: List[str] = field(default_factory=list)  # folders to create in addition to run/ and data/
    disk_bytes: int = 0
    code: str = ""  # name of a wheel in the work folder, which is unpacked into code_dir
    code_sha256: str = ""
    code_dir: str = ""
    lock: List[str] = field(default_factory=list)  # requirements (name==version --hash=...) except torch
    torch: str = ""  # torch==version, installed unless the image's version is in torch_range (minimum, upper bound)
    torch_lock: List[str] = field(default_factory=list)  # requirements with hashes for torch and all its dependencies
    uv: str = ""  # requirement uv==version --hash=..., installed if uv is needed but missing
    torch_range: List[str] = field(default_factory=list)
    cuda: str = ""  # CUDA version of torch on PyPI; a machine with an older driver gets another torch wheel
    older_cuda: List[str] = field(default_factory=list)  # CUDA versions of the wheels for older drivers, best first
    torch_index: str = ""  # URL of PyTorch's wheels for older drivers, to which /cu129 or similar is appended
    python: str = ""  # the interpreter that creates the environment
    env_dir: str = ""  # path of the environment, to which a fingerprint is appended; <work folder>/env links to it
    # names under which the driver may report the GPU, reduced to a-z and 0-9
    gpu_names: List[str] = field(default_factory=list)
    num_gpus: int = 0
    may_add: bool = False  # whether system packages may be installed; true if the machine is not shared with others
    inputs_dir: str = ""  # folder on a volume that caches inputs by hash, so that later instances need not fetch them
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
class Boot(Orders, _Run):  # _Run must be the last base: its fields have no defaults, so they must come first
    fence: int = 0  # number of the lease under which the instance was launched; 0 if there is no lease
    notice_url: str = ""  # URL at which the provider announces a preemption; any 200 response is a notice
    notice_token_url: str = ""  # URL that responds to a PUT with the token for notice_url, as in EC2's metadata service
    # phase -> planned tokens per second; below a third of this, the instance is considered slow
    planned_speeds: Dict[str, float] = field(default_factory=dict)
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    bootstrap: Optional[Bootstrap] = None  # None if the machine has everything it needs
    leave_s: float = 0.0  # seconds after billing began at which the run must move to another instance; 0 for never
    mailbox: str = ""  # URL that receives the error by HTTP PUT if the bootstrap fails; works without a store client
