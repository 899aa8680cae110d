"""Defines run.json, the resolved run. `config` writes it; the trainer reads no other configuration.

Every value is final: derived, checked and in base units. `origin` records where each value came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from homing.wire.codec import record


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling as in Llama 3.1.

    Low frequencies are divided by `factor`, high frequencies are kept, and those in between are interpolated.
    """

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
    # the context length that the open weights support, if it is larger than `context`; otherwise 0
    max_context: int = 0


@dataclass(frozen=True)
class Sizes:
    """Parameter and FLOP counts from `config.estimate.params_and_flops`, which the trainer compares with its own."""

    num_params: int  # number of parameters; counts a tied head only once
    num_matmul_params: int  # number of parameters in the blocks and the head, excluding the embedding lookup
    flops_per_token: float  # 6 N_matmul + 12 L d T, for the forward and the backward pass


@dataclass(frozen=True)
class HubFile:
    """A public file on the Hub, with the size and the hash that the Hub reports."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Base:
    """The open weights from which the run starts."""

    address: str  # hf:OWNER/NAME@COMMIT, or the folder as the user typed it
    # folder with config.json and all weights except hub_files, relative to the run directory; "" until fetched
    dir: str
    dtype: str = ""  # dtype of the weights according to config.json: bfloat16, ...
    licence: str = ""
    # Weights that an instance can download from the Hub without a token.
    hub_files: List[HubFile] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    dir: str  # folder with tokenizer.json, manifest.json and shards; relative to the run directory unless absolute
    manifest_sha256: str  # "" until prepared
    tokenizer_sha256: str
    num_train_tokens: int
    num_val_tokens: int


@dataclass(frozen=True)
class Optimizer:
    kind: str  # muon (with AdamW for the other parameters) | adamw
    lr: float  # learning rate of the block matrices
    lr_embedding: float
    lr_head: float
    lr_norm: float
    weight_decay: float
    lr_scalar: float = 0.0  # learning rate of the gates and scales in models of the swift family
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95  # Muon's momentum
    momentum_start: float = 0.0  # Muon's momentum at the first step, if it increases during training; else 0
    # decay of Muon's per-row second-moment estimate, which normalizes the rows; 0 turns it off
    variance_beta: float = 0.0
    is_cautious: bool = False  # whether Muon decays only those weights that the update itself moves towards zero
    clip: float = 1.0  # maximum global gradient norm; 0 turns clipping off
    states: str = "fp32"  # fp32 | int8: format of AdamW's two moments


@dataclass(frozen=True)
class Schedule:
    kind: str  # wsd | cosine | constant
    warmup_steps: int
    decay_steps: int  # wsd: length of the linear decay; cosine: number of steps after warm-up
    floor: float  # final learning rate as a fraction of the peak


@dataclass(frozen=True)
class RlTask:
    """A task of an rl phase. Relative paths are relative to the data folder. An empty hash is not checked."""

    kind: str  # gsm8k | arithmetic | spelling | prompts
    weight: float = 1.0  # the task's share of the prompts, relative to the other tasks
    file: str = ""  # path of a JSON lines file, for gsm8k and prompts
    file_sha256: str = ""
    val_file: str = ""  # path of a file of held-out lines; if empty, a tenth of `file` is held out
    val_file_sha256: str = ""
    difficulty: int = 1  # from 1 to 5, for arithmetic and spelling
    calculator: str = "auto"  # auto | on | off
    reward: str = ""  # path of the user's own reward.py
    reward_sha256: str = ""


@dataclass(frozen=True)
class Rl:
    tasks: List[RlTask]
    prompts_per_step: int = 16
    samples_per_prompt: int = 16
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0  # number of most likely tokens to sample from; 0 for all
    advantage: str = "std"  # std | mean: both subtract the group's mean; std also divides by its standard deviation
    kl: float = 0.0  # weight of the KL penalty, which keeps the model close to the initial weights of the phase
    updates_per_rollout: int = 1
    clip_low: float = 0.2  # has an effect only with more than one update per rollout
    clip_high: float = 0.2
    pass_reward: float = 1.0  # a sample passes if its reward is at least this
    eval_prompts: int = 64
    eval_samples: int = 4
    rollout_rows: int = 0  # number of samples generated at the same time; 0 for all
    graphs: str = "auto"  # auto | on | off: CUDA graphs
    collapse_steps: int = 20
    reward_timeout_s: float = 10.0
    reward_memory_bytes: int = 2 * 1024**3


@dataclass(frozen=True)
class Lora:
    """Adapter settings of a lora or qlora phase. lm.model.lora implements them."""

    rank: int = 16
    alpha: float = 32.0  # the adapter is scaled by alpha / rank (with rsLoRA, by alpha / sqrt(rank))
    dropout: float = 0.0
    targets: List[str] = field(default_factory=lambda: ["q", "k", "v", "o", "gate", "up", "down"])
    is_rslora: bool = False
    is_dora: bool = False


@dataclass(frozen=True)
class PhaseData:
    """A phase's own training data, used instead of the run's text."""

    kind: str  # text | chat
    dir: str  # folder with manifest.json and shards; relative to the run directory unless absolute
    manifest_sha256: str = ""  # "" until prepared
    num_train_tokens: int = 0
    num_val_tokens: int = 0
    question: str = ""  # the first user question in the chat data


@dataclass(frozen=True)
class Phase:
    kind: str  # pretrain | mid | sft | rl; also the name of the phase's folder in checkpoints/
    method: str  # full | lora | qlora
    num_steps: int
    batch_tokens: int  # tokens in one optimizer step
    micro_batch: int  # number of rows of `context` tokens per forward pass; 0 lets the trainer pick a number that fits
    optimizer: Optimizer
    schedule: Schedule
    eval_every: int  # number of steps between validations; 0 to validate only at the end
    eval_tokens: int
    save_every: int  # number of steps between checkpoints; 0 to save only at the end
    save_every_s: float  # maximum number of seconds between checkpoints; 0 for no maximum
    sample_every: int  # number of steps between samples; 0 to sample whenever a checkpoint is saved
    keep_last: int  # number of checkpoints kept in addition to the best one
    init_from: str = ""  # a checkpoint folder to start from; "" for fresh weights
    init_base: str = ""  # if init_from contains an adapter, the folder with the weights that it was trained on
    data: Optional[PhaseData] = None  # the phase's own data; None if the phase trains on the run's text
    lora: Optional[Lora] = None  # used by the methods lora and qlora
    rl: Optional[Rl] = None  # used by phases of kind rl
    recompute: str = "none"  # none | half | all: how many blocks recompute their activations instead of keeping them
    offload: str = "none"  # none | optimizer: what is kept in host memory instead of GPU memory
    sample_prompts: List[str] = field(default_factory=list)  # prompts for samples; if empty, the run's prompts are used


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
    # True if a GPU was rented: the trainer then fails if it finds no GPU, instead of using the CPU
    needs_gpu: bool = False
    attention: str = "auto"  # auto | cudnn | flash | efficient | math
    graphs: str = "auto"  # auto | on | off: whether to run micro-batches as CUDA graphs; same default as the run file
    is_deterministic: bool = False
    num_threads: int = 0  # number of CPU threads; 0 for as many as the machine has
    num_ranks: int = 0  # number of training processes, one per GPU; 0 for as many as there are GPUs
    parallel: str = "auto"  # auto | ddp | zero2 | zero3 | hsdp: whether the ranks divide the model among them
    log_every: int = 10  # number of steps between metric lines
    max_bad_steps: int = 10  # the run stops after this many consecutive steps with a non-finite loss or gradient
    time_limit_s: float = 0.0  # wall-clock limit for the trainer; 0 for none
    writes_csv: bool = False


@dataclass(frozen=True)
class Limits:
    spend_usd: Optional[str] = None  # an amount as a decimal string, because dollars are never floats
    time_s: float = 0.0  # time limit in seconds; 0 for none
    idle_s: float = 1800.0
    unsaved_s: float = 1800.0  # how long training may continue while the store refuses every push; 0 for no limit
    stall_factor: float = 10.0  # training counts as stalled if a step takes this many times as long as usual
    rate_usd_per_hour: Optional[str] = None
    on_divergence: str = "alert"  # alert | stop
    on_slow: str = "alert"  # alert | stop
    relaunches: int = 10  # how many times the guard may relaunch the run after an instance is preempted or lost


@dataclass(frozen=True)
class Ssh:
    """An SSH host from the run file."""

    host: str
    user: str = ""  # user name on the host; if empty, the local user name
    port: int = 22
    key_file: str = ""  # path of a private key; if empty, ssh uses its default keys
    host_key: str = ""  # the host's public key (TYPE BASE64); if empty, known_hosts is used, or the user confirms
    known_hosts: str = "~/.ssh/known_hosts"
    work_dir: str = ".homing"  # folder on the host; a relative path is relative to the user's home directory
    rate_usd_per_hour: str = "0.36"
    python: str = ""  # a Python with torch on the host; if empty, homing creates an environment from its lock file


@dataclass(frozen=True)
class Cloud:
    providers: List[str] = field(default_factory=lambda: ["local"])
    gpu: str = ""
    num_gpus: int = 1
    on_preempt: str = "relaunch"  # relaunch | stop
    ssh: Optional[Ssh] = None
    settings: Dict[str, Dict[str, Any]] = field(default_factory=dict)  # provider -> its section of the run file
    # a persistent folder on the instances, with the layout datasets/ artifacts/ runs/ cache/ hf_cache/
    volume: str = ""


@dataclass(frozen=True)
class RunInput:
    """A file that the run needs in addition to its own text, such as open weights."""

    path: str  # path relative to the instance's data folder
    source: str  # local path, or hf:OWNER/NAME@COMMIT/FILE if the instance downloads the file from the Hub
    sha256: str
    num_bytes: int = 0  # size if the file is on the Hub, because there may be no local copy; otherwise 0


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
    base: Optional[Base] = None  # None if the model is trained from scratch
    inputs: List[RunInput] = field(default_factory=list)  # filled in at launch
    id: str = ""  # NAME-yyyymmdd-hhmmss-xxxx, assigned at launch
    code_version: str = ""
    run_file_sha256: str = ""
    origin: Dict[str, str] = field(default_factory=dict)  # key -> source: "model.width" -> "derived from model.depth"
