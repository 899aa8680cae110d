"""A home with nine runs that differ, as a person has them after some weeks, for browser tests and pictures.

    fill_home(path, now)             running, done, failed and stopped; rented and local; one or two phases; one with rl
    fill_many(path, number, now)     many small local runs, for the benchmark
    QuietBoard(path)                 what the dashboard shows of it

All curves are made up by formulas with a fixed seed, so that every run of a test or script sees the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.cloud.rig import make_run
from tests.web.dashboard_rig import add, make_home

from homing.api.lookup.local_runs import STARTED
from homing.api.pages.dashboard_overview import Board, _Money
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Metric, Outcome
from homing.wire.run_json import Cloud, Limits, Model, Run, Sampling, Schedule, Sizes

__all__ = ["DIVERGED", "DONE", "LIVE", "RESUMED", "RL", "QuietBoard", "fill_home", "fill_many"]

PROMPTS = ["Once upon a time", "The capital of Germany is"]
TEXTS = (
    "the the of and in a to was of the in",
    "there was a small house, and in the house there was a small was",
    "there lived a miller at the edge of the forest, who had three sons and a cat.",
)


@dataclass(frozen=True)
class Plan:
    """What one run of the home is to look like."""

    id: str
    state: str = "done"
    phases: tuple[tuple[str, int], ...] = (("pretrain", 1200),)  # kind and planned steps
    reached: float = 1.0  # share of the last phase that is trained
    hours_ago: float = 30.0
    minutes: float = 90.0
    offer: tuple[str, str, str] | None = ("runpod", "H100 SXM", "2.49")  # None: trained on this computer
    limit: str = "12.00"
    num_params: int = 75_000_000
    family: str = "stock"
    lr: float = 6e-4
    batch_tokens: int = 131_072
    low: float = 3.1  # the loss it approaches
    preset: str = "goethe-75m"
    project: str = "goethe"
    reason: str = ""
    exit_code: int = 0
    log_tail: str = ""
    interrupted_at: float | None = None  # share of the run after which the machine was lost
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.id.rsplit("-", 3)[0]


LIVE, RL, DIVERGED = (
    "goethe-deep-20260114-101500-4e1f",
    "math-rl-20260110-080000-77aa",
    "goethe-hot-20260112-140000-90cd",
)
DONE, RESUMED = "goethe-base-20260111-090000-b2c3", "goethe-swift-20260113-120000-5d5e"
_OOM = """Traceback (most recent call last):
  File "homing/lm/train/loop.py", line 214, in train
    loss = self.model.loss(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.
GPU 0 has a total capacity of 23.52 GiB of which 1.20 GiB is free."""
_NAN = "Training stopped at step 402, because the loss or gradient was not finite for 10 steps in a row."

PLANS = (
    Plan(
        LIVE,
        "running",
        (("pretrain", 1200), ("sft", 300)),
        0.62,
        1.4,
        79,
        low=2.85,
        num_params=124_000_000,
        lr=4e-4,
        preset="gpt-124m",
    ),
    Plan(
        "goethe-wide-20260114-093000-1b2c",
        "running",
        reached=0.3,
        hours_ago=0.9,
        minutes=49,
        limit="8.00",
        low=3.05,
        num_params=98_000_000,
        lr=8e-4,
        offer=("shadeform", "A100 80GB", "1.35"),
    ),
    Plan(
        RESUMED,
        "done",
        (("pretrain", 1200), ("sft", 300)),
        family="swift",
        hours_ago=22,
        minutes=130,
        low=2.95,
        interrupted_at=0.45,
    ),
    Plan(
        DIVERGED,
        "failed",
        hours_ago=46,
        minutes=31,
        reached=0.335,
        lr=3e-3,
        reason=_NAN,
        exit_code=1,
        low=3.3,
        log_tail=f"step 400/1,200 | loss 9.731 | lr 3.0e-03\nwarning: step 401 skipped\nerror: {_NAN}",
    ),
    Plan(
        DONE,
        "done",
        (("pretrain", 1200), ("sft", 300)),
        hours_ago=73,
        minutes=118,
        offer=("aws", "g6.xlarge", "0.80"),
        limit="5.00",
    ),
    Plan(
        RL,
        "done",
        (("sft", 200), ("rl", 240)),
        hours_ago=98,
        minutes=160,
        limit="15.00",
        low=1.4,
        num_params=494_000_000,
        lr=1e-5,
        preset="",
        project="arithmetic",
        batch_tokens=32_768,
    ),
    Plan(
        "medium-22m-20260109-160000-0f0f",
        "failed",
        (("pretrain", 800),),
        0.02,
        120,
        6,
        ("shadeform", "RTX 4090", "0.44"),
        "2.00",
        22_000_000,
        preset="medium-22m",
        reason="Out of memory: CUDA tried to allocate 3.91 GiB.",
        exit_code=1,
        log_tail=_OOM,
    ),
    Plan(
        "shakespeare-20260108-120000-3c4d",
        "done",
        (("pretrain", 500),),
        hours_ago=150,
        minutes=26,
        offer=None,
        num_params=3_000_000,
        preset="shakespeare",
        project="play",
        batch_tokens=8192,
        low=1.9,
    ),
    Plan(
        "tiny-20260107-110000-aa11",
        "stopped",
        (("pretrain", 300),),
        0.4,
        170,
        4,
        None,
        num_params=800_000,
        preset="tiny",
        project="play",
        batch_tokens=4096,
        low=2.6,
        reason="Stopped from another terminal.",
    ),
)


class QuietBoard(Board):
    """A board that asks no provider, because those of this home are not reachable. Nothing else bills here."""

    def _ask(self) -> float:
        self._money = _Money(self._world.now())
        return 60.0


def fill_home(path: Path, now: float) -> Home:
    home = make_home(path)
    for plan in PLANS:
        _make(home, plan, now)
    return home


def fill_many(path: Path, number: int, now: float, *, num_steps: int = 200) -> list[str]:
    """Local runs with a few lines each, as quick to make as possible. Returns their ids."""
    home, ids = make_home(path), []
    for at in range(number):
        plan = Plan(
            f"run{at:03d}-20260101-120000-{at:04x}",
            hours_ago=200 + at,
            minutes=20,
            offer=None,
            low=2 + at % 7 / 10,
            phases=(("pretrain", num_steps),),
            lr=1e-4 * (1 + at % 5),
            preset=("tiny", "goethe-75m")[at % 2],
        )
        _make(home, plan, now, num_samples=0)
        ids.append(plan.id)
    return ids


def _make(home: Home, plan: Plan, now: float, num_samples: int = 6) -> None:
    began = now - plan.hours_ago * 3600
    store = home.path if plan.offer is None else home.path / "store"
    folder, here = store / "runs" / plan.id, home.path / "runs" / plan.id
    for each in (folder / file_names.LOGS, folder / file_names.SAMPLES, here):
        each.mkdir(parents=True, exist_ok=True)
    run = _run_json(home, plan)
    (here / file_names.RUN).write_text(codec.dumps(run))
    (here / file_names.RUN_FILE).write_text(f"# {plan.preset}: made from a preset\n" if plan.preset else "")
    (here / PROJECT_NOTE).write_bytes(project_note(f"/home/me/{plan.project}"))
    metrics = _metrics(plan, began)
    ended = metrics[-1].t + 40
    add(folder, file_names.METRICS, *metrics)
    add(folder, file_names.EVENTS, *_events(plan, began, metrics))
    (folder / file_names.LOGS / "trainer.log").write_text(_log(plan, metrics))
    _samples(folder / file_names.SAMPLES, plan, metrics, num_samples)
    if plan.state != "running":
        outcome = Outcome(
            plan.state,
            plan.reason or "All phases are trained.",
            plan.exit_code,
            metrics[-1].phase,
            metrics[-1].step,
            ended,
            log_tail=plan.log_tail,
        )
        (folder / file_names.OUTCOME).write_text(codec.dumps(outcome))
        if num_samples and (plan.state == "done" or plan.id == DIVERGED):
            _checkpoint(folder, plan, metrics[-1])
    if plan.offer is None:
        _start_here(folder, plan, began)
    else:
        _rent(home, plan, folder, began, ended, metrics[-1], now)


def _run_json(home: Home, plan: Plan) -> Run:
    made = make_run(home.path / "made", plan.name, limits=Limits(spend_usd=plan.limit))
    optimizer = dataclasses.replace(made.phases[0].optimizer, lr=plan.lr)
    phases = [
        dataclasses.replace(
            made.phases[0],
            kind=kind,
            num_steps=steps,
            batch_tokens=plan.batch_tokens,
            optimizer=optimizer,
            method="lora" if kind == "sft" and plan.family == "stock" else "full",
            schedule=Schedule("cosine" if plan.family == "swift" else "wsd", 60, steps // 5, 0.1),
        )
        for kind, steps in plan.phases
    ]
    width = 64 * round(math.sqrt(plan.num_params / 12) ** (2 / 3) / 16 + 2)
    model = Model(plan.family, "llama", 12, width, 12, 12, 64, width * 4, 1024, 32768, True)
    return dataclasses.replace(
        made,
        id=plan.id,
        phases=phases,
        model=model,
        sampling=Sampling(PROMPTS),
        sizes=Sizes(plan.num_params, plan.num_params * 9 // 10, plan.num_params * 6.0),
        cloud=Cloud([plan.offer[0]] if plan.offer else ["local"], gpu=plan.offer[1] if plan.offer else ""),
        origin={"model.width": "derived from model.depth", "phases.0.optimizer.lr": "run file"},
    )


def _metrics(plan: Plan, began: float) -> list[Metric]:
    chance = random.Random(plan.id).gauss
    done = [steps for _, steps in plan.phases]
    done[-1 if plan.state != "running" else 0] = int(done[-1 if plan.state != "running" else 0] * plan.reached)
    phases = plan.phases if plan.state != "running" else plan.phases[:1]
    total, seen, found = sum(done[: len(phases)]), 0, list[Metric]()
    step_s = plan.minutes * 60 / total
    for (kind, planned), num_steps in zip(phases, done, strict=False):
        low = plan.low * (0.55 if kind == "sft" else 1)
        for step in range(2, num_steps + 1, 2):
            share, seen = step / planned, seen + 2
            lost = plan.interrupted_at is not None and seen / total > plan.interrupted_at
            lr = plan.lr * min(1, step / 60) * (1 if share < 0.8 else max(0.1, (1 - share) / 0.2))
            loss = (
                low
                + (10.4 - low) * math.exp(-step / (planned * 0.045))
                + 0.9 * math.exp(-share * 2.2)
                + chance(0, 0.045)
            )
            if plan.id == DIVERGED and step > 330:
                loss += (step - 330) ** 2 / 900
            speed = plan.batch_tokens / step_s * (1 + chance(0, 0.01))
            is_rented = plan.offer is not None
            val = step % 60 == 0 or step >= num_steps - 1
            more: dict[str, float] = {}
            if kind == "rl":
                reward = 0.72 / (1 + math.exp(-(step - 90) / 32)) + 0.08
                more = {
                    "reward": reward + chance(0, 0.03),
                    "length": 180 - 70 * share + chance(0, 6),
                    "entropy": 1.2 - 0.6 * share,
                }
                more |= {"val_reward": reward - 0.03, "val_pass_at_1": reward - 0.05} if val else {}
            held_out = loss + 0.06 + chance(0, 0.01) if kind != "rl" else 1 - more.get("val_reward", 0.0)
            found.append(
                Metric(
                    began + 240 + seen * step_s + (900 if lost else 0),
                    kind,
                    step,
                    planned,
                    step * plan.batch_tokens,
                    loss=loss,
                    lr=lr,
                    grad_norm=abs(0.45 + 2.2 * math.exp(-step / 40) + chance(0, 0.05)),
                    tokens_per_s=speed,
                    mfu=0.43 + chance(0, 0.006) if is_rented else None,
                    memory_bytes=int(31.4e9) if is_rented else None,
                    step_s=step_s,
                    val_loss=held_out if val else None,
                    val_bits_per_byte=held_out / 3.05 if val and kind != "rl" else None,
                    more=more,
                    eta_s=(planned - step) * step_s,
                )
            )
    return found


def _events(plan: Plan, began: float, metrics: list[Metric]) -> list[Event]:
    found = [Event(began + 200, "trainer", "run_started", f"homing is training {plan.name}.")]
    last = ""
    for number, metric in enumerate(metrics):
        if metric.phase != last:
            last = metric.phase
            found.append(Event(metric.t - 5, "trainer", "phase_started", f"Phase {last} begins.", last, 0))
        if plan.interrupted_at is not None and number and metric.t - metrics[number - 1].t > 600:
            at = metrics[number - 1]
            found += [
                Event(at.t + 20, "agent", "preempted", "The provider took the machine back.", at.phase, at.step),
                Event(metric.t - 4, "trainer", "resumed", f"Resumed from step {at.step:,}.", metric.phase, metric.step),
            ]
        if metric.step % 400 == 0:
            found.append(
                Event(metric.t, "trainer", "checkpoint_saved", f"Saved {last} step {metric.step:,}.", last, metric.step)
            )
    if plan.state == "failed":
        found.append(Event(metrics[-1].t + 10, "trainer", "alert", plan.reason, last, metrics[-1].step))
    return found


def _log(plan: Plan, metrics: list[Metric]) -> str:
    lines = [
        f"step {each.step:,}/{each.num_steps:,} | loss {each.loss:.3f} | lr {each.lr:.1e}" for each in metrics[::5]
    ]
    return "\n".join(["trainer begins", *lines, *plan.log_tail.splitlines(), ""])


def _samples(folder: Path, plan: Plan, metrics: list[Metric], number: int) -> None:
    for at in range(number):
        metric = metrics[(at + 1) * len(metrics) // number - 1]
        texts = [f"[{prompt}] {TEXTS[at * len(TEXTS) // number]}\n\n" for prompt in PROMPTS]
        (folder / f"{metric.phase}-{metric.step:08d}.txt").write_text("".join(texts))


def _checkpoint(folder: Path, plan: Plan, last: Metric) -> None:
    kept = folder / file_names.CHECKPOINTS / last.phase
    sizes = {
        file_names.WEIGHTS: plan.num_params * 2,
        "state.json": 900,
        file_names.RUN: 4000,
        file_names.TOKENIZER: 90_000,
    }
    weights = [FileHash(name, size, random.Random(plan.id + name).randbytes(32).hex()) for name, size in sizes.items()]
    manifest = CheckpointManifest(
        plan.name,
        plan.id,
        last.phase,
        last.step,
        last.num_tokens,
        True,
        "c" * 64,
        0,
        weights,
        val_loss=last.val_loss,
        val_bits_per_byte=last.val_bits_per_byte,
        made_at=last.t,
    )
    step = kept / f"step-{last.step:08d}"
    step.mkdir(parents=True)
    (step / file_names.MANIFEST).write_text(codec.dumps(manifest))
    (kept / file_names.BEST).write_text(codec.dumps(Pointer(last.step, last.val_loss)))


def _start_here(folder: Path, plan: Plan, began: float) -> None:
    (folder / file_names.TRAINER_LOCK).touch()
    os.utime(folder / file_names.TRAINER_LOCK, (began, began))
    (folder / STARTED).write_text(json.dumps({"again": f"homing train {plan.name}"}))


def _rent(home: Home, plan: Plan, folder: Path, began: float, ended: float, last: Metric, now: float) -> None:
    assert plan.offer is not None
    provider, offer, rate = plan.offer
    attempts = [(began, ended)]
    if plan.interrupted_at is not None:
        lost = began + 240 + plan.interrupted_at * plan.minutes * 60
        attempts = [(began, lost + 60), (lost + 600, ended)]
    row = RunRow(plan.id, plan.name, "running", began, f"file:{home.path / 'store'}", "f" * 64, plan.limit)
    mark = ""
    for number, (start, end) in enumerate(attempts, 1):
        mark = f"homing-abc123-{plan.name}-{number}"
        line = LedgerLine(mark, plan.id, plan.name, number, provider, offer, rate, plan.limit, start)
        if number > 1:
            home.ledger.set_run(plan.id, state="failed")
        home.ledger.intend(row, line)
        home.ledger.begin_create(mark, start)
        is_live = plan.state == "running"
        home.ledger.update(mark, instance_id=f"i-{plan.id[-4:]}{number}", state="ready", billing="yes")
        if not is_live:
            spent = Decimal(rate) * Decimal(end - start) / 3600
            home.ledger.close(mark, at=end, spend_usd=spent.quantize(Decimal("0.0001")), note="destroyed")
    if plan.state == "running":
        home.ledger.set_run(plan.id, state="running")
    else:
        home.ledger.set_run(plan.id, state=plan.state, reason=plan.reason, exit_code=plan.exit_code, ended_at=ended)
    beat = Heartbeat(
        t=now,
        mark=mark,
        attempt=len(attempts),
        state="training" if plan.state == "running" else "ended",
        started_at=began,
        rate_usd_per_hour=rate,
        spend_usd="1",
        phase=last.phase,
        step=last.step,
        num_steps=last.num_steps,
        loss=last.loss,
        tokens_per_s=last.tokens_per_s,
        mfu=last.mfu,
        eta_s=last.eta_s,
        is_pushed=True,
        has_dead_man=True,
        use={"cpu": 0.21, "memory": 0.34, "gpu": 0.98, "gpu_memory": 0.41},
    )
    (folder / file_names.HEARTBEAT).write_text(codec.dumps(beat))
