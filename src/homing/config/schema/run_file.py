"""Schema of the run file: one class per section, one field per key.

`homing explain KEY` prints a field's description with its type, default, range and an example; this is the only list of
keys. A field with the default None is derived when the run file leaves it out, and `derived` says how. `resolve` checks
the rules that involve two keys (width and heads, batch and context).
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from homing.config.schema.phase import Phase
from homing.config.schema.provider_settings import AwsCloud, ModalCloud, RunpodCloud, ShadeformCloud
from homing.config.schema.value_types import (
    Bytes,
    Count,
    Duration,
    Filled,
    Flag,
    Number,
    Parallel,
    Section,
    Switch,
    Text,
    Texts,
    Usd,
    Whole,
    key,
)
from homing.wire.run_json import Train as ResolvedTrain

__all__ = ["NAME_PATTERN", "SHAPE", "RunFile", "Section"]

SHAPE = ("layers", "width", "heads", "kv_heads", "head_size", "ffn_width")  # keys of `model` that `depth` replaces
NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
# This checks only the format of the address. `homing launch` checks that the store exists before it rents anything.
STORE_PATTERN = (
    r"^(file:/*[^/].*"
    r"|s3:(//)?[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?]*)?(\?.+)?"
    r"|hf:((datasets|models)/)?\w[\w.-]*/\w[\w.-]*(/.*)?"
    r"|modal:[A-Za-z0-9][A-Za-z0-9_.-]{0,49}(/[^?]*)?)$"
)


class Data(Section):
    """The training text and the folder for its shards."""

    text: Texts = key(
        "Text files, globs or directories. .gz, .xz and .zst are decompressed; .jsonl gives one document"
        " per line, .parquet one per row. Files in a store or on the Hub work too, such as"
        " hf:datasets/OWNER/NAME/data/*.parquet; `homing prep` fetches them and verifies their hashes."
        " hf:datasets/OWNER/NAME@COMMIT/... pins one revision.",
        default=[],
        example="[books/*.txt, more/]",
    )
    validation: Texts = key(
        "Text used for evaluation only. Without it, part of the text is held out; see data.val_fraction.",
        default=[],
        example="[held-out.txt]",
    )
    val_fraction: Number = key(
        "Fraction of the tokens held out for evaluation. Documents are chosen by their hash, not taken"
        " from the end of a file. From long documents, only passages are held out, cut at paragraph breaks.",
        default=0.01,
        example="0.5%",
        ge=0.0,
        le=0.5,
    )
    text_field: Text = key(
        "The field of a .jsonl line, or the column of a .parquet file, that contains the text.",
        default="text",
        example="content",
    )
    shard_tokens: Count = key(
        "Tokens per shard file.", default=100_000_000, example="100M", ge=1_000, le=10_000_000_000
    )
    take: Bytes = key(
        "Prepare only this much of the text, for a quick trial. Every file contributes its share, and the"
        " rest is not read. If the text is a single pattern in a store, only as many files as needed are"
        " fetched. 0: all.",
        default=0,
        example="100MB",
        ge=0,
    )
    dir: Text | None = key(
        "Folder for the tokenizer, the shards and their manifest.", derived="data/NAME", example="data/goethe"
    )


class Tokenizer(Section):
    """How text becomes token ids: a byte-level BPE trained on your text, or an existing tokenizer."""

    vocab_size: Count | None = key(
        "Size of the vocabulary, including special tokens and the 256 bytes.",
        derived="32768, or fewer if the text does not yield that many; the size of an existing tokenizer",
        example="32768",
        ge=257,
        le=1_000_000,
    )
    split: Literal["gpt4", "gpt2"] = key(
        "How text is split into words before merging: gpt4 is the Llama 3 pattern, gpt2 the older one.",
        default="gpt4",
        example="gpt4",
    )
    specials: Literal["standard", "one"] = key(
        "standard: 16 special tokens for documents, chat turns and tools. one: only <|endoftext|>, as in CS336.",
        default="standard",
        example="one",
    )
    file: Text = key(
        "An existing tokenizer.json to use instead of training one.", default="", example="data/other/tokenizer.json"
    )
    sample: Bytes = key(
        "How much of the text the tokenizer is trained on, sampled evenly.",
        default=100_000_000,
        example="100MB",
        ge=1_000,
        le=2_000_000_000,
    )


class Model(Section):
    """The decoder. Set only depth, or set individual sizes, which override depth, or start from open weights."""

    # `from` is a Python keyword, so it cannot be declared like the other fields.
    __annotations__["from"] = Text
    vars()["from"] = key(
        "Open weights to start from: hf:OWNER/NAME or a folder, with a Llama, Qwen2 or Qwen3 model. The"
        " shape and the tokenizer then come from these weights too.",
        default="",
        example="hf:Qwen/Qwen2.5-0.5B",
    )
    depth: Whole | None = key(
        "The main size setting: the number of layers, from which width, heads, tokens, batch and learning"
        " rates are derived.",
        example="12",
        ge=1,
        le=128,
    )
    family: Literal["stock", "swift"] = key(
        "stock works in transformers and llama.cpp. swift learns more than stock in the same short time,"
        " but works only in homing and, with its own modelling file, in transformers.",
        default="stock",
        example="swift",
    )
    arch: Literal["llama", "qwen2", "qwen3"] = key(
        "Architecture of a stock model: llama, qwen2 (bias on q, k, v) or qwen3 (norm on q, k).",
        default="qwen3",
        example="qwen3",
    )
    layers: Whole | None = key(
        "Number of transformer blocks.", derived="model.depth, or 12", example="12", ge=1, le=256
    )
    width: Count | None = key(
        "Width of the residual stream (hidden size).",
        derived="64 x layers, in steps of 128",
        example="768",
        ge=8,
        le=65536,
    )
    heads: Whole | None = key(
        "Query heads. The width must be divisible by this number unless model.head_size is set.",
        derived="width / head_size",
        example="12",
        ge=1,
        le=1024,
    )
    kv_heads: Whole | None = key(
        "Key and value heads, shared by groups of query heads (GQA).", derived="model.heads", example="4", ge=1, le=1024
    )
    head_size: Whole | None = key(
        "Size of one head. It must be even, because RoPE rotates pairs.",
        derived="width / heads; 128 if the shape comes from model.depth",
        example="64",
        ge=2,
        le=1024,
    )
    ffn_width: Count | None = key(
        "Inner width of the feed-forward layers.",
        derived="8/3 of the width, in steps of 64 (swift: 4 x width)",
        example="2048",
        ge=8,
    )
    context: Count | None = key(
        "Context length in tokens.",
        derived="2048 if the shape comes from model.depth, else 1024",
        example="2048",
        ge=8,
        le=1_048_576,
    )
    tied: Flag | None = key(
        "Use one matrix for the input and output embedding.",
        derived="false if the shape comes from model.depth, else true",
        example="true",
    )
    rope_base: Number = key("Base frequency of RoPE (rope_theta).", default=10000.0, example="100000", gt=1.0)
    norm_eps: Number = key("Epsilon of the RMS norms.", default=1e-6, example="1e-5", gt=0.0, le=0.1)


class Eval(Section):
    """Evaluation on held-out text. A phase can override these keys."""

    every: Count | None = key(
        "Steps between evaluations; 0: only at the end.",
        derived="a twentieth of the phase, at least 10",
        example="250",
        ge=0,
    )
    tokens: Count | None = key(
        "Held-out tokens per evaluation.", derived="all of them, at most 500k", example="500k", ge=1
    )


class Checkpoint(Section):
    """How often checkpoints are saved and how many are kept. A phase can override these keys."""

    every: Count | None = key(
        "Steps between checkpoints; each is evaluated first unless eval.every is 0. 0: only at the end.",
        derived="a tenth of the phase; a fifth if it has fewer than 500 steps",
        example="1000",
        ge=0,
    )
    every_time: Duration = key(
        "Also save a checkpoint whenever this much time has passed; 0: only by steps.",
        default=900.0,
        example="15m",
        ge=0.0,
        le=86400.0 * 7,
    )
    keep_last: Whole = key(
        "Number of latest checkpoints to keep, in addition to the best one.", default=2, example="3", ge=1, le=1000
    )


class Sample(Section):
    """Text that the model generates during training, so that you can watch it improve."""

    every: Count = key("Steps between samples; 0: with each checkpoint.", default=0, example="500", ge=0)
    prompts: Texts = key("Prompts that the model continues.", default=[], example='["ROMEO:"]')
    tokens: Count = key("Tokens per sample.", default=100, example="200", ge=1, le=100_000)
    temperature: Number = key(
        "Sampling temperature; 0: always the most likely token.", default=0.8, example="1.0", ge=0.0, le=10.0
    )
    top_k: Count = key("Sample only among the k most likely tokens; 0: all.", default=50, example="50", ge=0)


class Train(Section):
    """Trainer settings that apply to every phase."""

    device: Literal["auto", "cpu", "cuda", "mps"] = key("Device to train on.", default="auto", example="cpu")
    precision: Literal["auto", "fp32", "bf16", "fp8"] = key(
        "Precision of the arithmetic; the weights themselves are kept in fp32. auto: bf16 if the GPU"
        " supports it. fp8 (Ada, Hopper and newer): for the blocks' matrix multiplications, which is faster"
        " from about a billion parameters.",
        default="auto",
        example="bf16",
    )
    compile: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "Use torch.compile; auto enables it where it pays off.", default="auto", example="off"
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = key(
        "Attention kernel on a CUDA GPU. auto benchmarks the kernels at the start, after checking each"
        " against the plain implementation; the choice is saved with the run.",
        default="auto",
        example="flash",
    )
    graphs: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "Capture each micro-batch as a CUDA graph, which helps small models and batches, where the GPU"
        " waits for the host. auto: try both after the first step, and save the faster choice with the"
        " run. on: wherever possible.",
        default=ResolvedTrain.graphs,
        example="off",
    )
    deterministic: Flag = key(
        "Make training bit-for-bit reproducible on the same GPU and versions; somewhat slower.",
        default=False,
        example="true",
    )
    threads: Whole = key("CPU threads; 0: as many as the machine has.", default=0, example="2", ge=0, le=4096)
    ranks: Whole = key(
        "Training processes, one per GPU; the batches are the same as with one process. 0: one for each GPU.",
        default=0,
        example="2",
        ge=0,
        le=64,
    )
    parallel: Annotated[Literal["auto", "ddp", "zero2", "zero3", "hsdp"], Parallel] = key(
        "How several ranks hold the model. ddp: each holds all of it. zero2, zero3: the ranks divide weights,"
        " gradients and optimizer state among them, and gather the weights whole (zero2) or block by block (zero3)."
        " hsdp: zero3 within a machine, or within each half of its GPUs. auto: ddp, zero2 or zero3, the first that"
        " fits in GPU memory.",
        default="auto",
        example="zero3",
    )
    log_every: Count = key("Steps between log lines.", default=10, example="10", ge=1)
    max_bad_steps: Count = key(
        "Stop the run after this many consecutive steps with a NaN or infinite loss or gradient.",
        default=10,
        example="10",
        ge=1,
    )
    time_limit: Duration | None = key(
        "Wall-clock limit for the trainer. Before the limit, the learning rate decays and a final"
        " checkpoint is saved. 0: none.",
        derived="limits.time",
        example="45m",
        ge=0.0,
    )
    csv: Flag = key("Also write metrics.csv.", default=False, example="true")
    only: Text = key(
        "Phases to train, joined with +. The first one starts from the checkpoint of the phase before it.",
        default="all",
        example="mid+sft",
    )


class Limits(Section):
    """Limits that end the run. `homing launch` rents nothing unless limits.spend or --spend-limit is set."""

    spend: Usd | None = key(
        "Spend limit in dollars for the whole run, over all attempts. There is no default: every launch"
        " needs an explicit limit.",
        example="$12.00",
        gt=0,
    )
    time: Duration = key("How long the instance may exist; 0: no time limit.", default=0.0, example="6h", ge=0.0)
    idle: Duration = key(
        "Destroy an instance that has not trained for this long.", default=1800.0, example="30m", ge=1.0, le=86400.0
    )
    unsaved: Duration = key(
        "Stop if the store has refused every push for this long (no permission, no bucket, an expired"
        " token), because everything trained since the last push would be lost. If the store does not"
        " respond, the run keeps waiting. 0: keep training.",
        default=1800.0,
        example="30m",
        ge=0.0,
        le=86400.0,
    )
    stall_factor: Number = key(
        "A run has stalled if no step finishes within this many typical step times.",
        default=10.0,
        example="10",
        ge=2.0,
        le=10_000.0,
    )
    rate: Usd | None = key("Skip offers above this hourly rate.", example="$2.50/h", gt=0)
    on_divergence: Literal["alert", "stop"] = key(
        "What to do when the loss is NaN, or stays far above its usual level for several log lines.",
        default="alert",
        example="stop",
    )
    on_slow: Literal["alert", "stop"] = key(
        "What to do when the first steps run at less than a third of the planned speed.",
        default="alert",
        example="stop",
    )
    relaunches: Whole = key(
        "How many times the guard may relaunch the run after an instance is preempted or lost, within the spend limit.",
        default=10,
        example="3",
        ge=0,
        le=1000,
    )


class SshHost(Section):
    """The host for `providers: [ssh]`. homing does not read your ssh config, so set everything here."""

    host: Text = key("Host name or address.", default="", example="gpu.example.org")
    user: Text = key("User name for the login.", default="", derived="your local user name", example="me")
    port: Whole = key("Port of the host's SSH server.", default=22, example="2222", ge=1, le=65535)
    key_file: Text = key(
        "File with the private key, mode 600.",
        default="",
        derived="the keys that ssh finds itself",
        example="~/.ssh/id_ed25519",
    )
    host_key: Text = key(
        "The host's public key: type and base64. Without it, known_hosts is used; if the host is not"
        " there either, you are asked once.",
        default="",
        example="ssh-ed25519 AAAAC3Nz...",
    )
    known_hosts: Text = key(
        "File in which to look up the host's key.", default="~/.ssh/known_hosts", example="hosts.txt"
    )
    work_dir: Text = key(
        "Folder on the host for runs and environments; a relative path starts in the user's home directory.",
        default=".homing",
        example="/data/homing",
    )
    rate: Usd = key(
        "Dollars per hour. For your own host, make up a rate. It must not be zero, because the spend limit"
        " is based on it.",
        default=Decimal("0.36"),
        example="$0.80/h",
        gt=0,
    )
    python: Text = key(
        "A Python interpreter on the host, 3.11 or newer, with torch and the rest of homing[lm].",
        default="",
        derived="a new environment on the host, with the versions used on this computer",
        example="/opt/venv/bin/python",
    )


class Cloud(Section):
    """Providers to rent from, and the GPU to rent."""

    providers: Texts = key(
        "Providers to ask for offers: aws, fake, local, modal, runpod, shadeform, ssh.",
        default=["local"],
        example="[runpod, shadeform]",
    )
    gpu: Text = key("Use only offers with this GPU.", default="", derived="any that fits", example="H100")
    num_gpus: Whole = key("GPUs per instance.", default=1, example="1", ge=1, le=1024)
    on_preempt: Literal["relaunch", "stop"] = key(
        "What to do if the instance is preempted or lost: relaunch (the guard resumes the run from the last"
        " checkpoint on the next offer) or stop.",
        default="relaunch",
        example="stop",
    )
    image: Filled = key(
        "Container image for providers that start one (modal, runpod), as built by `homing image build`."
        " An image in a provider's own section takes precedence.",
        default="",
        derived="each provider's default",
        example="me/train:1",
    )
    ssh: SshHost = Field(default_factory=SshHost)
    runpod: RunpodCloud = Field(default_factory=RunpodCloud)
    shadeform: ShadeformCloud = Field(default_factory=ShadeformCloud)
    aws: AwsCloud = Field(default_factory=AwsCloud)
    modal: ModalCloud = Field(default_factory=ModalCloud)
    volume: Text = key(
        "A persistent folder on the instance. The folders datasets, artifacts, runs, cache and hf_cache are"
        " created in it at boot, and the Hugging Face cache is kept there. Not available on local.",
        default="",
        example="/workspace",
    )


class RunFile(Section):
    """One run, from text to model."""

    name: Text | None = key(
        "Name of the run: a-z, 0-9 and -, at most 32 characters.",
        derived="the file's name",
        example="goethe",
        pattern=NAME_PATTERN,
    )
    seed: Whole = key("Random seed for weights, data order and samples.", default=1337, example="42", ge=0, lt=2**31)
    data: Data = Field(default_factory=Data)
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    model: Model = Field(default_factory=Model)
    phases: list[Phase] = Field(default_factory=lambda: [Phase()], min_length=1, max_length=20)
    train: Train = Field(default_factory=Train)
    eval: Eval = Field(default_factory=Eval)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    sample: Sample = Field(default_factory=Sample)
    limits: Limits = Field(default_factory=Limits)
    cloud: Cloud = Field(default_factory=Cloud)
    store: Text | None = key(
        "Where the run keeps checkpoints, logs and metrics: file:/folder, s3://bucket/prefix,"
        " hf:OWNER/NAME or modal:VOLUME.",
        derived="file: under $HOMING_HOME",
        example="s3://my-bucket/homing",
        pattern=STORE_PATTERN,
    )
