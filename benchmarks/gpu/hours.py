"""How accurate a run's eta is after its first 20 steps, for five shapes on a GPU.

    1. at home       PYTHONPATH=src python benchmarks/gpu/hours.py --write-runs .carry/hours --seconds-each 120
    2. on the card   PYTHONPATH=src python benchmarks/gpu/hours.py --runs .carry/hours [NAME...] [--out FILE]
    3. at home       the file of --out, where one was asked for, as benchmarks/results/hours.json

At home because a run is resolved by the run file's own rules, which need packages that a card's machine may lack. The
folder holds NAME/run.json for 6x384, 12x768-6heads, 12x768-12heads, 12x768-swift and 20x1280, each with as many steps
as an H200 is expected to do in these seconds; evaluations, saves and samples come as any run of that length has them.
On the card the data are the text that it has (`corpus`), and a run takes a minute more than its seconds: names do some
of them in one command and the others in the next. Each row is saved at once; earlier rows are kept.

A row: the eta that the run printed at its first line of step 20 or later (`eta_s`), the time that then passed until its
phase was done, with the last evaluation, save and sample, and what each of those took (`beside_s`).
Passes when every one is within a fifth.
--quick: one toy on any machine, nothing kept; passes when there was an eta and the run finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corpus import ROOTS, prepare

from _result import RESULTS, write_result
from homing.lm.data.shards.read_shards import file_sha256
from homing.wire import codec, file_names
from homing.wire.run_json import Data, Run

WORK = Path("/tmp/homing-hours")
VOCAB, MOST_BYTES = 32768, 100_000_000
JUDGED_STEPS = 20
MOST_OFF = 0.20
CARD = "H200"
SHAPES = {
    "6x384": {"model.depth": "6"},
    "12x768-6heads": {"model.depth": "12"},
    "12x768-12heads": {"model.depth": "12", "model.heads": "12", "model.head_size": "64"},
    "12x768-swift": {"model.depth": "12", "model.family": "swift"},
    "20x1280": {"model.depth": "20"},
}
TOY = {"model.depth": "2", "model.context": "128", "tokenizer.vocab_size": "512", "phases.0.batch_tokens": "1024",
       "train.log_every": "10", "sample.tokens": "8"}  # fmt: skip
TOY_TOKENS = 60 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the runs to do; all of the folder where none is named")
    parser.add_argument("--write-runs", type=Path, metavar="DIR")
    parser.add_argument("--seconds-each", type=float, default=120.0, help="of training, with --write-runs")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, help="a copy of the result, after each run")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory(prefix="homing-hours-") as folder:
            return quick(Path(folder))
    if arguments.write_runs:
        write_runs(arguments.write_runs, arguments.seconds_each)
        return 0
    if not arguments.runs:
        parser.error("give --write-runs DIR at home, or --runs DIR on the card")
    unknown = [name for name in arguments.names if not (arguments.runs / name / file_names.RUN).is_file()]
    if unknown:
        parser.error(f"{arguments.runs} holds no run {', '.join(unknown)}")
    if not torch.cuda.is_available():
        print("FAIL no CUDA device")
        return 1
    return measure(arguments.runs, arguments.names, arguments.out)


def measure(runs: Path, chosen: list[str], out: Path | None) -> int:
    device, rows = torch.cuda.get_device_name(), kept_rows(torch.cuda.get_device_name())
    prepare(WORK / "data", ROOTS, vocab_size=VOCAB, most_bytes=MOST_BYTES)
    for name in chosen or sorted(path.parent.name for path in runs.glob(f"*/{file_names.RUN}")):
        rows[name] = row = trained(runs / name, WORK / "runs" / name, WORK / "data", needs_gpu=True)
        print(
            f"{name:<16} predicted {row['planned_s']:.1f} s, took {row['took_s']:.1f} s: {row['off']:+.1%}", flush=True
        )
        worst = max(abs(each["off"]) for each in rows.values())
        write_result("hours", {"device": device, "runs": rows, "worst": worst}, passed=worst <= MOST_OFF)
        if out:
            shutil.copyfile(RESULTS / "hours.json", out)
    worst = max((abs(row["off"]) for row in rows.values()), default=1.0)
    print(f"{'PASS' if worst <= MOST_OFF else 'FAIL'} at most {worst:.1%} off in {len(rows)} runs")
    return 0 if worst <= MOST_OFF else 1


def kept_rows(device: str) -> dict[str, Any]:
    """Of this very card: with another all begin anew."""
    path = RESULTS / "hours.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}
    return dict(figures["runs"]) if figures.get("device") == device else {}


def trained(source: Path, run_dir: Path, data: Path, *, needs_gpu: bool) -> dict[str, Any]:
    """From its beginning, whatever an earlier try left; what it wrote goes again, for checkpoints are large."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    run = with_data(codec.loads(Run, (source / file_names.RUN).read_bytes()), data)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, needs_gpu=needs_gpu))
    (run_dir / file_names.RUN).write_text(codec.dumps(run, indent=1), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True)
    row = compare(run_dir)
    shutil.rmtree(run_dir)
    return row


def with_data(run: Run, folder: Path) -> Run:
    """The run on data that were made after it was resolved."""
    splits = prepare(folder, vocab_size=run.model.vocab_size, most_bytes=0).splits  # there already
    data = Data(
        dir=str(folder), manifest_sha256=file_sha256(folder / file_names.MANIFEST),
        tokenizer_sha256=file_sha256(folder / file_names.TOKENIZER),
        num_train_tokens=splits["train"].num_tokens, num_val_tokens=splits["val"].num_tokens,
    )  # fmt: skip
    # As a run file that knows its data would have it: what is held out is all that there is to evaluate on.
    phases = [
        dataclasses.replace(phase, eval_tokens=min(phase.eval_tokens, data.num_val_tokens)) for phase in run.phases
    ]
    return dataclasses.replace(run, data=data, phases=phases)


def compare(run_dir: Path) -> dict[str, Any]:
    lines = read_lines(run_dir / file_names.METRICS)
    judged = next(line for line in lines if line["step"] >= JUDGED_STEPS and line["eta_s"])
    events = read_lines(run_dir / file_names.EVENTS)
    done = next(event for event in events if event["kind"] == "phase_done")
    assert lines[-1]["step"] == judged["num_steps"], "it did not come to its end"
    planned_s, took_s = judged["eta_s"], done["t"] - judged["t"]
    return {
        "planned_s": planned_s, "took_s": took_s, "off": planned_s / took_s - 1.0, "steps": judged["num_steps"],
        "judged_at": judged["step"], "tokens_per_s": judged["tokens_per_s"], "beside_s": waits_of(events),
    }  # fmt: skip


def waits_of(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds that training waited for each evaluation, sample and save; the first of a kind includes setup."""
    kinds = {"evaluated": "seconds", "sampled": "seconds", "checkpoint_saved": "held_s"}
    return {kind: [e["data"][key] for e in events if e["kind"] == kind] for kind, key in kinds.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- at home -----------------------------------------------------------------------------------------------------------


def write_runs(folder: Path, seconds: float) -> None:
    from homing.cloud.plan.measured_speeds import load_table, tokens_per_s
    from homing.gpus import GPUS

    for name, sets in SHAPES.items():
        first = resolved(sets, num_tokens=2**27)
        rate = tokens_per_s(load_table(), GPUS[CARD], first, first.phases[0])
        run = resolved(sets, num_tokens=round(rate * seconds))
        write_run(folder / name, run)
        steps, saves = run.phases[0].num_steps, run.phases[0].save_every
        print(f"{name:<16} {steps:,} steps, a save every {saves:,}: {seconds:.0f} s at {rate:,.0f} tok/s")


def write_run(folder: Path, run: Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_names.RUN).write_text(codec.dumps(run, indent=1), encoding="utf-8")


def resolved(sets: dict[str, str], num_tokens: int) -> Run:
    from homing.config.load import load_run

    with tempfile.TemporaryDirectory(prefix="homing-hours-") as folder:
        file, text = Path(folder) / "hours.yaml", Path(folder) / "text.txt"
        text.write_text("Nothing of this is read.\n", encoding="utf-8")
        file.write_text(
            f"name: hours\ndata: {{text: [{text}]}}\ntokenizer: {{vocab_size: {VOCAB}}}\n"
            f"phases: [{{kind: pretrain, tokens: {num_tokens}}}]\n",
            encoding="utf-8",
        )
        run: Run = load_run(str(file), [f"{key}={value}" for key, value in sets.items()]).run
        return run


def quick(folder: Path) -> int:
    here = Path(__file__).resolve().parents[2]
    prepare(folder / "data", (f"{here}/docs", f"{here}/src"), vocab_size=512, most_bytes=300_000)
    write_run(folder / "toy", resolved(TOY, num_tokens=TOY_TOKENS))
    row = trained(folder / "toy", folder / "run", folder / "data", needs_gpu=False)
    passed = row["planned_s"] > 0 and row["took_s"] > 0 and row["judged_at"] == JUDGED_STEPS
    print(f"{'PASS' if passed else 'FAIL'} one toy, predicted {row['planned_s']:.1f} s, took {row['took_s']:.1f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
