"""The training loop: reads a run directory, writes checkpoints and a trained model. Read it from top to bottom.

    train        every phase of run.json in turn; finished phases are skipped, an unfinished phase is resumed
    _Phase       one phase: set up -> step, step, step -> evaluate -> save
    _Phase.step  rows -> gradients -> clip -> one optimizer step, or none if not finite

`engine` adapts to the machine's limits; `apply_landing` ends training early to meet a deadline. The trainer does not
know whether the machine is rented. It reads run.json and control.json, writes the files of the run directory (see
docs/guides/life-of-a-run.md), and exits with 0 (done), 75 (stopped, with a checkpoint) or 1 (failed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from homing.errors import HomingError
from homing.lm.device import peak_flops
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.generate.chat_and_text import sample_texts, write_samples
from homing.lm.model import Decoder, lora
from homing.lm.tokenizer.tokenizer import lacks_turns
from homing.lm.train.apply_landing import LandingController
from homing.lm.train.build_phase import build, describe_start
from homing.lm.train.checkpoints import checkpoint_files
from homing.lm.train.checkpoints.checkpoint_files import TrainState
from homing.lm.train.checkpoints.manager import CheckpointManager
from homing.lm.train.compute.batch import Batch
from homing.lm.train.compute.engine import Engine, Figures
from homing.lm.train.distributed.ranks import ALONE, Ranks, joined_ranks
from homing.lm.train.distributed.shard_model import gathered_copy, release
from homing.lm.train.distributed.start_ranks import check_num_ranks, is_rank
from homing.lm.train.landing import Pace
from homing.lm.train.metrics import Journal, SilentJournal, finite
from homing.lm.train.open_session import Session, open_session, quiet_gc
from homing.lm.train.optim.param_groups import clip_gradients, state_bytes
from homing.lm.train.optim.schedule import lr_scale
from homing.lm.train.read_run_dir import called, locked, read_run, write_outcome
from homing.lm.train.stop_requests import ControlRequests, FatalError, Stop
from homing.units import format_bytes, format_count, format_duration
from homing.wire import file_names
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Phase, Sampling

__all__ = ["train"]

# device type -> how many steps late the host reads a step's metrics. On a GPU, the next step is queued before the host
# reads the metrics of the previous step.
LATE = {"cuda": 1}
_COPY_SHARE = 0.8  # share of free GPU memory that a copy of the model for sampling may take


def train(run_dir: Path, *, say: Callable[[str], None], requests: ControlRequests | None = None) -> Outcome:
    """Train as described in RUN_DIR/run.json; return the outcome. A failure is written to outcome.json and raised."""
    requests = requests or ControlRequests(run_dir)
    is_first = Ranks.from_env().is_first  # only the first rank writes files
    with locked(run_dir) if is_first else contextlib.nullcontext(), contextlib.ExitStack() as stack:
        journal = Journal(run_dir, say=say) if is_first else SilentJournal(run_dir, say=lambda line: None)
        work: _Phase | None = None
        try:
            run = read_run(run_dir)
            journal.writes_csv = run.train.writes_csv
            journal.phases = [phase.kind for phase in run.phases]
            requests.time_limit_s = run.train.time_limit_s
            if is_rank():
                check_num_ranks(run, Ranks.from_env().count)
            is_cuda = run.train.device in ("auto", "cuda") and torch.cuda.is_available()
            ranks = stack.enter_context(joined_ranks(is_cuda=is_cuda, run_dir=run_dir))
            session = open_session(run, run_dir, journal, requests, ranks)
            previous: Path | None = None
            stop: Stop | None = None
            for number, phase in enumerate(run.phases):
                work = _Phase(session, phase, previous, later=run.phases[number + 1 :])
                ended = work.train()
                stop = ended or stop
                if ended and not ended.is_landed:  # a landing leaves enough time for the later phases
                    break
                previous = work.final
            outcome = _ended(work, stop)
        except HomingError as error:
            error.name_run(called(run_dir))
            outcome = _failed(work, str(error), is_final=isinstance(error, FatalError))
            journal.event("run_failed", str(error), phase=outcome.phase, step=outcome.step)
            raise
        except BaseException as error:
            outcome = _failed(work, f"{type(error).__name__}: {error}", is_final=False)
            journal.event("run_failed", outcome.reason, phase=outcome.phase, step=outcome.step)
            raise
        finally:
            if is_first:
                write_outcome(run_dir, outcome)
            journal.close()
        return outcome


def _ended(work: _Phase | None, stop: Stop | None) -> Outcome:
    assert work is not None, "a run must have at least one phase"
    state, code = ("stopped", file_names.EXIT_STOPPED) if stop else ("done", file_names.EXIT_DONE)
    reason = stop.reason if stop else "Every phase is trained."
    kind, step = work.phase.kind, work.state.step
    text = reason
    if stop and stop.is_landed:  # the step and the reason have already been reported in a `landed` event
        text = "Every phase ended with a finished model, but not every phase trained for the planned number of steps."
    elif stop:
        text = f"Stopped at step {step:,}: {reason}"
    work.s.journal.event(f"run_{state}", text, phase=kind, step=step, **({"why": stop.kind} if stop else {}))
    return Outcome(state, reason, code, phase=kind, step=step, t=time.time(), is_final=stop is None or stop.is_limit)


def _failed(work: _Phase | None, reason: str, *, is_final: bool) -> Outcome:
    phase, step = (work.phase.kind, work.state.step) if work else ("", 0)
    return Outcome("failed", reason, file_names.EXIT_FAILED, phase=phase, step=step, t=time.time(), is_final=is_final)


@dataclasses.dataclass(frozen=True)
class _Due:
    """What the training loop must do after a step."""

    is_last: bool
    is_logged: bool
    is_evaluated: bool
    is_saved: bool


class _Timer:
    """Measures the seconds and tokens since the last logged step, excluding pauses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.restart()

    def restart(self) -> None:
        self._begun_at, self.num_tokens = time.perf_counter(), 0

    def pause(self) -> None:
        self.seconds = time.perf_counter() - self._begun_at

    def clear(self) -> None:
        self.num_tokens, self.seconds = 0, 0.0

    def resume(self) -> None:
        self._begun_at = time.perf_counter() - self.seconds


class _Phase:
    """Trains one phase, from its beginning or its newest valid checkpoint to its final checkpoint."""

    def __init__(self, session: Session, phase: Phase, previous: Path | None, later: list[Phase]) -> None:
        self.s, self.phase, self.later = session, phase, later
        self.previous = previous  # final checkpoint of the previous phase
        self.checkpoints = CheckpointManager(session, phase, self._event)
        self.final: Path | None = None
        self.state = TrainState(phase=phase.kind, step=0, num_tokens=0, rows_consumed=0)
        self.evaluation: Evaluation | None = None  # the evaluation at the current step, if there was one
        self.scale = 0.0  # learning rate of the last step, as a fraction of the peak
        self.begun_at = 0.0  # when the current step began
        self.is_plain_reported = False  # whether the warning about plain-text samples has been printed
        self.is_skip_reported = False  # whether it has been reported that no samples are generated
        self.is_slow_reported = False  # whether a failure of CUDA graphs in sampling has been reported
        self.unread: deque[Figures] = deque()  # metrics of steps that the device may still be computing
        self.figures = Figures.none()  # metrics of the most recent step whose metrics have been read

    # -- main flow ---------------------------------------------------------------------------------------------------

    def train(self) -> Stop | None:
        with self.s.journal.still("loading", "checking checkpoints", phase=self.phase.kind):
            found = self.checkpoints.find()
        if found and found.is_final and (found.step >= self.phase.num_steps or self._has_later_begun()):
            self.final = self.checkpoints.folder(found.step)
            self.checkpoints.repair(found)
            self.state = dataclasses.replace(self.state, step=found.step, num_tokens=found.num_tokens)
            self._event("phase_skipped", f"Phase {self.phase.kind} is already trained: {self.final.name}.", notice=True)
            return None
        with self.s.journal.still("loading", "loading the model", phase=self.phase.kind):
            self._set_up()
            if found:
                self.state = self.checkpoints.load(found, self.built)
        self._forget_metrics_past(self.state.step, is_resumed=found is not None)
        is_landed, self.state = self.s.ranks.agree(self.landing_controller.resume(self.state))
        if is_landed:
            return self._landed()
        self.engine.settle(self.state.choices)
        self.state = dataclasses.replace(self.state, choices=self.engine.choices)
        self._event("phase_started", self._describe(), notice=True, num_steps=self.phase.num_steps)
        if not self.work.can_evaluate:
            text = "No held-out text, so nothing is evaluated and no checkpoint is marked as best."
            self._event("not_evaluated", text, notice=True)
        return self._take_steps()

    def _take_steps(self) -> Stop | None:
        """Train from the current step to the end. Between steps, log, evaluate, save, sample or stop."""
        first_step, timer = self.state.step, _Timer()
        batches = self.work.open_batches(
            self.model, first_row=self.state.rows_consumed, device=self.s.device,
            rank=self.s.ranks.rank, num_ranks=self.s.ranks.count,
        )  # fmt: skip
        with batches, self.checkpoints, quiet_gc() as settle_gc:
            while self.state.step < self.end_step:
                # One step: queue it on the device, and read the metrics of earlier steps.
                is_first, self.begun_at = self.state.step == first_step, time.monotonic()
                take = self._first_step if is_first else self.step
                self.unread.append(take(batches.next()))
                self._count_step()
                timer.num_tokens += self.phase.batch_tokens
                self._read_figures(0 if is_first else LATE.get(self.s.device.type, 0), is_paced=not is_first)
                self._settle_save()

                # Decide what to do after this step. The first rank decides whether to stop or to end training earlier.
                stop = self._decide()
                due = self._due(stop)
                if is_first and self.engine.is_first_longer:
                    timer.restart()  # exclude the first step, because one-time compilation would distort the speed
                if due.is_logged or due.is_evaluated or due.is_saved:
                    self._read_figures(0)

                # Time spent on evaluating, logging, saving and sampling is excluded from the next logged speed.
                timer.pause()
                self.evaluation = self._evaluate() if due.is_evaluated else None
                if due.is_logged or due.is_evaluated:
                    self._log(self.figures, timer.num_tokens, timer.seconds)
                    timer.clear()
                if due.is_saved:
                    self._save(is_needed=due.is_last or stop is not None)
                if stop:
                    return stop
                if (self.s.ranks.is_first or self.model.shards) and self._is_sample_due():
                    self._sample()
                if is_first:
                    settle_gc()
                timer.resume()
        return self._finish()

    def step(self, batch: Batch) -> Figures:
        """Take one optimizer step; return its loss and gradient norm.

        If they are not finite, the device leaves weights and optimizer state unchanged. The host finds out later,
        when it reads the metrics; this method never waits for the device.
        """
        self.scale = lr_scale(
            self.phase.schedule, self.state.step, self.phase.num_steps, self.state.landing, self.state.warm_from
        )
        for kind, text in batch.notices:
            self._event(kind, text, notice=True)
        total = self.engine.gradients(batch, self.state.step)
        norm = clip_gradients(self.model, self.phase.optimizer.clip)
        is_good = torch.isfinite(total) & torch.isfinite(norm)
        self.engine.update(self.scale, is_good, self.state.step)
        self.optimizer.zero_grad()
        return Figures(self.state.step + 1, torch.stack([total, norm]), self.begun_at, batch.figures)

    def _first_step(self, batch: Batch) -> Figures:
        return self.engine.first_step(lambda: self.step(batch), batch)

    def _count_step(self) -> None:
        self.state = dataclasses.replace(
            self.state,
            step=self.state.step + 1,
            num_tokens=self.state.num_tokens + self.phase.batch_tokens,
            rows_consumed=self.state.rows_consumed + self.work.rows_per_step,
            choices=self.engine.choices,
        )

    def _due(self, stop: Stop | None) -> _Due:
        """Return what to do after this step.

        All ranks evaluate together, except in rl. Only the first rank saves, while the others wait. If the model is
        divided among the ranks, all of them save, when the first one says so.
        """
        step, is_last, is_first_rank = self.state.step, self.state.step >= self.end_step, self.s.ranks.is_first
        # A stop may be due to a preemption with only seconds left: save a checkpoint, and skip the evaluation.
        is_evaluated = self.work.can_evaluate and (is_last or (self._is_eval_due() and not stop))
        due = _Due(
            is_last=is_last,
            is_logged=step % max(1, self.s.run.train.log_every) == 0 or is_last,
            is_evaluated=is_evaluated and (is_first_rank or self.work.evaluates_together),
            is_saved=is_first_rank and (is_last or stop is not None or self._is_save_due()),
        )
        return due if self.model.shards is None else self.s.ranks.agree(due)

    def _finish(self) -> Stop | None:
        self.final = self.checkpoints.folder(self.state.step)
        if self.state.landing and self.state.step < self.phase.num_steps:
            return self._landed()
        self._event("phase_done", f"Phase {self.phase.kind} is trained: {self.state.step:,} steps.", notice=True)
        return None

    # -- setting up --------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self.built = built = build(self.s, self.phase, self.previous)
        self.work, self.model, self.optimizer = built.work, built.model, built.optimizer
        if built.start:
            self._event(
                "weights_loaded", f"Starting from the weights of {describe_start(self.s, built.start)}.", notice=True
            )
        if built.parallel_reason:
            self._event("parallel_picked", built.parallel_reason, notice=True, parallel=built.parallel)
        if self.model.lora is not None:
            self._event("adapters_added", lora.describe(self.model), notice=True)
        if built.optimizer.place.is_away:
            held = format_bytes(state_bytes(self.model, self.phase.optimizer))
            text = f"The optimizer state ({held}) is in host memory and is streamed through the GPU in each step."
            self._event("state_offloaded", text, notice=True)
        num_texts = max(1, len(self._sampling().prompts))
        self.pace = Pace(
            self.phase,
            checkpoint_bytes=built.checkpoint_bytes,
            can_evaluate=self.work.can_evaluate,
            sampled_layers=num_texts * self.s.run.sampling.num_tokens * self.model.shape.num_layers,
            rates=self.s.rates,
        )
        self.landing_controller = LandingController(self.phase, self.later, self.pace, self.s.requests, self._event)
        self.engine = Engine(self.s, self.phase, built, self._event)

    def _forget_metrics_past(self, step: int, *, is_resumed: bool) -> None:
        """Remove the metrics of steps after the checkpoint: they will be trained again and must not appear twice."""
        kinds = [phase.kind for phase in self.s.run.phases]
        later = set(kinds[kinds.index(self.phase.kind) + 1 :])
        num_cut = self.s.journal.cut_metrics(
            lambda m: m.phase not in later and (m.phase != self.phase.kind or m.step <= step)
        )
        if is_resumed:
            self._event("resumed", f"Resumed at step {step:,}.", notice=True, num_metrics_cut=num_cut)

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def end_step(self) -> int:
        return self.state.landing.end_step if self.state.landing else self.phase.num_steps

    def _decide(self) -> Stop | None:
        """Update the step at which training ends; return a reason to stop now, or None. Rank 0 decides for all."""
        stop = None
        if self.s.ranks.is_first:
            self.state = self.landing_controller.look(self.state)
            if self.state.step < self.end_step:
                stop = self.s.requests.stop(save_s=self._next_s())
        landing, warm_from, stop = self.s.ranks.agree((self.state.landing, self.state.warm_from, stop))
        self.state = dataclasses.replace(self.state, landing=landing, warm_from=warm_from)
        return stop

    def _landed(self) -> Stop:
        self.final = self.checkpoints.folder(self.state.step)
        return self.landing_controller.landed(self.state.step)

    def _has_later_begun(self) -> bool:
        """Return whether a later phase has checkpoints.

        If so, a phase that has landed is not continued, because that would discard the later phase.
        """
        folders = [self.s.run_dir / file_names.CHECKPOINTS / other.kind for other in self.later]
        return any(checkpoint_files.list_steps(folder) for folder in folders)

    # -- between steps -----------------------------------------------------------------------------------------------

    def _read_figures(self, num_unread: int, *, is_paced: bool = True) -> None:
        """Read the metrics of all steps except the last `num_unread`, waiting for the device if necessary."""
        while len(self.unread) > num_unread:
            figures = self.unread.popleft()
            figures.read()
            if is_paced:
                # Measure from the start of the step, or from the end of the previous step if that was later.
                self.pace.step(figures.read_at - max(figures.begun_at, self.figures.read_at))
            self.figures = figures
            self._count_bad(figures)

    def _count_bad(self, figures: Figures) -> None:
        if figures.is_finite:
            if self.state.num_bad_in_a_row:
                self.state = dataclasses.replace(self.state, num_bad_in_a_row=0)
            return
        in_a_row, limit = self.state.num_bad_in_a_row + 1, self.s.run.train.max_bad_steps
        self.state = dataclasses.replace(self.state, num_skipped=self.state.num_skipped + 1, num_bad_in_a_row=in_a_row)
        what = "loss" if not math.isfinite(figures.loss) else "gradient"
        text = f"Step {figures.step:,} skipped: its {what} is not finite ({in_a_row} of {limit} in a row)."
        self._event("step_skipped", text, notice=True, num_skipped=self.state.num_skipped)
        if in_a_row >= limit:
            raise FatalError(
                what=f"Training stopped at step {figures.step:,}, "
                f"because the loss or gradient was not finite for {in_a_row} steps in a row.",
                why=f"The {what} is NaN or infinite. The weights are still those from the last good step.",
                fix="Lower this phase's learning rate (lr) or lengthen its warmup. Earlier checkpoints are still good.",
            )

    @property
    def _flops_per_token(self) -> float:
        """FLOPs per token, used for the MFU. Frozen weights need no gradient, so their matmuls cost a third less."""
        sizes = self.s.run.sizes
        return sizes.flops_per_token - (2 * sizes.num_matmul_params if self.model.lora is not None else 0)

    def _log(self, figures: Figures, num_tokens: int, seconds: float) -> None:
        rate = num_tokens / seconds if num_tokens and seconds > 0 else None
        peak = peak_flops(self.s.device)
        val = self.evaluation
        metric = Metric(
            t=time.time(),
            phase=self.phase.kind,
            step=self.state.step,
            num_steps=self.phase.num_steps,
            num_tokens=self.state.num_tokens,
            loss=finite(figures.loss),
            lr=self.phase.optimizer.lr * self.scale,
            grad_norm=finite(figures.norm),
            tokens_per_s=rate,
            mfu=rate * self._flops_per_token / peak if rate and peak else None,
            step_s=self.phase.batch_tokens / rate if rate else None,
            memory_bytes=torch.cuda.max_memory_allocated(self.s.device) if self.s.device.type == "cuda" else None,
            val_loss=finite(val.loss) if val else None,
            val_bits_per_byte=finite(val.bits_per_byte) if val else None,
            val_perplexity=finite(val.perplexity) if val else None,
            end_step=self.state.landing.end_step if self.state.landing else None,
            eta_s=self.pace.to_go_s(self.state.step, self.end_step),
            plan_s=self.pace.to_go_s(self.state.step, self.phase.num_steps) if self.state.landing else None,
            more={**figures.more, **(val.more if val else {})},
        )
        self.s.journal.metric(metric)
        if self.s.requests.problem:
            self._event("control_unreadable", f"control.json cannot be read: {self.s.requests.problem}", notice=True)
            self.s.requests.problem = ""

    def _evaluate(self) -> Evaluation:
        def notify(done: int, of: int) -> None:
            self._event("evaluating", f"Evaluating: {done:,} of {of:,} rows.")

        begun = time.monotonic()
        evaluation = self.work.evaluate(self.model, notify, self.s.ranks if self.work.evaluates_together else ALONE)
        release(self.model)
        seconds = time.monotonic() - begun
        self.pace.evaluated(seconds)
        text = f"Evaluated on {evaluation.num_tokens:,} tokens in {format_duration(seconds)}."
        self._event("evaluated", text, seconds=round(seconds, 3))
        return evaluation

    def _next_s(self) -> float:
        """Return how many seconds from now a checkpoint would be on disk if the next check requested a stop."""
        num_saves = 2 if self.checkpoints.is_saving else 1  # a save in progress must finish before another can begin
        return num_saves * self.pace.save_s + self.pace.last_step_s + (self.pace.eval_s if self._is_eval_due() else 0.0)

    def _is_eval_due(self) -> bool:
        """Return whether to evaluate now.

        The result is also True before a planned checkpoint, because only an evaluated checkpoint can become the best.
        """
        every = self.phase.eval_every
        return every > 0 and (self.state.step % every == 0 or self._is_save_planned())

    def _is_save_planned(self) -> bool:
        return self.phase.save_every > 0 and self.state.step % self.phase.save_every == 0

    def _is_save_due(self) -> bool:
        by_time = (
            self.phase.save_every_s > 0 and time.monotonic() - self.checkpoints.saved_at >= self.phase.save_every_s
        )
        return self._is_save_planned() or by_time

    def _save(self, *, is_needed: bool) -> None:
        is_final, begun = self.state.step >= self.end_step, time.monotonic()
        self.checkpoints.save(self.state, self.built, self.evaluation, is_final=is_final, is_needed=is_needed)
        if not is_needed:
            self.pace.held(time.monotonic() - begun)
        self._settle_save()

    def _settle_save(self) -> None:
        self.checkpoints.settle()
        if self.checkpoints.took_s is not None:
            self.pace.saved(self.checkpoints.took_s)
            self.checkpoints.took_s = None

    def _is_sample_due(self) -> bool:
        if self.phase.sample_every > 0:
            return self.state.step % self.phase.sample_every == 0 or self.state.step >= self.end_step
        return self.checkpoints.saved_step == self.state.step

    def _sample(self) -> None:
        """Generate samples for people to read. A failure is reported, but does not end the run."""
        step, begun = self.state.step, time.monotonic()
        is_chat = self.phase.kind == "rl" or (self.phase.data is not None and self.phase.data.kind == "chat")
        missing = lacks_turns(self.s.tokenizer.specials) if is_chat else []
        if missing and not self.is_plain_reported:
            self.is_plain_reported = True
            text = (
                f"warning: the tokenizer has no {' and no '.join(missing)}: {self.phase.kind} samples continue the"
                " prompt as plain text and do not answer it. `homing chat` uses the template stored with the weights."
            )
            self._event("samples_plain", text, notice=True)
        try:
            with self.s.journal.still("sampling", "sampling", phase=self.phase.kind):
                asked, seed = self._sampling(), self.s.run.seed + step
                model = self.model if self.model.shards is None else self._whole_model()
                if model is None:
                    return
                texts = sample_texts(
                    model, self.s.tokenizer, asked, seed=seed, is_chat=is_chat, notify=self._sampling_is_slow
                )
            path = write_samples(self.s.run_dir, self.phase.kind, step, texts)
        except (HomingError, OSError, RuntimeError) as error:
            self._event("sample_failed", f"warning: sampling at step {step:,} failed: {error}", notice=True)
            return
        seconds = time.monotonic() - begun
        self.pace.sampled(seconds)
        where = str(path.relative_to(self.s.run_dir))
        self._event("sampled", texts[0][0] + texts[0][1], path=where, seconds=round(seconds, 3))

    def _whole_model(self) -> Decoder | None:
        """Return an undivided copy of the model on the first rank, if its memory has room for one; else None."""
        needed = self.s.run.sizes.num_params * self.model.compute_dtype.itemsize
        is_cuda = self.s.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.s.device)[0] if is_cuda else None
        if not self.s.ranks.agree(free is None or needed < _COPY_SHARE * free):
            text = f"No samples: a copy of the whole model ({format_bytes(needed)}) does not fit on one GPU."
            self._event("samples_skipped", text, notice=not self.is_skip_reported)
            self.is_skip_reported = True
            return None
        return gathered_copy(self.model, is_kept=self.s.ranks.is_first)

    def _sampling_is_slow(self, text: str) -> None:
        if not self.is_slow_reported:
            self.is_slow_reported = True
            self._event("graphs_failed", text, notice=True)

    def _sampling(self) -> Sampling:
        sampling = self.s.run.sampling
        return dataclasses.replace(sampling, prompts=self.phase.sample_prompts or sampling.prompts)

    def _event(self, kind: str, text: str, *, notice: bool = False, step: int | None = None, **data: object) -> None:
        """Emit an event for this phase, at the given step (by default the current one)."""
        notify = self.s.journal.notice if notice else self.s.journal.event
        notify(kind, text, phase=self.phase.kind, step=self.state.step if step is None else step, **data)

    def _describe(self) -> str:
        params = format_count(self.s.run.sizes.num_params)
        tokens = format_count(self.phase.num_steps * self.phase.batch_tokens)
        chosen = self.state.choices
        compiled = "compiled" if self.engine.compiling.is_on else "eager"
        return (
            f"Phase {self.phase.kind}: {params} parameters, {tokens} tokens in {self.phase.num_steps:,} steps, "
            f"{chosen['precision']}, {compiled}, {self.engine.micro_batch} of {self.engine.num_rows} rows at a time."
        )
