"""Reinforcement learning: questions -> samples from the current model -> rewards -> an update that favors good samples.

    number of rows consumed -> rollout number -> the rollout's questions and random draws; there is no other state, so
    a resumed run gets the same questions and draws

Evaluation measures pass@1 and pass@k on questions that are never used in training, always with the same draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from homing.errors import IntegrityError, UsageError
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder, lora
from homing.lm.model.frozen_linear import Adapter
from homing.lm.rl.calculator import Calculator
from homing.lm.rl.grpo import Experience, Policy, advantages, log_probs, rows_of, token_weights
from homing.lm.rl.named_random import draws
from homing.lm.rl.prompter import Prompter
from homing.lm.rl.questions import Order, Question
from homing.lm.rl.rl_metrics import Collapse, Graded, pass_at_k, summary
from homing.lm.rl.rollout import Sampler, lean_copy
from homing.lm.rl.tasks import Judging, open_task
from homing.lm.tokenizer import load_tokenizer
from homing.lm.train.compute.batch import Batch
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire import file_names
from homing.wire.run_json import Phase, Rl, Run

__all__ = ["Reinforce"]

SAMPLES = "samples.safetensors"  # file in a checkpoint that was saved between two updates on the same rollout


class Reinforce:
    evaluates_together = False

    def __init__(self, run: Run, phase: Phase, data_dir: Path) -> None:
        self.rl = check_settings(phase, run.model.context)
        self.seed, self.context, self.data_dir = run.seed, run.model.context, data_dir
        self.last_rollout = (phase.num_steps - 1) // self.rl.updates_per_rollout
        self.tokenizer = load_tokenizer(data_dir / file_names.TOKENIZER)
        prompter, room = Prompter(data_dir, self.tokenizer), self.context - self.rl.max_new_tokens
        self.tasks = [
            open_task(
                task, number, seed=run.seed, tokenizer=self.tokenizer, prompter=prompter, data_dir=data_dir, room=room
            )
            for number, task in enumerate(self.rl.tasks)
        ]
        kinds = [task.kind for task in self.rl.tasks]
        for number, asked in enumerate(self.tasks):
            # Number tasks of the same kind (arithmetic_1, arithmetic_2), so that each has its own metrics.
            if kinds.count(asked.name) > 1:
                asked.name += f"_{number + 1}"
        self.order = Order([task.weight for task in self.rl.tasks], seed=run.seed)
        self.stop_ids = prompter.stop_ids
        self.rows_per_step = self.rl.prompts_per_step * self.rl.samples_per_prompt
        self.held_out = self._held_out()
        self.can_evaluate = bool(self.held_out)
        self.start: Decoder | None = None  # the model with its initial weights, if all weights are trained
        self.start_adapters: dict[str, Adapter | None] = {}  # the initial adapters, if the base weights are frozen
        self.experience: Experience | None = None  # the current rollout, if the next update will reuse it
        self.notices: list[tuple[str, str]] = []
        self._sampler: Sampler | None = None

    # -- called by the training loop ----------------------------------------------------------------------------------

    def open_batches(
        self, model: Decoder, *, first_row: int, device: torch.device, rank: int = 0, num_ranks: int = 1
    ) -> RlBatches:
        if self.rl.prompts_per_step % num_ranks:
            raise UsageError(
                what=f"{self.rl.prompts_per_step} prompts cannot be divided evenly among {num_ranks} GPUs.",
                why="Each GPU must process the same number of prompts, with all samples of a prompt on the same GPU.",
                fix=f"Set prompts_per_step, under rl: in this phase, to a multiple of {num_ranks}.",
            )
        if self.rl.graphs == "on" and device.type != "cuda":
            raise UsageError(
                what="CUDA graphs are not available.",
                why=f"graphs: on requires CUDA, but this run generates its samples on {device.type}.",
                fix="Under rl: in this phase, set graphs: auto or graphs: off.",
            )
        if num_ranks > 1 and self.rl.updates_per_rollout > 1:
            raise UsageError(
                what="Several updates on the same set of samples are possible only on a single GPU.",
                why="A checkpoint saved between two of these updates must contain all samples,"
                " but each GPU has only its own share.",
                fix="Under rl: in this phase, set updates_per_rollout: 1, or train on one GPU.",
            )
        return RlBatches(self, model, first_row=first_row, device=device, rank=rank, num_ranks=num_ranks)

    def evaluate(self, model: Decoder, notify: Callable[[int, int], None], ranks: Ranks = ALONE) -> Evaluation:
        """Evaluate on held-out questions, on this rank alone.

        The loss is pass_reward minus the mean reward. If rewards are 0 or 1, that is 1 - pass@1.
        """
        repeats, at_a_time = self.rl.eval_samples, max(1, self.rows_per_step // self.rl.eval_samples)
        rewards: list[float | None] = []
        num_tokens = 0
        with self.judging() as judging:
            for start in range(0, len(self.held_out), at_a_time):
                part = self.held_out[start : start + at_a_time]
                drawn = [("eval", task, question.text, n) for task, question in part for n in range(repeats)]
                samples = self.sampler(model).sample(
                    [question.ids for _, question in part], self.drawn(drawn),
                    may_call=[self.tasks[task].has_calculator for task, _ in part],
                )  # fmt: skip
                rewards += judging.judge([asked for asked in part for _ in range(repeats)], samples)
                num_tokens += sum(len(sample.ids) for sample in samples)
                notify(min(start + at_a_time, len(self.held_out)), len(self.held_out))
        return self._evaluation(rewards, num_tokens)

    # -- extra state in checkpoints of this phase ---------------------------------------------------------------------

    def keep_start(self, model: Decoder) -> None:
        """Keep the initial weights for the KL term. On resume, call this before the checkpoint's weights are loaded."""
        if self.rl.kl and model.lora is not None:
            self.start_adapters = lora.adapters_now(model)
        elif self.rl.kl:
            self.start = lean_copy(model, torch.float32)

    def start_log_probs(self, model: Decoder, experience: Experience) -> Tensor | None:
        """Return the targets' log-probabilities under the phase's initial weights, or None if there is no KL term.

        Frozen base weights need no second copy: they are used with the initial adapters, or without adapters if the
        phase started with new ones.
        """
        if self.start is not None:
            return log_probs(self.start, experience)
        if not self.rl.kl:
            return None
        assert self.start_adapters, "call keep_start first"
        with lora.adapters_as(model, self.start_adapters):
            return log_probs(model, experience)

    def metadata_files(self) -> dict[str, bytes]:
        return {} if self.experience is None else {SAMPLES: self.experience.to_bytes()}

    def load_metadata_files(self, folder: Path) -> None:
        if (folder / SAMPLES).is_file():
            self.experience = Experience.from_bytes((folder / SAMPLES).read_bytes())

    # -- shared by training and evaluation ----------------------------------------------------------------------------

    def notify(self, kind: str, text: str) -> None:
        self.notices.append((kind, text))

    def judging(self) -> Judging:
        return Judging(
            self.tasks, self.rl, tokenizer=self.tokenizer, stop_ids=self.stop_ids, data_dir=self.data_dir,
            notify=self.notify,
        )  # fmt: skip

    def sampler(self, model: Decoder) -> Sampler:
        if self._sampler is None or self._sampler.model is not model:
            has_tools = any(task.has_calculator for task in self.tasks)
            self._sampler = Sampler(
                model, stop_ids=self.stop_ids, calculator=Calculator(self.tokenizer) if has_tools else None,
                max_new_tokens=self.rl.max_new_tokens, temperature=self.rl.temperature, top_k=self.rl.top_k,
                rows_at_a_time=self.rl.rollout_rows, graphs=self.rl.graphs, notify=self.notify,
            )  # fmt: skip
        return self._sampler

    def drawn(self, rows: Sequence[tuple[object, ...]]) -> NDArray[np.int64]:
        return np.stack([draws(self.rl.max_new_tokens, *name) for name in rows])

    def _held_out(self) -> list[tuple[int, Question]]:
        """Return held-out questions in proportion to the task weights, but at least one from each task that has any."""
        total = sum(task.weight for task in self.rl.tasks)
        counts = [max(1, round(self.rl.eval_prompts * task.weight / total)) for task in self.rl.tasks]
        return [
            (number, question)
            for number, (asked, count) in enumerate(zip(self.tasks, counts, strict=True))
            for question in asked.held_out(count)
        ]

    def _evaluation(self, rewards: list[float | None], num_tokens: int) -> Evaluation:
        k = self.rl.eval_samples
        groups = [[r for r in rewards[at : at + k] if r is not None] for at in range(0, len(rewards), k)]
        groups = [group for group in groups if group]
        passed = [sum(reward >= self.rl.pass_reward for reward in group) for group in groups]

        def mean(values: list[float]) -> float:
            return sum(values) / len(values) if values else 0.0

        reward = mean([reward for group in groups for reward in group])
        more = {
            "val_reward": reward,
            "val_pass_at_1": mean([n / len(group) for n, group in zip(passed, groups, strict=True)]),
            f"val_pass_at_{k}": mean(
                [pass_at_k(len(group), n, min(k, len(group))) for n, group in zip(passed, groups, strict=True)]
            ),
        }
        return Evaluation(
            loss=self.rl.pass_reward - reward, bits_per_byte=None, num_tokens=num_tokens, more=more, is_in_nats=False
        )


class RlBatches:
    """Yields one batch per update. A rollout is sampled when its first batch is requested, with the current weights."""

    def __init__(
        self, work: Reinforce, model: Decoder, *, first_row: int, device: torch.device, rank: int, num_ranks: int
    ) -> None:
        self._work, self._rl, self._model = work, work.rl, model
        self._step, self._device = first_row // work.rows_per_step, device
        self._rank, self._num_ranks = rank, num_ranks
        self._judging = work.judging()
        self._collapse = Collapse(work.rl.collapse_steps, work.notify)
        if work.start is not None:
            work.start = lean_copy(work.start, model.compute_dtype)
        for asked in work.tasks if self._step == 0 else []:
            if asked.num_too_long:
                text = f"Skipping {asked.num_too_long} questions from {asked.name} that do not fit in the context."
                work.notify("questions_left_out", text)

    def __enter__(self) -> RlBatches:
        self._judging.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._judging.__exit__(kind, error, at)

    def next(self) -> Batch:
        work, rl = self._work, self._rl
        number, update = divmod(self._step, rl.updates_per_rollout)
        if update == 0:
            experience, figures = self._sample(number)
        else:
            experience, figures = self._kept(number), {}
        is_reused = rl.updates_per_rollout > 1
        now_RT = log_probs(self._model, experience) if is_reused or rl.kl else None
        if update == 0:
            start_RT = work.start_log_probs(self._model, experience)
            experience = replace(experience, sampled_RT=now_RT if is_reused else None, start_RT=start_RT)
        weights_RT, of_weights = token_weights(
            experience.advantage_R.unsqueeze(1).expand_as(experience.targets_RT), experience.is_learned_RT,
            Policy(rl.clip_low, rl.clip_high, rl.kl), now_RT=now_RT, sampled_RT=experience.sampled_RT,
            start_RT=experience.start_RT,
        )  # fmt: skip
        self._step += 1
        # Drop the rollout as soon as no further update needs it, because it makes checkpoints larger.
        work.experience = experience if update + 1 < rl.updates_per_rollout else None
        said, work.notices = tuple(work.notices), []
        return Batch(
            experience.ids_RT, experience.targets_RT, experience.num_targets, weights_RT=weights_RT,
            figures=figures | of_weights, notices=said,
        )  # fmt: skip

    def _sample(self, number: int) -> tuple[Experience, dict[str, float]]:
        work, rl, begun = self._work, self._rl, time.perf_counter()
        repeats, mine = rl.samples_per_prompt, rl.prompts_per_step // self._num_ranks
        first = number * rl.prompts_per_step + self._rank * mine
        asked = []
        for prompt in range(first, first + mine):
            task, count = work.order.at(prompt)
            asked.append((task, work.tasks[task].draw(count)))
        drawn = [("sample", work.seed, prompt, n) for prompt in range(first, first + mine) for n in range(repeats)]
        samples = work.sampler(self._model).sample(
            [question.ids for _, question in asked], work.drawn(drawn),
            may_call=[work.tasks[task].has_calculator for task, _ in asked],
        )  # fmt: skip
        per_sample = [one for one in asked for _ in range(repeats)]
        sampled_s, begun = time.perf_counter() - begun, time.perf_counter()
        rewards = self._judging.judge(per_sample, samples)
        graded = [
            Graded(work.tasks[task].name, len(s.ids), s.is_ended, s.is_empty, s.entropy, reward)
            for (task, _), s, reward in zip(per_sample, samples, rewards, strict=True)
        ]
        figures = summary(self._gathered(graded), repeats, pass_reward=rl.pass_reward)
        self._collapse.look(figures)
        # Warn if no step had anything to learn from. This does not apply with a KL term, because it changes the weights
        # even if all rewards are equal.
        if number == work.last_rollout and not rl.kl:
            self._collapse.look_back()
        figures |= {"sampling_s": sampled_s, "judging_s": time.perf_counter() - begun}
        experience = rows_of(
            number, [question.ids for _, question in per_sample], samples,
            advantages(rewards, repeats, is_divided=rl.advantage == "std"), context=work.context, device=self._device,
        )  # fmt: skip
        return replace(experience, num_targets=self._summed(experience.num_targets)), figures

    def _kept(self, number: int) -> Experience:
        """Return the rollout of the previous update, which may come from the checkpoint."""
        kept = self._work.experience
        if kept is None or kept.number != number:
            raise IntegrityError(
                what=f"The checkpoint lacks the samples that step {self._step:,} needs.",
                why=f"It was saved between two updates on one set of samples, but {SAMPLES} is missing or contains "
                "a different set.",
                fix="Remove this checkpoint's folder; the run then resumes from the previous checkpoint.",
            )
        return kept.to(self._device)

    def _gathered(self, mine: list[Graded]) -> list[Graded]:
        """Return the graded samples of all ranks, in order, so that all ranks compute the same metrics and warnings."""
        if self._num_ranks == 1:
            return mine
        parts: list[list[Graded]] = [[] for _ in range(self._num_ranks)]
        dist.all_gather_object(parts, mine)
        return [one for part in parts for one in part]

    def _summed(self, count: int) -> int:
        if self._num_ranks == 1:
            return count
        total = torch.tensor(count, device=self._device)
        dist.all_reduce(total)
        return int(total)


# -- settings ----------------------------------------------------------------------------------------------------------

LEAST_PROMPT = 8  # minimum number of tokens that the context must leave for a question


def check_settings(phase: Phase, context: int) -> Rl:
    """Return the phase's rl settings; raise UsageError naming every invalid value.

    The settings were checked when run.json was written, but run.json may have been edited since.
    """
    rl = phase.rl
    if rl is None or not rl.tasks:
        raise UsageError(
            what="The rl phase has no tasks.",
            why="Its rl.tasks list is empty.",
            fix="Add a task under rl:, such as tasks: [{kind: arithmetic}]",
        )
    wrong = {
        "prompts_per_step must be 1 or more": rl.prompts_per_step < 1,
        "samples_per_prompt must be 2 or more, because samples are compared with each other": rl.samples_per_prompt < 2,
        f"answer_tokens must leave {LEAST_PROMPT} of the context's {context} tokens for the prompt": not (
            1 <= rl.max_new_tokens <= context - LEAST_PROMPT
        ),
        "temperature must be above 0": not 0 < rl.temperature < float("inf"),
        "top_k must be 0 or more": rl.top_k < 0,
        "advantage must be std or mean": rl.advantage not in ("std", "mean"),
        "kl must be 0 or more": rl.kl < 0,
        "updates_per_rollout must be 1 or more": rl.updates_per_rollout < 1,
        "clip_low must be between 0 and 1, and clip_high above 0": not (0 < rl.clip_low < 1 and rl.clip_high > 0),
        "eval_prompts and eval_samples must be 1 or more": min(rl.eval_prompts, rl.eval_samples) < 1,
        "rollout_rows must be 0 or more": rl.rollout_rows < 0,
        "graphs must be auto, on or off": rl.graphs not in ("auto", "on", "off"),
        "collapse_steps must be 2 or more": rl.collapse_steps < 2,
        "reward_timeout and reward_memory must be above 0": min(rl.reward_timeout_s, rl.reward_memory_bytes) <= 0,
    }
    problems = [text for text, is_wrong in wrong.items() if is_wrong]
    if problems:
        raise UsageError(
            what="The rl phase has invalid settings.",
            why="\n".join(problems),
            fix="Correct the invalid settings under rl: in this phase of the run file.",
        )
    return rl
