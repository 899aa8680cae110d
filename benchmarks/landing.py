"""A limit too small for the plan still brings a finished model home, inside it, every time.

    1. some runs with money enough, all at once: how long each part of a trip takes on this machine under this load
    2. `homing plan` prints the minimum by these figures
    3. 50 runs under random limits from that minimum upwards, through launch, agent, trainer, store and provider
    4. of each: the provider's own bill is inside the limit, the last checkpoint is whole in the store and decayed, the
       model in it speaks; and over all, the landed models are better than the same steps without the decay

    python benchmarks/landing.py [--quick] [--runs N] [--parallel N] [--seed N]

--quick: the trainer alone under a few deadlines, without agent and provider.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "lm"), str(ROOT / "benchmarks")]
RATE = Decimal(36)  # dollars an hour, made up: a cent a second, so that cents are seconds
os.environ |= {"OMP_NUM_THREADS": "1", "HOMING_LOCAL_RATE": str(RATE), "PYTHONPATH": str(ROOT / "src")}

from tiny import (  # noqa: E402
    count_params,
    make_run,
    make_run_dir,
    write_byte_tokenizer,
    write_manifest,
    write_shards,
)

from _result import write_proof  # noqa: E402
from homing.cloud.artifacts.checkpoints import (  # noqa: E402
    damage,
    fetch,
    list_checkpoints,
)
from homing.cloud.contact.heartbeats import Tail, read_document  # noqa: E402
from homing.cloud.home import Home  # noqa: E402
from homing.cloud.launch.launch import LaunchOrder, draft, launch  # noqa: E402
from homing.cloud.plan.plan import make_plan  # noqa: E402
from homing.cloud.plan.speed import FILE, recall  # noqa: E402
from homing.cloud.watch.follow import watch  # noqa: E402
from homing.errors import UsageError  # noqa: E402
from homing.lm.tokenizer import load_tokenizer  # noqa: E402
from homing.sampling_settings import SamplingSettings  # noqa: E402
from homing.store import run_key  # noqa: E402
from homing.wire import codec, file_names  # noqa: E402
from homing.wire.control_files import Control, boot_clock_s  # noqa: E402
from homing.wire.event_lines import Metric, Outcome  # noqa: E402
from homing.wire.run_json import Run, Schedule, Sizes  # noqa: E402
from homing.world import World  # noqa: E402

PLANNED_STEPS = 20_000  # more than any limit here pays for
REFERENCE_STEPS = 800
NEAR_FLOOR = 0.2  # of the peak: a decay of ten steps ends at a tenth of it
DEADLINE_S = 300.0
LEAST_S = 7.0  # the least deadline of the quick form


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs under random limits: a finished model inside each.")
    parser.add_argument("--quick", action="store_true", help="the trainer alone under four deadlines, about 20 s")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--parallel", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun, chance = time.monotonic(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="homing-landing-") as folder:
        make_data(Path(folder) / "data")
        if arguments.quick:
            figures = _quick(Path(folder), chance)
        else:
            figures = _full(Path(folder), arguments.runs, arguments.parallel, chance)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    problems = figures["problems"]
    for problem in problems:
        print(f"problem: {problem}")
    if not arguments.quick and arguments.runs >= parser.get_default("runs"):  # a part of it proves nothing
        write_proof("landing", figures, passed=not problems)
    print(f"{'FAIL' if problems else 'PASS'} {figures['said']}, {figures['seconds']} s")
    return 1 if problems else 0


def make_data(folder: Path) -> None:
    """The shipped text, a byte a token: enough to learn that a few hundred steps do not exhaust it."""
    text = lzma.decompress((ROOT / "src/homing/presets/texts/shakespeare.txt.xz").read_bytes()).decode()
    write_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder / file_names.TOKENIZER)
    documents = [[0, *tokenizer.encode(text[start : start + 1000])] for start in range(0, len(text), 1000)]
    held_out = documents[::20]
    rest = [document for number, document in enumerate(documents) if number % 20]
    write_manifest(folder, {"train": write_shards(folder, "train", rest), "val": write_shards(folder, "val", held_out)})


def make_long_run(data_dir: Path, num_steps: int, schedule: Schedule, **changes: Any) -> Run:
    """Steps of some tens of milliseconds, so that a minute is neither ten of them nor ten thousand."""
    whole = {"num_steps": num_steps, "schedule": schedule, "batch_tokens": 1024, "micro_batch": 16}
    run = make_run(data_dir, train={"log_every": 5}, **(whole | {"eval_every": 50, "save_every": 100} | changes))
    model = dataclasses.replace(run.model, width=64, num_heads=4, ffn_width=192, context=64)
    num_params, num_matmul = count_params(model)
    flops = 6.0 * num_matmul + 12.0 * model.num_layers * model.width * model.context
    return dataclasses.replace(run, model=model, sizes=Sizes(num_params, num_matmul, flops), id="")


def _planned(data_dir: Path, **changes: Any) -> Run:
    return make_long_run(data_dir, PLANNED_STEPS, Schedule("wsd", 10, PLANNED_STEPS // 5, 0.0), **changes)


# --- the whole path ---


def _full(folder: Path, num_runs: int, parallel: int, chance: random.Random) -> dict[str, Any]:
    data_dir = folder / "data"
    print(f"{parallel} runs with money enough, at once, to measure this machine ...", flush=True)
    _calibrate(folder, parallel)
    minimum, text = _minimum(folder)
    print(f"minimum that plan prints: ${minimum:.2f} ({text})", flush=True)
    problems = _refuses_less(folder, minimum)
    limits = [
        (minimum * Decimal(str(1 + 0.6 * chance.random()))).quantize(Decimal("0.01")) for _ in range(num_runs - 1)
    ]
    limits.append(minimum)  # the least of all is among them
    with ThreadPoolExecutor(parallel) as pool:
        jobs = [pool.submit(_one, folder, number, limit) for number, limit in enumerate(limits)]
        runs = [job.result() for job in jobs]
    reference = _reference(folder, data_dir, max((run["step"] for run in runs), default=0))
    problems += [f"run {run['number']} (limit ${run['limit']}): {p}" for run in runs for p in run["problems"]]
    for run in runs:
        run["undecayed_loss"] = _nearest(reference, run["step"])
    gains = [run["undecayed_loss"] - run["val_loss"] for run in runs if run["val_loss"] and run["undecayed_loss"]]
    gain = statistics.fmean(gains) if gains else float("-inf")
    if gain <= 0:
        problems.append(f"the landed models are not better than the same steps without decay: {gain:.4f} nats")
    used = [float(run["bill"]) / float(run["limit"]) for run in runs if run["bill"]]
    num_good = sum(not run["problems"] for run in runs)
    return {
        "said": f"{num_good} of {num_runs} limits from ${minimum:.2f} to ${max(limits)}: a finished model inside each;"
        f" {statistics.median(used):.0%} of the limit used, decay worth {gain:.3f} nats",
        "minimum_usd": str(minimum),
        "minimum_text": text,
        "num_runs": num_runs,
        "num_good": num_good,
        "share_of_limit_used": [round(min(used), 3), round(statistics.median(used), 3), round(max(used), 3)],
        "decay_gain_nats": gain,
        "runs": runs,
        "problems": problems,
    }


def _calibrate(folder: Path, parallel: int) -> None:
    """The slowest of each part, of runs that disturb each other as much as the later ones will."""
    run = make_long_run(folder / "data", 250, Schedule("wsd", 10, 50, 0.0))

    def one(number: int) -> tuple[dict[str, float], float, dict[str, Any]]:
        home = Home(folder / f"calibrate-{number}", World())
        plan = make_plan(dataclasses.replace(run, store=f"file:{home.path}/store"), home)
        ended = _to_the_end(home, plan, Decimal(10))
        assert ended.state == "done", ended
        known = recall(plan.run, plan.offers[0].offer, home)
        assert known is not None, "a run that came home taught nothing"
        document = json.loads((home.path / FILE).read_text())
        return known, document["measured"][-1]["tokens_per_s"], document

    with ThreadPoolExecutor(parallel) as pool:
        seen = list(pool.map(one, range(parallel)))
    trip = {part: max(known[part] for known, _, _ in seen) for part in seen[0][0]}
    trip["push_bytes_per_s"] = min(known["push_bytes_per_s"] for known, _, _ in seen)
    document = seen[0][2]
    slowest = min(speed for _, speed, _ in seen)
    document["measured"][-1] |= {"trip": trip, "tokens_per_s": slowest, "phases": {"pretrain": slowest}}
    (folder / FILE).write_text(json.dumps(document))


def _home(folder: Path, name: str) -> Home:
    path = folder / name
    path.mkdir()
    shutil.copy(folder / FILE, path / FILE)
    return Home(path, World())


def _minimum(folder: Path) -> tuple[Decimal, str]:
    home = _home(folder, "plan")
    plan = make_plan(dataclasses.replace(_planned(folder / "data"), store=f"file:{home.path}/store"), home)
    best = plan.offers[0]
    return best.minimum_usd.quantize(Decimal("0.01")) + Decimal("0.01"), best.timing.text


def _refuses_less(folder: Path, minimum: Decimal) -> list[str]:
    home = _home(folder, "less")
    plan = make_plan(dataclasses.replace(_planned(folder / "data"), store=f"file:{home.path}/store"), home)
    try:
        _draft(home, plan, minimum - Decimal("0.02"))
    except UsageError as error:
        print(f"less is refused: {error.what} {error.why}", flush=True)
        return []
    return ["launch accepted less than the minimum"]


def _draft(home: Home, plan: Any, limit: Decimal) -> Any:
    best = plan.offers[0]
    order = LaunchOrder(
        run=plan.run, run_file_text="name: tiny\n", is_prepared=True, offer=best.offer, spend_limit_usd=limit,
        timing=best.timing,
    )  # fmt: skip
    return draft(order, home)


def _to_the_end(home: Home, plan: Any, limit: Decimal) -> Any:
    launched = launch(_draft(home, plan, limit), home)
    deadline = time.monotonic() + DEADLINE_S
    for _ in watch(home, launched.run, every_s=5.0):
        if time.monotonic() > deadline:
            raise SystemExit(f"FAIL {launched.run.id} did not end within {DEADLINE_S:g} s")
    return home.ledger.run(launched.run.id)


def _one(folder: Path, number: int, limit: Decimal) -> dict[str, Any]:
    home = _home(folder, f"run-{number}")
    plan = make_plan(dataclasses.replace(_planned(folder / "data"), store=f"file:{home.path}/store"), home)
    row = _to_the_end(home, plan, limit)
    store, problems = home.store_of(row), list[str]()
    (line,) = home.ledger.lines(row.id)
    seen = home.provider("local").describe(line.instance_id or "")
    bill = seen.spend_usd if seen.spend_usd is not None else Decimal(line.spend_usd)
    if seen.state != "gone" or bill > limit:
        problems.append(f"it is {seen.state} and the provider's bill is ${bill}")
    outcome = read_document(store, run_key(row.id, file_names.OUTCOME), Outcome)
    if row.state != "stopped" or row.exit_code != 5 or "Landed" not in row.reason:
        problems.append(f"it ended as {row.state} ({row.exit_code}): {row.reason}")
    found = list_checkpoints(store, row.id, ["pretrain"])
    if not found or damage(store, found[0]) or not found[0].manifest.is_final:
        problems.append("no whole and final checkpoint is in the store")
    metrics = Tail(store, run_key(row.id, file_names.METRICS)).documents(Metric)
    problems += _decay_problems(metrics)
    spoken = ""
    if found:
        problems += (
            [] if store.exists(f"{file_names.STORE_MODELS}/{row.name}/{file_names.MANIFEST}") else ["no models/NAME"]
        )
        spoken = _speak(fetch(home, row, folder / f"model-{number}").model_dir)
        problems += [] if spoken else ["the model says nothing"]
    shutil.rmtree(home.path / "local", ignore_errors=True)
    last = metrics[-1] if metrics else None
    result = {
        "number": number,
        "limit": str(limit),
        "bill": str(round(bill, 4)),
        "step": outcome.step if outcome else 0,
        "val_loss": last.val_loss if last else None,
        "problems": problems,
    }
    print(f"run {number}: {result}", flush=True)
    return result


# --- what is looked at ---


def _decay_problems(metrics: list[Metric]) -> list[str]:
    rates = [metric.lr for metric in metrics if metric.lr is not None]
    if not rates or metrics[-1].end_step != metrics[-1].step:
        return ["its last step is not the end of a landing"]
    if rates[-1] > NEAR_FLOOR * max(rates):
        return [f"the rate ended at {rates[-1] / max(rates):.0%} of its peak"]
    return [] if metrics[-1].val_loss is not None else ["the last step was not evaluated"]


def _speak(folder: Path) -> str:
    from homing.lm.generate import complete, load_for_use

    loaded = load_for_use(folder)
    model, tokenizer = loaded[0], loaded[1]
    return "".join(complete(model, tokenizer, "the cat", num_tokens=12, sampling=SamplingSettings(seed=1)))


def _reference(folder: Path, data_dir: Path, most: int) -> list[tuple[int, float]]:
    """Losses on the way of the same run at the constant rate."""
    num_steps = max(20, min(REFERENCE_STEPS, most + 10))
    run = make_long_run(data_dir, num_steps, Schedule("constant", 10, 0, 0.0), eval_every=10, save_every=0)
    run_dir = make_run_dir(folder / "reference", run)
    print(f"the same without decay, {num_steps} steps ...", flush=True)
    subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
    return [(metric.step, metric.val_loss) for metric in read_metrics(run_dir) if metric.val_loss is not None]


def _nearest(reference: list[tuple[int, float]], step: int) -> float | None:
    return min(reference, key=lambda pair: abs(pair[0] - step))[1] if reference else None


def read_metrics(run_dir: Path) -> list[Metric]:
    return [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]


# --- the trainer alone ---


def _quick(folder: Path, chance: random.Random) -> dict[str, Any]:
    run, problems, landed = _planned(folder / "data", batch_tokens=128), list[str](), []
    children = []
    for number in range(3):
        run_dir = make_run_dir(folder / f"run-{number}", run)
        argv = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
        children.append((run_dir, subprocess.Popen(argv, stdout=subprocess.DEVNULL)))
    deadlines = [_set_deadline(run_dir, chance) for run_dir, _ in children]
    for (run_dir, child), land_by in zip(children, deadlines, strict=True):
        code = child.wait(timeout=DEADLINE_S)
        outcome = codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes())
        if code != file_names.EXIT_STOPPED or "Landed" not in outcome.reason or outcome.t > land_by:
            problems.append(f"{run_dir.name} ended with {code} at {outcome.t - land_by:+.1f} s: {outcome.reason}")
        problems += [f"{run_dir.name}: {problem}" for problem in _decay_problems(read_metrics(run_dir))]
        if not _speak(run_dir / file_names.CHECKPOINTS / outcome.phase / file_names.step_dir(outcome.step)):
            problems.append(f"{run_dir.name}: the model says nothing")
        landed.append({"step": outcome.step, "seconds_to_spare": round(land_by - outcome.t, 2)})
    spare = ", ".join(f"{run['seconds_to_spare']:.1f}" for run in landed)
    return {"said": f"{len(landed)} deadlines met with {spare} s to spare", "runs": landed, "problems": problems}


def _set_deadline(run_dir: Path, chance: random.Random) -> float:
    """Sets a deadline several times as far away as the first checkpoint was from the first metrics line.

    A hundred steps, two evaluations and a save lie between them, so a busy machine gets later deadlines. Loading torch
    does not count.
    """
    saved = run_dir / file_names.CHECKPOINTS / "pretrain" / file_names.LATEST
    deadline = time.monotonic() + DEADLINE_S
    while not saved.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"FAIL {run_dir.name} saved no checkpoint within {DEADLINE_S:g} s")
        time.sleep(0.1)
    taken_s = saved.stat().st_mtime - read_metrics(run_dir)[0].t
    seconds = max(LEAST_S, 3.0 * taken_s) * chance.uniform(1.0, 1.4)
    land_by = time.time() + seconds
    temporary = run_dir / ".control.tmp"
    temporary.write_text(codec.dumps(Control(reason="The spend limit is near.", land_by=boot_clock_s() + seconds)))
    temporary.replace(run_dir / file_names.CONTROL)
    return land_by


if __name__ == "__main__":
    sys.exit(main())
