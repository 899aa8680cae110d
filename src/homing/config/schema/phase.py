"""Schema of one phase in the run file: data, LoRA and RL settings, and eval, checkpoint and sample intervals."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from homing.config.schema.value_types import (
    Bytes,
    Count,
    Duration,
    Flag,
    Number,
    Section,
    Switch,
    Text,
    Texts,
    Whole,
    key,
)

__all__ = ["LENGTHS", "ChatSource", "Phase", "PhaseData", "PhaseLora", "PhaseRl", "RlTask"]

LENGTHS = ("tokens", "epochs", "steps")  # keys that set the length of a phase; at most one of them is given


def _sources(value: Any) -> Any:
    """Accept a plain path, or a list of plain paths, for sources that need no other key."""
    listed = [value] if isinstance(value, (str, dict)) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


class ChatSource(Section):
    """One source of conversations in a mixture."""

    path: Text = key("A .jsonl or .parquet file, a glob, or a directory of them.", default="", example="chats/*.jsonl")
    weight: Number = key(
        "Share of this source's conversations relative to the other sources; 0: all its conversations.",
        default=0.0,
        example="2",
        ge=0.0,
        le=1e6,
    )
    repeat: Whole = key("How many times each conversation appears in one epoch.", default=1, example="3", ge=1, le=1000)


class PhaseData(Section):
    """Data for this phase, if it does not train on the run's text: other text, or conversations."""

    text: Texts = key("Text files, globs or directories, as in data.text.", default=[], example="[essays/]")
    chat: Annotated[list[ChatSource], BeforeValidator(_sources)] = key(
        "Conversations in .jsonl or .parquet, in one of these formats: messages, a list of messages,"
        " Alpaca, ShareGPT, or prompt and completion.",
        default=[],
        example="[identity.jsonl]",
    )
    validation: Texts = key("Data used for evaluation only.", default=[], example="[held-out.jsonl]")
    val_fraction: Number | None = key(
        "Fraction held out for evaluation, chosen by hash.", derived="data.val_fraction; 2% for conversations",
        example="5%", ge=0.0, le=0.5,
    )  # fmt: skip


class PhaseLora(Section):
    """LoRA adapters: small trainable matrices added to frozen weights. Used with method: lora or qlora."""

    rank: Whole = key(
        "Rank of the adapters. After another LoRA phase, all settings except dropout default to those of"
        " that phase, so that training continues with the same adapters.",
        default=16, derived="that of the previous LoRA phase", example="64", ge=1, le=4096,
    )  # fmt: skip
    alpha: Number | None = key(
        "The adapters are scaled by alpha / rank.", derived="twice the rank", example="32", gt=0.0, le=65536.0
    )
    dropout: Number = key("Dropout on the adapters' inputs.", default=0.0, example="0.05", ge=0.0, lt=1.0)
    targets: Texts = key(
        "Matrices that get an adapter: q, k, v, o, gate, up, down, or all.", default=["all"], example="[q, v]"
    )
    rslora: Flag = key(
        "Scale the adapters by alpha / sqrt(rank), which suits high ranks.", default=False, example="true"
    )
    dora: Flag = key("Train magnitude and direction of each row separately (DoRA); somewhat slower.", default=False,
                     example="true")  # fmt: skip


class RlTask(Section):
    """One kind of question, and how its answers are rewarded."""

    kind: Literal["gsm8k", "arithmetic", "spelling", "prompts"] = key(
        "gsm8k and prompts read a file; arithmetic and spelling are generated on the fly.",
        default="arithmetic",
        example="gsm8k",
    )
    weight: Number = key("Share of the prompts relative to the other tasks.", default=1.0, example="2", gt=0.0, le=1e6)
    file: Text = key(
        "JSON lines: question and answer (gsm8k); prompt or messages, and answer (prompts).",
        default="",
        example="gsm8k/train.jsonl",
    )
    val_file: Text = key(
        "Held-out lines in the same format.", default="", derived="a tenth of the file", example="gsm8k/test.jsonl"
    )
    difficulty: Whole = key(
        "Difficulty of arithmetic and spelling; 1: one-digit sums.", default=1, example="2", ge=1, le=5
    )
    calculator: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "Evaluate what the model writes between the tool tokens, and insert the result. auto: only in gsm8k.",
        default="auto",
        example="off",
    )
    reward: Text = key(
        "A reward.py with `def reward(prompt, completion, answer)`, run in a separate process.",
        default="",
        example="reward.py",
    )


class PhaseRl(Section):
    """Reinforcement learning with verifiable rewards (GRPO)."""

    tasks: list[RlTask] = key("The tasks to train on, one entry for each kind of question.", default=[], example="")
    prompts_per_step: Whole = key("Questions per step.", default=16, example="16", ge=1, le=4096)
    samples_per_prompt: Whole = key(
        "Answers per question; each answer is compared with the others.", default=16, example="8", ge=2, le=1024
    )
    answer_tokens: Count | None = key(
        "Maximum number of tokens in an answer; longer answers are cut off.",
        derived="256, or half the context if that is less",
        example="128",
        ge=1,
        le=1_048_576,
    )
    temperature: Number = key("Sampling temperature.", default=1.0, example="0.8", gt=0.0, le=5.0)
    top_k: Count = key("Sample only among the k most likely tokens; 0: all.", default=0, example="50", ge=0)
    advantage: Literal["std", "mean"] = key(
        "mean: the reward minus the group's mean. std: the same, divided by the group's standard deviation.",
        default="std",
        example="mean",
    )
    kl: Number = key(
        "Weight of the KL penalty, which keeps the model close to the weights at the start of the phase."
        " 0: no penalty, and no second copy of those weights in memory.",
        default=0.0,
        example="0.01",
        ge=0.0,
        le=10.0,
    )
    updates_per_rollout: Whole = key("Optimizer steps per set of samples.", default=1, example="2", ge=1, le=16)
    clip_low: Number = key(
        "With several updates per rollout: how far a token's probability may fall before it is clipped.",
        default=0.2,
        example="0.2",
        gt=0.0,
        lt=1.0,
    )
    clip_high: Number = key(
        "With several updates per rollout: how far a token's probability may rise before it is clipped.",
        default=0.2,
        example="0.28",
        gt=0.0,
        le=10.0,
    )
    pass_reward: Number = key("An answer passes if its reward is at least this.", default=1.0, example="0.5")
    eval_prompts: Count = key("Held-out questions per evaluation.", default=64, example="200", ge=1, le=100_000)
    eval_samples: Whole = key(
        "Answers per question in an evaluation: the k of pass@k.", default=4, example="8", ge=1, le=1024
    )
    rollout_rows: Count = key(
        "Samples generated at a time; 0: all samples of a step, halved with a notice if memory is short.",
        default=0,
        example="64",
        ge=0,
    )
    graphs: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "Capture the generation of each token as a CUDA graph; auto: on CUDA.", default="auto", example="off"
    )
    collapse_steps: Whole = key(
        "Report a collapse after it has lasted this many steps.", default=20, example="50", ge=2, le=100_000
    )
    reward_timeout: Duration = key(
        "Time limit for one call of your reward function.", default=10.0, example="30s", gt=0.0, le=600.0
    )
    reward_memory: Bytes = key(
        "Memory limit of the reward process.", default=2 * 1024**3, example="1GiB", ge=64 * 1024**2, le=1024**4
    )


class PhaseSample(Section):
    """Samples in this phase."""

    every: Count | None = key("Steps between samples in this phase.", derived="sample.every", example="500", ge=0)
    prompts: Texts = key(
        "Prompts for samples in this phase.",
        default=[],
        derived="the first question in the phase's conversations, if it has any; else sample.prompts",
        example='["Who are you?"]',
    )


class PhaseCheckpoint(Section):
    """Checkpoints in this phase."""

    every: Count | None = key(
        "Steps between checkpoints in this phase.", derived="checkpoint.every", example="500", ge=0
    )
    every_time: Duration | None = key(
        "Also save a checkpoint whenever this much time has passed.",
        derived="checkpoint.every_time",
        example="15m",
        ge=0.0,
        le=86400.0 * 7,
    )
    keep_last: Whole | None = key(
        "Number of latest checkpoints to keep, in addition to the best one.",
        derived="checkpoint.keep_last",
        example="3",
        ge=1,
        le=1000,
    )


class PhaseEval(Section):
    """Evaluation in this phase."""

    every: Count | None = key("Steps between evaluations in this phase.", derived="eval.every", example="250", ge=0)
    tokens: Count | None = key("Held-out tokens per evaluation.", derived="eval.tokens", example="500k", ge=1)


class Phase(Section):
    """One stage of training with its own learning rates. Set its length with one of tokens, epochs or steps."""

    kind: Literal["pretrain", "mid", "sft", "rl"] = key(
        "pretrain: train on text. mid: train on more text. sft: train on the answers in conversations."
        " rl: train on rewards. Each kind may appear only once in a run.",
        default="pretrain",
        example="sft",
    )
    method: Literal["full", "lora", "qlora"] = key(
        "full trains every weight; lora trains adapters on frozen weights; qlora does the same on 4-bit weights.",
        default="full",
        example="lora",
    )
    tokens: Count | None = key(
        "Length in tokens.", derived="pretrain: 12 per parameter if model.depth is set", example="2B", ge=1
    )
    epochs: Number | None = key(
        "Length in passes over the phase's data; beyond about 4, further passes teach little.",
        derived="mid 1, sft 3 if no length is given",
        example="4",
        gt=0.0,
        le=10_000.0,
    )
    steps: Count | None = key("Length in optimizer steps.", example="7751", ge=1, le=1_000_000_000)
    batch_tokens: Count | None = key(
        "Tokens per optimizer step, a multiple of model.context.",
        derived="a power of two that grows with the tokens of the phase; if steps is given, small enough that the"
        " text is read at most 4 times",
        example="131072",
        ge=1,
    )
    micro_batch: Count = key(
        "Rows of model.context tokens per forward pass; the rest of the batch is accumulated. 0: as many as fit.",
        default=0,
        example="16",
        ge=0,
    )
    optimizer: Literal["muon", "adamw"] = key(
        "muon for the block matrices (with AdamW for the rest), or adamw for everything.",
        default="muon",
        example="adamw",
    )
    lr: Number | None = key(
        "Peak learning rate of the block matrices.",
        derived="muon: 0.02 for 2,520 steps of 524,288 tokens, higher for fewer steps (less so in stock models"
        " above 12 layers), lower for smaller batches; adamw: 6e-4 at width 768, scaled by batch and width",
        example="3e-4",
        gt=0.0,
        le=10.0,
    )
    lr_embedding: Number | None = key(
        "Peak learning rate of the input embedding.",
        derived="muon: 0.15, lower for batches below 65,536 tokens, 0.3 in swift; adamw: lr",
        example="0.05",
        gt=0.0,
        le=10.0,
    )
    lr_head: Number | None = key(
        "Peak learning rate of the output head, and of a tied matrix.",
        derived="muon: 0.008, lower at widths above 768; adamw: lr",
        example="0.008",
        gt=0.0,
        le=10.0,
    )
    lr_norm: Number | None = key(
        "Peak learning rate of the norms.", derived="muon: 0.008; adamw: lr", example="0.005", gt=0.0, le=10.0
    )
    lr_scalar: Number | None = key(
        "Peak learning rate of swift's gates and scales.", derived="muon: 0.15; adamw: lr", example="0.5",
        gt=0.0, le=10.0,
    )  # fmt: skip
    weight_decay: Number = key(
        "Weight decay of the block matrices.",
        default=0.1,
        derived="0.28 with muon in pretraining; 0 in sft, in rl and for loaded weights",
        example="0.1",
        ge=0.0,
        le=10.0,
    )
    beta1: Number = key(
        "AdamW's first-moment decay.", default=0.9, derived="0.8 alongside muon", example="0.9", ge=0.0, lt=1.0
    )
    beta2: Number = key("AdamW's second-moment decay.", default=0.95, example="0.99", ge=0.0, lt=1.0)
    eps: Number = key("AdamW's epsilon.", default=1e-8, derived="1e-10 alongside muon", example="1e-8", gt=0.0, le=0.1)
    momentum: Number = key("Muon's momentum.", default=0.95, example="0.95", ge=0.0, lt=1.0)
    momentum_start: Number = key(
        "Muon's momentum at the first step; it grows to phases.N.momentum over 300 steps. 0: no ramp.",
        default=0.85,
        example="0.85",
        ge=0.0,
        lt=1.0,
    )
    variance_beta: Number = key(
        "Decay of Muon's running variance per matrix row, which evens out the size of row updates (NorMuon); 0: off.",
        default=0.9,
        example="0.9",
        ge=0.0,
        lt=1.0,
    )
    cautious: Flag = key(
        "Apply Muon's weight decay only where the update itself points towards zero.",
        default=True,
        example="true",
    )
    clip: Number = key(
        "Maximum norm of all gradients together; 0: no clipping.",
        default=1.0,
        derived="0.3 with muon in pretraining",
        example="1.0",
        ge=0.0,
    )
    schedule: Literal["wsd", "cosine", "constant"] = key(
        "wsd: warm-up, constant, linear decay. cosine: warm-up, then half a cosine. constant: warm-up, then constant.",
        default="wsd",
        example="cosine",
    )
    warmup_steps: Count | None = key(
        "Steps over which the learning rate rises from zero.",
        derived="2% of the steps, at most 1000",
        example="100",
        ge=0,
    )
    decay_fraction: Number | None = key(
        "wsd only: the last fraction of the phase, in which the learning rate decays.",
        derived="0.5",
        example="40%",
        ge=0.0,
        le=1.0,
    )
    floor: Number | None = key(
        "Final learning rate as a fraction of the peak.", derived="wsd 0.05, cosine 0.1", example="0.1", ge=0.0, le=1.0
    )
    init_from: Text = key(
        "Checkpoint to start from: a local folder, or hf:OWNER/REPO/path on the Hub, which is fetched"
        " once (at a commit: hf:OWNER/REPO@COMMIT/path).",
        default="",
        derived="the previous phase",
        example="models/base",
    )
    recompute: Literal["none", "half", "all"] = key(
        "Recompute activations instead of storing them, in every second block or in all: less memory,"
        " some loss of speed.",
        default="none",
        example="all",
    )
    states: Literal["fp32", "int8"] = key("Storage type of AdamW's two moments.", default="fp32", example="int8")
    offload: Literal["none", "optimizer"] = key(
        "optimizer: keep the optimizer state in host memory and stream it through the GPU in each step,"
        " which takes seconds. Only with method full on CUDA GPUs. The results are the same, and a run may"
        " resume with or without it.",
        default="none",
        example="optimizer",
    )
    data: PhaseData = Field(default_factory=PhaseData)
    lora: PhaseLora = Field(default_factory=PhaseLora)
    rl: PhaseRl = Field(default_factory=PhaseRl)
    eval: PhaseEval = Field(default_factory=PhaseEval)
    checkpoint: PhaseCheckpoint = Field(default_factory=PhaseCheckpoint)
    sample: PhaseSample = Field(default_factory=PhaseSample)
