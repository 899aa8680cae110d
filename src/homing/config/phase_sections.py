"""A phase in the run file, and what it may have of its own: data, adapters, the tasks of reinforcement, and how often
it is evaluated, saved and sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from homing.config.kinds import Bytes, Count, Duration, Flag, Number, Switch, Text, Texts, Whole
from homing.config.section import Section, key

__all__ = ["ChatSource", "Phase", "PhaseData", "PhaseLora", "PhaseRl", "RlTask"]


def _sources(value: Any) -> Any:
    """A path may stand by itself where nothing more is to be said of it."""
    listed = [value] if isinstance(value, (str, dict)) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


class ChatSource(Section):
    """One source of conversations in a mixture."""

    path: Text = key("A .jsonl or .parquet file, a glob or a directory of them.", default="", example="chats/*.jsonl")
    weight: Number = key(
        "Its share of the conversations against the other sources'; 0: as many as it has.",
        default=0.0,
        example="2",
        ge=0.0,
        le=1e6,
    )
    repeat: Whole = key("How often each conversation is there in one epoch.", default=1, example="3", ge=1, le=1000)


class PhaseData(Section):
    """What this phase learns from, where it is not the text of the run: more text, or conversations."""

    text: Texts = key("Text files, globs or directories, as in data.text.", default=[], example="[essays/]")
    chat: Annotated[list[ChatSource], BeforeValidator(_sources)] = key(
        "Conversations in .jsonl or .parquet: messages, a list of messages, Alpaca, ShareGPT or prompt and completion.",
        default=[],
        example="[identity.jsonl]",
    )
    validation: Texts = key("Kept for evaluation only.", default=[], example="[held-out.jsonl]")
    val_fraction: Number | None = key(
        "Share held out for evaluation, by the hash of each.", derived="data.val_fraction; 2% of conversations",
        example="5%", ge=0.0, le=0.5,
    )  # fmt: skip


class PhaseLora(Section):
    """The small matrices that learn beside frozen ones, with method: lora or qlora."""

    rank: Whole = key(
        "Their inner size. After a phase by adapters all but dropout is as there, unless given: the same ones go on.",
        default=16, derived="that of a phase by adapters before it", example="64", ge=1, le=4096,
    )  # fmt: skip
    alpha: Number | None = key("They count alpha / rank.", derived="twice the rank", example="32", gt=0.0, le=65536.0)
    dropout: Number = key("Share of their inputs that is left out.", default=0.0, example="0.05", ge=0.0, lt=1.0)
    targets: Texts = key(
        "Beside which matrices: q, k, v, o, gate, up, down, or all.", default=["all"], example="[q, v]"
    )
    rslora: Flag = key("They count alpha / sqrt(rank), which suits high ranks.", default=False, example="true")
    dora: Flag = key("Length and direction of each row learn apart (DoRA), at some speed.", default=False,
                     example="true")  # fmt: skip


class RlTask(Section):
    """One kind of question, and how an answer is rewarded."""

    kind: Literal["gsm8k", "arithmetic", "spelling", "prompts"] = key(
        "gsm8k and prompts read a file; arithmetic and spelling are made up as they go.",
        default="arithmetic",
        example="gsm8k",
    )
    weight: Number = key(
        "Its share of the prompts, against the other tasks'.", default=1.0, example="2", gt=0.0, le=1e6
    )
    file: Text = key(
        "JSON lines: question and answer (gsm8k); prompt or messages, and answer (prompts).",
        default="",
        example="gsm8k/train.jsonl",
    )
    val_file: Text = key(
        "Held-out lines of the same form.", default="", derived="a tenth of the file", example="gsm8k/test.jsonl"
    )
    difficulty: Whole = key("Of arithmetic and spelling; 1: one-digit sums.", default=1, example="2", ge=1, le=5)
    calculator: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "What the model writes between the tool tokens is computed and told to it. auto: in gsm8k.",
        default="auto",
        example="off",
    )
    reward: Text = key(
        "A reward.py with `def reward(prompt, completion, answer)`, run in a process of its own.",
        default="",
        example="reward.py",
    )


class PhaseRl(Section):
    """Reinforcement with rewards that can be checked (GRPO)."""

    tasks: list[RlTask] = key("What is asked, one entry for each kind of question.", default=[], example="")
    prompts_per_step: Whole = key("Questions in one step.", default=16, example="16", ge=1, le=4096)
    samples_per_prompt: Whole = key(
        "Answers to each: the group that an answer is compared with.", default=16, example="8", ge=2, le=1024
    )
    answer_tokens: Count | None = key(
        "An answer longer than this is cut off.",
        derived="256, or half the context where that is less",
        example="128",
        ge=1,
        le=1_048_576,
    )
    temperature: Number = key("Of sampling.", default=1.0, example="0.8", gt=0.0, le=5.0)
    top_k: Count = key("Sample among the likeliest k tokens only; 0: among all.", default=0, example="50", ge=0)
    advantage: Literal["std", "mean"] = key(
        "The reward less the group's mean, divided by its deviation (std) or not (mean).", default="std", example="mean"
    )
    kl: Number = key(
        "Pull towards the weights that the phase began with; 0: none, and no second copy of them in memory.",
        default=0.0,
        example="0.01",
        ge=0.0,
        le=10.0,
    )
    updates_per_rollout: Whole = key("Optimizer steps on one set of samples.", default=1, example="2", ge=1, le=16)
    clip_low: Number = key(
        "With several updates: how far a token's probability may have fallen and still be learned from.",
        default=0.2,
        example="0.2",
        gt=0.0,
        lt=1.0,
    )
    clip_high: Number = key(
        "With several updates: how far it may have risen.", default=0.2, example="0.28", gt=0.0, le=10.0
    )
    pass_reward: Number = key("So much reward, or more, counts as passed.", default=1.0, example="0.5")
    eval_prompts: Count = key("Held-out questions in an evaluation.", default=64, example="200", ge=1, le=100_000)
    eval_samples: Whole = key("Answers to each of them: the k of pass@k.", default=4, example="8", ge=1, le=1024)
    rollout_rows: Count = key(
        "Samples made at a time; 0: all of a step, halved aloud when the memory does not hold them.",
        default=0,
        example="64",
        ge=0,
    )
    graphs: Annotated[Literal["auto", "on", "off"], Switch] = key(
        "One captured CUDA graph for each new token; auto: on CUDA.", default="auto", example="off"
    )
    collapse_steps: Whole = key(
        "A collapse is said when it has gone on for so many steps.", default=20, example="50", ge=2, le=100_000
    )
    reward_timeout: Duration = key("For one call of one's own reward.", default=10.0, example="30s", gt=0.0, le=600.0)
    reward_memory: Bytes = key("Of its process.", default=2 * 1024**3, example="1GiB", ge=64 * 1024**2, le=1024**4)


class PhaseSample(Section):
    """Samples of one phase."""

    every: Count | None = key("Steps between samples of this phase.", derived="sample.every", example="500", ge=0)
    prompts: Texts = key(
        "What the model is asked in samples of this phase.",
        default=[],
        derived="of conversations: the first question in them; else sample.prompts",
        example='["Who are you?"]',
    )


class PhaseCheckpoint(Section):
    """Checkpoints of one phase."""

    every: Count | None = key(
        "Steps between checkpoints of this phase.", derived="checkpoint.every", example="500", ge=0
    )
    every_time: Duration | None = key(
        "Also after so much time.", derived="checkpoint.every_time", example="15m", ge=0.0, le=86400.0 * 7
    )
    keep_last: Whole | None = key(
        "Checkpoints kept beside the best one.", derived="checkpoint.keep_last", example="3", ge=1, le=1000
    )


class PhaseEval(Section):
    """Evaluation of one phase."""

    every: Count | None = key("Steps between evaluations of this phase.", derived="eval.every", example="250", ge=0)
    tokens: Count | None = key("Held-out tokens read each time.", derived="eval.tokens", example="500k", ge=1)


class Phase(Section):
    """One stretch of training with its own length and rates. Length: exactly one of tokens, epochs, steps."""

    kind: Literal["pretrain", "mid", "sft", "rl"] = key(
        "pretrain on text; mid: more text; sft: conversations, answers alone are learned; rl: by rewards. "
        "Each kind once in a run.",
        default="pretrain",
        example="sft",
    )
    method: Literal["full", "lora", "qlora"] = key(
        "full trains every weight; lora small matrices beside frozen ones; qlora the same beside 4-bit ones.",
        default="full",
        example="lora",
    )
    tokens: Count | None = key(
        "Length in tokens.", derived="pretrain: 12 per parameter when model.depth is given", example="2B", ge=1
    )
    epochs: Number | None = key(
        "Length in passes over the phase's data; past about 4 they teach little.",
        derived="mid 1, sft 3 where no length is given",
        example="4",
        gt=0.0,
        le=10_000.0,
    )
    steps: Count | None = key("Length in optimizer steps.", example="7751", ge=1, le=1_000_000_000)
    batch_tokens: Count | None = key(
        "Tokens in one optimizer step, a multiple of model.context.",
        derived="a power of two that grows with the tokens of the phase; steps read the text at most 4 times by it",
        example="131072",
        ge=1,
    )
    micro_batch: Count = key(
        "Rows of model.context tokens at a time; the rest of the batch is accumulated. 0: the trainer takes what fits.",
        default=0,
        example="16",
        ge=0,
    )
    optimizer: Literal["muon", "adamw"] = key(
        "muon for block matrices (AdamW for the rest), or adamw for all.", default="muon", example="adamw"
    )
    lr: Number | None = key(
        "Peak learning rate of the block matrices.",
        derived="muon 0.02 in 2,520 steps of 524,288 tokens, more in fewer steps (above 12 layers of stock not as much"
        " more), less in smaller ones; adamw 6e-4 at width 768, scaled by batch and width",
        example="3e-4",
        gt=0.0,
        le=10.0,
    )
    lr_embedding: Number | None = key(
        "Peak rate of the input embedding.",
        derived="muon: 0.15, less at batches below 65,536 tokens, in swift 0.3; adamw: lr",
        example="0.05",
        gt=0.0,
        le=10.0,
    )
    lr_head: Number | None = key(
        "Peak rate of the output head, and of a tied matrix.",
        derived="muon: 0.008, less at widths above 768; adamw: lr",
        example="0.008",
        gt=0.0,
        le=10.0,
    )
    lr_norm: Number | None = key(
        "Peak rate of the norms.", derived="muon: 0.008; adamw: lr", example="0.005", gt=0.0, le=10.0
    )
    lr_scalar: Number | None = key(
        "Peak rate of swift's gates and scales.", derived="muon: 0.15; adamw: lr", example="0.5",
        gt=0.0, le=10.0,
    )  # fmt: skip
    weight_decay: Number = key(
        "Decay of the block matrices.",
        default=0.1,
        derived="0.28 by muon in pretraining; 0 in sft, rl and on loaded weights",
        example="0.1",
        ge=0.0,
        le=10.0,
    )
    beta1: Number = key("AdamW's first moment.", default=0.9, derived="0.8 beside muon", example="0.9", ge=0.0, lt=1.0)
    beta2: Number = key("AdamW's second moment.", default=0.95, example="0.99", ge=0.0, lt=1.0)
    eps: Number = key("AdamW's epsilon.", default=1e-8, derived="1e-10 beside muon", example="1e-8", gt=0.0, le=0.1)
    momentum: Number = key("Muon's momentum.", default=0.95, example="0.95", ge=0.0, lt=1.0)
    momentum_start: Number = key(
        "Muon's momentum at the first step, from where it grows over 300 steps; 0: as later.",
        default=0.85,
        example="0.85",
        ge=0.0,
        lt=1.0,
    )
    variance_beta: Number = key(
        "Muon's memory of how much each row of a matrix moves, by which rows are evened out (NorMuon); 0: off.",
        default=0.9,
        example="0.9",
        ge=0.0,
        lt=1.0,
    )
    cautious: Flag = key(
        "Muon's weight decay only where the step itself goes towards zero.",
        default=True,
        example="true",
    )
    clip: Number = key(
        "Largest norm of all gradients together; 0: no clipping.",
        default=1.0,
        derived="0.3 by muon in pretraining",
        example="1.0",
        ge=0.0,
    )
    schedule: Literal["wsd", "cosine", "constant"] = key(
        "wsd: warm up, stay, decay in a straight line. cosine: warm up, then half a cosine. constant: warm up, stay.",
        default="wsd",
        example="cosine",
    )
    warmup_steps: Count | None = key(
        "Steps over which the rate rises from zero.", derived="2% of the steps, at most 1000", example="100", ge=0
    )
    decay_fraction: Number | None = key(
        "wsd only: the last part of the phase, in which the rate falls.", derived="0.5", example="40%", ge=0.0, le=1.0
    )
    floor: Number | None = key(
        "The rate at the end as a share of the peak.", derived="wsd 0.05, cosine 0.1", example="0.1", ge=0.0, le=1.0
    )
    init_from: Text = key(
        "A checkpoint to start from: a folder here, or hf:OWNER/REPO/path on the Hub, which is fetched once (a commit:"
        " hf:OWNER/REPO@COMMIT/path).",
        default="",
        derived="the phase before",
        example="models/base",
    )
    recompute: Literal["none", "half", "all"] = key(
        "Activations computed again instead of kept, in every second block or in all: less memory, some speed.",
        default="none",
        example="all",
    )
    states: Literal["fp32", "int8"] = key("What AdamW's two moments are kept in.", default="fp32", example="int8")
    offload: Literal["none", "optimizer"] = key(
        "optimizer: its state lives in the host's memory and passes over the card in each step, which takes seconds;"
        " method full on CUDA cards only. The same results, and a run may go on with or without it.",
        default="none",
        example="optimizer",
    )
    data: PhaseData = Field(default_factory=PhaseData)
    lora: PhaseLora = Field(default_factory=PhaseLora)
    rl: PhaseRl = Field(default_factory=PhaseRl)
    eval: PhaseEval = Field(default_factory=PhaseEval)
    checkpoint: PhaseCheckpoint = Field(default_factory=PhaseCheckpoint)
    sample: PhaseSample = Field(default_factory=PhaseSample)
