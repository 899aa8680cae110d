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

from homing.wire.instance import *  # noqa: F403  the agent's part of this list, which travels with it

RUN_FILE = "run.yaml"
RUN = "run.json"
MANIFEST = "manifest.json"
METRICS_CSV = "metrics.csv"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
LATEST = "latest.json"
BEST = "best.json"
TRAINER_LOCK = ".trainer.lock"  # held while a trainer runs there; stays as the sign that one did
STARTER_FD_ENV = "HOMING_STARTER_FD"  # to a trainer: a pipe that closes when the process that started it is gone
TYPED_ENV = "HOMING_TYPED"  # to a trainer: what its person calls the run, with the changes to its file
PUSHED = "pushed.json"
BOOT = "boot.json"

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"  # newer writers keep it here, older ones in the file above
TURNS = "turns.json"  # what a template writes around what is said, for a trainer that knows no templates
GENERATION = "generation_config.json"  # how whoever made the weights samples from them, and where it stops
WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # as peft calls it: what a phase of method lora or qlora has trained
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

# Keys in the store. Inputs lie by their hash, so that the same shards travel once.
STORE_OBJECTS = "objects"
STORE_RUNS = "runs"
STORE_MODELS = "models"
RECORD = "record.json"
LEASES = "lease"  # folder below the run: 00000001.json, ...


def step_dir(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> Optional[int]:
    match = re.match(r"^step-(\d{8,})$", name)
    return int(match.group(1)) if match else None


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def index_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.idx"


def mask_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.mask"
