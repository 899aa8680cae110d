"""The run file, one class per section, one field per key.

A field's description is what `homing explain KEY` prints, with its type, default, range and an example; there is no
second list of keys anywhere. A field whose default is None is derived when it is left out, and `derived` tells how.
What needs two keys at once (width and heads, batch and context) is checked in `resolve`.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from homing.config.clouds.aws import AwsCloud
from homing.config.clouds.modal import ModalCloud
from homing.config.clouds.runpod import RunpodCloud
from homing.config.clouds.shadeform import ShadeformCloud
from homing.config.kinds import Bytes, Count, Duration, Flag, Number, Switch, Text, Texts, Usd, Whole
from homing.config.phase_sections import Phase
from homing.config.placeholders import Filled
from homing.config.section import Section, key
from homing.wire.run import Train as ResolvedTrain

__all__ = ["NAME_PATTERN", "RunFile", "Section"]

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
# Only the shape: whether a bucket or repository is there is asked at launch, before anything is rented.
STORE_PATTERN = (
    r"^(file:/*[^/].*"
    r"|s3:(//)?[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?]*)?(\?.+)?"
    r"|hf:((datasets|models)/)?\w[\w.-]*/\w[\w.-]*(/.*)?"
    r"|modal:[A-Za-z0-9][A-Za-z0-9_.-]{0,49}(/[^?]*)?)$"
)


class Data(Section):
    """The text to learn from, and where its tokens lie."""

    text: Texts = key(
        "Text files, globs or directories; .gz, .xz and .zst are unpacked, .jsonl gives one document per line, .parquet"
        " one per row. Also files in a store or on the Hub, such as hf:datasets/OWNER/NAME/data/*.parquet, which prep"
        " brings by their hashes; hf:datasets/OWNER/NAME@COMMIT/... keeps to one state of them.",
        default=[],
        example="[books/*.txt, more/]",
    )
    validation: Texts = key(
        "Text kept for evaluation only. Without it a share of the text is held out, see data.val_fraction.",
        default=[],
        example="[held-out.txt]",
    )
    val_fraction: Number = key(
        "Share of the tokens held out for evaluation: documents picked by the hash of each, never the tail of a file."
        " From long documents, passages are held out, cut at paragraph breaks.",
        default=0.01,
        example="0.5%",
        ge=0.0,
        le=0.5,
    )
    text_field: Text = key(
        "The field of a .jsonl line, or the column of a .parquet file, that holds the text.",
        default="text",
        example="content",
    )
    shard_tokens: Count = key(
        "Tokens in one shard file.", default=100_000_000, example="100M", ge=1_000, le=10_000_000_000
    )
    take: Bytes = key(
        "How much of the text is prepared, for a trial on little of it: from every file its share, and the rest is not"
        " read; of a pattern in a store that is all the text only so many files are brought as hold it. 0: all.",
        default=0,
        example="100MB",
        ge=0,
    )
    dir: Text | None = key(
        "Where tokenizer, shards and manifest are written and read.", derived="data/NAME", example="data/goethe"
    )


class Tokenizer(Section):
    """Text to ids: a byte-level BPE trained on the text, or one that exists already."""

    vocab_size: Count | None = key(
        "Entries of the vocabulary, specials and the 256 bytes included.",
        derived="32768, less where the text gives no more, or the size of the tokenizer that is there already",
        example="32768",
        ge=257,
        le=1_000_000,
    )
    split: Literal["gpt4", "gpt2"] = key(
        "How text is cut into words before merging: gpt4 is the Llama 3 pattern, gpt2 the older one.",
        default="gpt4",
        example="gpt4",
    )
    specials: Literal["standard", "one"] = key(
        "standard: 16 ids for documents, chat turns and tools. one: only <|endoftext|>, as in CS336.",
        default="standard",
        example="one",
    )
    file: Text = key(
        "An existing tokenizer.json to use instead of training one.", default="", example="data/other/tokenizer.json"
    )
    sample: Bytes = key(
        "How much of the text the tokenizer is trained on, spread evenly over it.",
        default=100_000_000,
        example="100MB",
        ge=1_000,
        le=2_000_000_000,
    )


class Model(Section):
    """The decoder. Give the depth alone, or the shape key by key (a key given wins over the dial), or open weights."""

    # `from` is a word of Python, so the field cannot be written down like the others.
    __annotations__["from"] = Text
    vars()["from"] = key(
        "Open weights to begin with: hf:OWNER/NAME or a folder, of Llama, Qwen2 or Qwen3; with shape and tokenizer.",
        default="",
        example="hf:Qwen/Qwen2.5-0.5B",
    )
    depth: Whole | None = key(
        "The one dial: sets width, heads, tokens, batch and learning rates to what suits a model of so many layers.",
        example="12",
        ge=1,
        le=128,
    )
    family: Literal["stock", "swift"] = key(
        "stock opens in transformers and llama.cpp; swift learns more than stock in the same short time and opens"
        " in homing.",
        default="stock",
        example="swift",
    )
    arch: Literal["llama", "qwen2", "qwen3"] = key(
        "Which open architecture a stock model is: llama, qwen2 (bias on q, k, v) or qwen3 (norm on q, k).",
        default="qwen3",
        example="qwen3",
    )
    layers: Whole | None = key("Blocks, one after the other.", derived="model.depth, or 12", example="12", ge=1, le=256)
    width: Count | None = key(
        "Size of the residual stream.", derived="64 x layers, in steps of 128", example="768", ge=8, le=65536
    )
    heads: Whole | None = key(
        "Query heads; the width must divide by them unless model.head_size is given.",
        derived="width / head_size",
        example="12",
        ge=1,
        le=1024,
    )
    kv_heads: Whole | None = key(
        "Key and value heads, shared by groups of query heads.", derived="model.heads", example="4", ge=1, le=1024
    )
    head_size: Whole | None = key(
        "Size of one head; even, because rotary positions turn pairs.",
        derived="width / heads; 128 with the dial",
        example="64",
        ge=2,
        le=1024,
    )
    ffn_width: Count | None = key(
        "Inner size of the feed-forward.",
        derived="8/3 of the width, in steps of 64 (swift: 4 widths)",
        example="2048",
        ge=8,
    )
    context: Count | None = key(
        "Tokens the model sees at once.", derived="2048 with the dial, else 1024", example="2048", ge=8, le=1_048_576
    )
    tied: Flag | None = key(
        "One matrix for input and output embedding.",
        derived="false with the dial, else true",
        example="true",
    )
    rope_base: Number = key("Base of the rotary positions.", default=10000.0, example="100000", gt=1.0)
    norm_eps: Number = key("Epsilon of the RMS norms.", default=1e-6, example="1e-5", gt=0.0, le=0.1)


class Eval(Section):
    """Evaluation on held-out text. Under a phase the same keys hold for that phase."""

    every: Count | None = key(
        "Steps between two evaluations; 0: only at the end.",
        derived="a twentieth of the phase, at least 10",
        example="250",
        ge=0,
    )
    tokens: Count | None = key(
        "Held-out tokens read each time.", derived="all there are, at most 500k", example="500k", ge=1
    )


class Checkpoint(Section):
    """When the run can be resumed from. Under a phase the same keys hold for that phase."""

    every: Count | None = key(
        "Steps between two checkpoints, each evaluated first unless eval.every is 0; 0: only at the end.",
        derived="a tenth of the phase; a fifth below 500 steps",
        example="1000",
        ge=0,
    )
    every_time: Duration = key(
        "Also after so much time; 0: never by time.", default=900.0, example="15m", ge=0.0, le=86400.0 * 7
    )
    keep_last: Whole = key("Checkpoints kept beside the best one.", default=2, example="3", ge=1, le=1000)


class Sample(Section):
    """Text that the model writes while it learns."""

    every: Count = key("Steps between samples; 0: with each checkpoint.", default=0, example="500", ge=0)
    prompts: Texts = key("What the model is asked to go on from.", default=[], example='["ROMEO:"]')
    tokens: Count = key("Tokens in one sample.", default=100, example="200", ge=1, le=100_000)
    temperature: Number = key("0: always the likeliest token.", default=0.8, example="1.0", ge=0.0, le=10.0)
    top_k: Count = key("Only the k likeliest tokens; 0: all.", default=50, example="50", ge=0)


class Train(Section):
    """How the trainer runs, whatever it trains."""

    device: Literal["auto", "cpu", "cuda", "mps"] = key("Where to compute.", default="auto", example="cpu")
    precision: Literal["auto", "fp32", "bf16", "fp8"] = key(
        "Of the arithmetic; the weights themselves are kept in fp32. auto: bf16 where the card has it. fp8, for Ada,"
        " Hopper and newer: the products of the blocks, faster from about a billion parameters.",
        default="auto",
        example="bf16",
    )
    compile: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "torch.compile; auto turns it on where it pays.", default="auto", example="off"
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = key(
        "The attention kernel of a CUDA card. auto: raced at the start, each first compared with the plain one; the"
        " choice is kept with the run.",
        default="auto",
        example="flash",
    )
    graphs: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "Each micro-batch as one captured CUDA graph: for small models and batches, where a card waits for the host."
        " auto: measured after the first step, and the faster way is kept with the run. on: wherever it can be.",
        default=ResolvedTrain.graphs,
        example="off",
    )
    deterministic: Flag = key(
        "Bit for bit the same on the same card and versions, at some speed.", default=False, example="true"
    )
    threads: Whole = key("CPU threads; 0: what the machine has.", default=0, example="2", ge=0, le=4096)
    ranks: Whole = key(
        "Processes that train together, one per card, on the same batches as one alone; 0: as many as there are cards.",
        default=0,
        example="2",
        ge=0,
        le=64,
    )
    log_every: Count = key("Steps between two lines of the log.", default=10, example="10", ge=1)
    max_bad_steps: Count = key(
        "Steps in a row with a loss or gradient that is no number, before the run stops.",
        default=10,
        example="10",
        ge=1,
    )
    time_limit: Duration | None = key(
        "Wall clock of the trainer; it lands in time: the rate falls, then the last checkpoint. 0: none.",
        derived="limits.time",
        example="45m",
        ge=0.0,
    )
    csv: Flag = key("Also write metrics.csv.", default=False, example="true")
    only: Text = key(
        "Which phases are trained, joined by +; the first starts from the checkpoint of the phase before it.",
        default="all",
        example="mid+sft",
    )


class Limits(Section):
    """Where the run must end. `homing launch` refuses to rent without limits.spend."""

    spend: Usd | None = key(
        "Dollars for the whole run over all attempts. No default: nobody rents without saying how much.",
        example="$12.00",
        gt=0,
    )
    time: Duration = key("How long the instance may live; 0: no limit of time.", default=0.0, example="6h", ge=0.0)
    idle: Duration = key(
        "An instance that trains nothing for so long is ended.", default=1800.0, example="30m", ge=1.0, le=86400.0
    )
    unsaved: Duration = key(
        "Stop when the store has refused every push for so long: no permission, no bucket, an expired token. What was"
        " trained since the last push would be lost. A store that does not answer is waited for; 0: train on.",
        default=1800.0,
        example="30m",
        ge=0.0,
        le=86400.0,
    )
    stall_factor: Number = key(
        "No step for so many usual step times is a stall.", default=10.0, example="10", ge=2.0, le=10_000.0
    )
    rate: Usd | None = key("No offer above so many dollars an hour.", example="$2.50/h", gt=0)
    on_divergence: Literal["alert", "stop"] = key(
        "When the loss is no number, or far above its usual, line after line.", default="alert", example="stop"
    )
    on_slow: Literal["alert", "stop"] = key(
        "When the first steps run at less than a third of the planned speed.", default="alert", example="stop"
    )
    relaunches: Whole = key(
        "How often the guard may go on after a machine was taken away or lost, inside the spend limit.",
        default=10,
        example="3",
        ge=0,
        le=1000,
    )


class SshHost(Section):
    """A host to log in to, for `providers: [ssh]`. The user's ssh config is not read: this is all there is."""

    host: Text = key("Its name or address.", default="", example="gpu.example.org")
    user: Text = key("Who logs in.", default="", derived="the user at home", example="me")
    port: Whole = key("Where its SSH server listens.", default=22, example="2222", ge=1, le=65535)
    key_file: Text = key(
        "File of the private key, mode 600.",
        default="",
        derived="what ssh finds by itself",
        example="~/.ssh/id_ed25519",
    )
    host_key: Text = key(
        "The host's public key, type and base64; without it known_hosts is looked into, else it is asked about once.",
        default="",
        example="ssh-ed25519 AAAAC3Nz...",
    )
    known_hosts: Text = key("Where to look for the host's key.", default="~/.ssh/known_hosts", example="hosts.txt")
    work_dir: Text = key(
        "Folder there for runs and environments; a relative one starts at the user's home.",
        default=".homing",
        example="/data/homing",
    )
    rate: Usd = key(
        "Dollars an hour. Made up for a host of one's own; the spend limit is counted by it, so it is never nothing.",
        default=Decimal("0.36"),
        example="$0.80/h",
        gt=0,
    )
    python: Text = key(
        "An interpreter there, 3.11 or newer, that has torch and the rest of homing[lm].",
        default="",
        derived="an environment is made there from the versions used here",
        example="/opt/venv/bin/python",
    )


class Cloud(Section):
    """Who may rent out the machine."""

    providers: Texts = key(
        "Providers to ask for offers: aws, fake, local, modal, runpod, shadeform, ssh.",
        default=["local"],
        example="[runpod, shadeform]",
    )
    gpu: Text = key("Only this card.", default="", derived="any that fits", example="H100")
    num_gpus: Whole = key("Cards in the instance.", default=1, example="1", ge=1, le=1024)
    on_preempt: Literal["relaunch", "stop"] = key(
        "When the machine is taken away or lost: the guard goes on from the last checkpoint on the next offer, or not.",
        default="relaunch",
        example="stop",
    )
    image: Filled = key(
        "Container image for providers that start one (modal, runpod), as `homing image build` makes it."
        " The image of a provider's own section wins.",
        default="",
        derived="what each provider starts by itself",
        example="me/train:1",
    )
    ssh: SshHost = Field(default_factory=SshHost)
    runpod: RunpodCloud = Field(default_factory=RunpodCloud)
    shadeform: ShadeformCloud = Field(default_factory=ShadeformCloud)
    aws: AwsCloud = Field(default_factory=AwsCloud)
    modal: ModalCloud = Field(default_factory=ModalCloud)
    volume: Text = key(
        "A persistent folder on the machine: datasets, artifacts, runs, cache and hf_cache are made in it at boot,"
        " and the Hugging Face cache lies there. Not on local.",
        default="",
        example="/workspace",
    )


class RunFile(Section):
    """One run, from text to model."""

    name: Text | None = key(
        "What the run is called everywhere: a-z, 0-9 and -, at most 32 characters.",
        derived="the file's name",
        example="goethe",
        pattern=NAME_PATTERN,
    )
    seed: Whole = key("Of weights, data order and samples.", default=1337, example="42", ge=0, lt=2**31)
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
        "Where the run keeps what must not be lost: file:/folder, s3://bucket/prefix, hf:OWNER/NAME or modal:VOLUME.",
        derived="file: under $HOMING_HOME",
        example="s3://my-bucket/homing",
        pattern=STORE_PATTERN,
    )
