"""Names of files that one program writes and another reads, each defined once.

run directory
├── run.yaml  run.json  control.json  request.json  heartbeat.json  manifest.json
├── events.jsonl  metrics.jsonl
├── checkpoints/<phase>/step-00001200/   and latest.json, best.json next to the steps
├── samples/<phase>-00001200.txt
└── logs/trainer.log  agent.log  sync.log  rank-0.log"""

from __future__ import annotations

import re
from typing import Optional

from homing.wire.instance_file_names import *  # noqa: F403  names that ship with the agent

RUN_FILE = "run.yaml"
RUN = "run.json"
MANIFEST = "manifest.json"
METRICS_CSV = "metrics.csv"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
LATEST = "latest.json"
BEST = "best.json"
TRAINER_LOCK = ".trainer.lock"  # locked while a trainer runs in the folder; kept afterwards to show that one ran there
STARTER_FD_ENV = "HOMING_STARTER_FD"  # file descriptor of a pipe that closes when the trainer's parent process ends
# the run's name as the user typed it and any options that change the run file, for use in the trainer's messages
TYPED_ENV = "HOMING_TYPED"
PUSHED = "pushed.json"
BOOT = "boot.json"

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"  # where newer tools keep the chat template; older tools use tokenizer_config.json
TURNS = "turns.json"  # the text that the chat template puts around messages, for a trainer without a template engine
GENERATION = "generation_config.json"  # the recommended sampling settings and stop tokens of open weights
WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # peft's file name for the adapter that a lora or qlora phase trained
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

# Keys in the store. Inputs are stored by hash, so that the same shards are uploaded only once.
STORE_OBJECTS = "objects"
STORE_RUNS = "runs"
STORE_MODELS = "models"
RECORD = "record.json"
LEASES = "lease"  # subfolder of the run's folder for its leases: 00000001.json and so on


def step_dir(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> Optional[int]:
    match = re.match(r"^step-(\d{8,})$", name)
    return int(match.group(1)) if match else None


def rank_log(rank: int) -> str:
    return f"rank-{rank}.log"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def index_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.idx"


def mask_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.mask"
