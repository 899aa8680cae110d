"""What a phase may have of its own beside its length and rates: data, adapters, and the tasks of reinforcement."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from homing.config.kinds import Bytes, Count, Duration, Flag, Number, Switch, Text, Texts, Whole
from homing.config.section import Section, key

__all__ = ["ChatSource", "PhaseData", "PhaseLora", "PhaseRl", "RlTask"]


def _sources(value: Any) -> Any:
    """A path may stand by itself where nothing more is to be said of it."""
    listed = [value] if isinstance(value, (str, dict)) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


class ChatSource(Section):
    """One source of conversations in a mixture."""

    path: Text = key("A .jsonl file, a glob or a directory of them.", default="", example="chats/*.jsonl")
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
        "Conversations in .jsonl: messages, a list of messages, Alpaca or ShareGPT.",
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

    rank: Whole = key("Their inner size.", default=16, example="64", ge=1, le=4096)
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
    answer_tokens: Count = key("An answer longer than this is cut off.", default=256, example="128", ge=1, le=1_048_576)
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
