"""Validates the settings of an rl phase where they are used: run.json may have been edited."""

from __future__ import annotations

from homing.errors import UsageError
from homing.wire.run_json import Phase, Rl

__all__ = ["LEAST_PROMPT", "check_settings"]

LEAST_PROMPT = 8  # minimum number of tokens of a question


def check_settings(phase: Phase, context: int) -> Rl:
    """Return the settings; raises UsageError naming every invalid value."""
    rl = phase.rl
    if rl is None or not rl.tasks:
        raise UsageError(
            what="The rl phase has no tasks.",
            why="Its list rl.tasks is empty.",
            fix="Add a task, such as tasks: [{kind: arithmetic}]",
        )
    wrong = {
        "prompts_per_step must be 1 or more": rl.prompts_per_step < 1,
        "samples_per_prompt must be 2 or more, because samples are compared with each other": rl.samples_per_prompt < 2,
        f"answer_tokens must leave {LEAST_PROMPT} of the context's {context} tokens for the prompt": not (
            1 <= rl.max_new_tokens <= context - LEAST_PROMPT
        ),
        "temperature must be over 0": not 0 < rl.temperature < float("inf"),
        "top_k must be 0 or more": rl.top_k < 0,
        "advantage must be std or mean": rl.advantage not in ("std", "mean"),
        "kl must be 0 or more": rl.kl < 0,
        "updates_per_rollout must be 1 or more": rl.updates_per_rollout < 1,
        "clip_low must be between 0 and 1, and clip_high over 0": not (0 < rl.clip_low < 1 and rl.clip_high > 0),
        "eval_prompts and eval_samples must be 1 or more": min(rl.eval_prompts, rl.eval_samples) < 1,
        "rollout_rows must be 0 or more": rl.rollout_rows < 0,
        "graphs must be auto, on or off": rl.graphs not in ("auto", "on", "off"),
        "collapse_steps must be 2 or more": rl.collapse_steps < 2,
        "reward_timeout and reward_memory must be over 0": min(rl.reward_timeout_s, rl.reward_memory_bytes) <= 0,
    }
    problems = [text for text, is_wrong in wrong.items() if is_wrong]
    if problems:
        raise UsageError(
            what="Invalid settings of the rl phase.",
            why="\n".join(problems),
            fix="Change rl: in the phase of the run file.",
        )
    return rl
