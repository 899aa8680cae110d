"""run.json: the resolved run. `config` writes it at home; trainer and agent read nothing else.

Every value is final: derived, checked and in base units. `origin` says where each came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from homing.wire.codec import record


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's way to a longer context: slow turns are slowed by `factor`, fast ones stay, between them it fades."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Model:
    family: str  # stock | swift
    arch: str  # llama | qwen2 (bias on q, k, v) | qwen3 (norm on q, k)
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_width: int
    context: int
    vocab_size: int
    is_tied: bool
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    rope_scaling: Optional[RopeScaling] = None
    max_context: int = 0  # positions that loaded weights were made for, where `context` is fewer; 0: the same


@dataclass(frozen=True)
class Sizes:
    """What `config.derive` computed; the trainer checks its own count against it."""

    num_params: int  # every parameter once; a tied head is not counted again
    num_matmul_params: int  # blocks and head, without the embedding look-up
    flops_per_token: float  # 6 N_matmul + 12 L d T, forward and backward


@dataclass(frozen=True)
class HubFile:
    """A file that anybody may take from the Hub, as the Hub itself described it."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Base:
    """Open weights that the run begins with."""

    address: str  # hf:OWNER/NAME@COMMIT, or the folder as it was named
    dir: str  # holds config.json and the weights, less hub_files; relative to the run directory; "" while not brought
    dtype: str = ""  # of the weights, as config.json says: bfloat16, ...
    licence: str = ""
    hub_files: List[HubFile] = field(default_factory=list)  # weights a machine can take from the Hub without a token


@dataclass(frozen=True)
class Data:
    dir: str  # holds tokenizer.json, manifest.json and shards; a relative path starts at the run directory
    manifest_sha256: str  # "" while nothing is prepared
    tokenizer_sha256: str
    num_train_tokens: int
    num_val_tokens: int


@dataclass(frozen=True)
class Optimizer:
    kind: str  # muon (AdamW for what Muon does not take) | adamw
    lr: float  # block matrices
    lr_embedding: float
    lr_head: float
    lr_norm: float
    weight_decay: float
    lr_scalar: float = 0.0  # gates and scales of swift
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95  # Muon's
    momentum_start: float = 0.0  # Muon's at the first step, from where it grows; 0: as later
    variance_beta: float = 0.0  # Muon's memory of how much each row moves, to even it out; 0: off
    is_cautious: bool = False  # Muon's decay only where the step itself goes towards zero
    clip: float = 1.0  # largest norm of all gradients; 0 turns clipping off
    states: str = "fp32"  # fp32 | int8: what AdamW's two moments are kept in


@dataclass(frozen=True)
class Schedule:
    kind: str  # wsd | cosine | constant
    warmup_steps: int
    decay_steps: int  # wsd: length of the linear tail; cosine: steps after warm-up
    floor: float  # the rate at the end, as a fraction of the peak


@dataclass(frozen=True)
class RlTask:
    """What is asked in a phase of rl. A relative path starts at the data folder; "" in a hash: not checked."""

    kind: str  # gsm8k | arithmetic | spelling | prompts
    weight: float = 1.0  # its share of the prompts, against the other tasks'
    file: str = ""  # JSON lines, for gsm8k and prompts
    file_sha256: str = ""
    val_file: str = ""  # held-out lines; "": a tenth of the file
    val_file_sha256: str = ""
    difficulty: int = 1  # arithmetic and spelling: 1 to 5
    calculator: str = "auto"  # auto | on | off
    reward: str = ""  # a reward.py of one's own
    reward_sha256: str = ""


@dataclass(frozen=True)
class Rl:
    tasks: List[RlTask]
    prompts_per_step: int = 16
    samples_per_prompt: int = 16
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    advantage: str = "std"  # std | mean: the group's deviation divides, or does not
    kl: float = 0.0  # pull towards the weights at the phase's start
    updates_per_rollout: int = 1
    clip_low: float = 0.2  # in effect with more than one update per rollout
    clip_high: float = 0.2
    pass_reward: float = 1.0  # so much, or more, is passed
    eval_prompts: int = 64
    eval_samples: int = 4
    rollout_rows: int = 0  # samples at a time; 0: all
    graphs: str = "auto"  # auto | on | off: CUDA graphs
    collapse_steps: int = 20
    reward_timeout_s: float = 10.0
    reward_memory_bytes: int = 2 * 1024**3


@dataclass(frozen=True)
class Lora:
    """The small matrices beside frozen ones, of method lora and qlora; the trainer's side is lm.model.lora."""

    rank: int = 16
    alpha: float = 32.0  # the adapter counts alpha / rank, or with rsLoRA alpha / sqrt(rank)
    dropout: float = 0.0
    targets: List[str] = field(default_factory=lambda: ["q", "k", "v", "o", "gate", "up", "down"])
    is_rslora: bool = False
    is_dora: bool = False


@dataclass(frozen=True)
class PhaseData:
    """What a phase learns from, where it is not the text of the run."""

    kind: str  # text | chat
    dir: str  # holds manifest.json and shards; a relative path starts at the run directory
    manifest_sha256: str = ""  # "" while nothing is prepared
    num_train_tokens: int = 0
    num_val_tokens: int = 0
    question: str = ""  # of chat: the first that a user asks in it


@dataclass(frozen=True)
class Phase:
    kind: str  # pretrain | mid | sft | rl; also the folder under checkpoints/
    method: str  # full | lora | qlora
    num_steps: int
    batch_tokens: int  # tokens in one optimizer step
    micro_batch: int  # rows of `context` tokens at a time; 0: the trainer picks what fits
    optimizer: Optimizer
    schedule: Schedule
    eval_every: int  # steps; 0: only at the end
    eval_tokens: int
    save_every: int  # steps; 0: only at the end
    save_every_s: float  # also after so many seconds; 0: never by time
    sample_every: int  # steps; 0: with each checkpoint
    keep_last: int  # checkpoints kept beside the best
    init_from: str = ""  # a checkpoint folder to start from; "" for fresh weights
    init_base: str = ""  # where init_from holds an adapter: the folder of the weights that it was trained on
    data: Optional[PhaseData] = None  # None: the text of the run
    lora: Optional[Lora] = None  # of method lora and qlora
    rl: Optional[Rl] = None  # of a phase of that kind
    recompute: str = "none"  # none | half | all: blocks whose activations are computed again instead of kept
    offload: str = "none"  # none | optimizer: what lives in the host's memory instead of the card's
    sample_prompts: List[str] = field(default_factory=list)  # none: those of the run


@dataclass(frozen=True)
class Sampling:
    prompts: List[str] = field(default_factory=list)
    num_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50


@dataclass(frozen=True)
class Train:
    device: str = "auto"  # auto | cpu | cuda | mps
    precision: str = "auto"  # auto | fp32 | bf16
    compile: str = "auto"  # auto | on | off
    needs_gpu: bool = False  # set by launch on a rented GPU: without one the trainer fails, never runs on the CPU
    attention: str = "auto"  # auto | cudnn | flash | efficient | math
    graphs: str = "auto"  # auto | on | off: micro-batches as CUDA graphs; the run file's default is this one
    is_deterministic: bool = False
    num_threads: int = 0  # 0: what the machine has
    num_ranks: int = 0  # processes that train together, one per card; 0: as many as there are cards
    log_every: int = 10  # steps
    max_bad_steps: int = 10  # non-finite steps in a row before the run stops
    time_limit_s: float = 0.0  # wall clock of the trainer; 0: none
    writes_csv: bool = False


@dataclass(frozen=True)
class Limits:
    spend_usd: Optional[str] = None  # a decimal string: dollars are never floats
    time_s: float = 0.0  # 0: none
    idle_s: float = 1800.0
    unsaved_s: float = 1800.0  # so long it may train while the store refuses every push; 0: to the other limits
    stall_factor: float = 10.0  # no step for this many usual step times is a stall
    rate_usd_per_hour: Optional[str] = None
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    relaunches: int = 10  # by the guard, after a machine was taken away or lost


@dataclass(frozen=True)
class Ssh:
    """A host one can log in to, as the run file names it."""

    host: str
    user: str = ""  # "": the one who is logged in at home
    port: int = 22
    key_file: str = ""  # a private key's file; "": what ssh finds by itself
    host_key: str = ""  # TYPE BASE64; "": from known_hosts, or asked about once
    known_hosts: str = "~/.ssh/known_hosts"
    work_dir: str = ".homing"  # there; a relative path starts at the user's home
    rate_usd_per_hour: str = "0.36"
    python: str = ""  # an interpreter there that has torch; "": an environment is made from the lock


@dataclass(frozen=True)
class Cloud:
    providers: List[str] = field(default_factory=lambda: ["local"])
    gpu: str = ""
    num_gpus: int = 1
    on_preempt: str = "relaunch"  # relaunch | stop
    ssh: Optional[Ssh] = None
    settings: Dict[str, Dict[str, Any]] = field(default_factory=dict)  # provider -> its own section of the run file
    volume: str = ""  # a persistent folder there, in the layout datasets/ artifacts/ runs/ cache/ hf_cache/


@dataclass(frozen=True)
class RunInput:
    """A file that travels with the run beside its own text."""

    path: str  # in the data folder of the instance
    source: str  # where it lies at home; hf:OWNER/NAME@COMMIT/FILE: the instance takes it from the Hub itself
    sha256: str
    num_bytes: int = 0  # of one from the Hub, which home need not have


@record("run", 1)
@dataclass(frozen=True)
class Run:
    name: str
    seed: int
    model: Model
    sizes: Sizes
    data: Data
    phases: List[Phase]
    train: Train
    sampling: Sampling
    limits: Limits
    cloud: Cloud
    store: str  # such as file:/home/me/.homing/store
    base: Optional[Base] = None  # None: weights of one's own, from scratch
    inputs: List[RunInput] = field(default_factory=list)  # listed at launch
    id: str = ""  # NAME-yyyymmdd-hhmmss-xxxx, given at launch
    code_version: str = ""
    run_file_sha256: str = ""
    origin: Dict[str, str] = field(default_factory=dict)  # "model.width" -> "derived from model.depth"
