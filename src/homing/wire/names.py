"""Names of files that one program writes and another reads; nobody spells them twice.

run directory
├── run.yaml  run.json  control.json  request.json  heartbeat.json  manifest.json
├── events.jsonl  metrics.jsonl
├── checkpoints/<phase>/step-00001200/   and latest.json, best.json beside the steps
├── samples/<phase>-00001200.txt
└── logs/trainer.log  agent.log  sync.log
"""

from __future__ import annotations

import re
from typing import Optional

RUN_FILE = "run.yaml"
RUN = "run.json"
CONTROL = "control.json"
REQUEST = "request.json"
HEARTBEAT = "heartbeat.json"
MANIFEST = "manifest.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
METRICS_CSV = "metrics.csv"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
LOGS = "logs"
LATEST = "latest.json"
BEST = "best.json"
OUTCOME = "outcome.json"
TRAINER_LOCK = ".trainer.lock"  # held while a trainer runs there; stays as the sign that one did
PUSHED = "pushed.json"
BOOT = "boot.json"
BOOTSTRAP = "bootstrap.py"  # beside it, where the machine needs one
LIMITS = "limits.json"  # a Request: the limits that the agent last took; the dead-man follows them

# In the instance's work folder, beside boot.json.
RUN_DIR = "run"
AGENT_LOCK, DEAD_MAN_LOCK = "agent.lock", "dead-man.lock"  # held while they live
RESTARTS = "restarts"  # of the agent by the dead-man: how many, and when the last was
BILLING_ENDED = "billing-ended"  # when what ends billing was accepted

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

# Keys in the store. Inputs lie by their hash, so that the same shards travel once.
STORE_OBJECTS = "objects"
STORE_RUNS = "runs"
STORE_MODELS = "models"
RECORD = "record.json"
LEASES = "lease"  # folder below the run: 00000001.json, ...

# Trainer exit codes.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75

# store.sync's: a newer lease names another instance, so this one pushes nothing more.
EXIT_SUPERSEDED = 76

# Environment of every process that an instance of ours starts; local and ssh find their own by it.
MARK_ENV = "HOMING_MARK"


def step_dir(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> Optional[int]:
    match = re.match(r"^step-(\d{8,})$", name)
    return int(match.group(1)) if match else None


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def index_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.idx"
