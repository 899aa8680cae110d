"""How well a recipe learns, by time or by tokens: bits per byte on held-out text, families and optimizers side by side.

    python benchmarks/gpu/quality.py --write-recipes FILE           at home: what homing itself would do, as records
    PYTHONPATH=src python benchmarks/gpu/quality.py --recipes FILE --seconds 300 --seeds 0,1 \\
        --run swift --run "stock lr=0.02" --run nanochat --peer DIR [--out FILE]
    PYTHONPATH=src python benchmarks/gpu/quality.py --recipes FILE --seconds 300 --seeds 0,1,2 --peer DIR \\
        --sweep-peer 65536,131072,262144,524288 --sweep-seed 100 [--out DIR]      a peer at its best batch
    PYTHONPATH=src python benchmarks/gpu/quality.py --recipes FILE --tokens 26000000 --runs LINES       a sweep

A run is a recipe with changes: fields of its optimizer, or NAME=*FACTOR of what it has; `decay` and `warmup` (shares of
the steps), `floor`, `batch` (tokens), `precision`, in a sweep `tokens`, and `init.ENDING=FACTOR` for the fresh weights
whose names end so, such as `init.o_proj.weight=0`. It learns from the text that the machine has (`corpus`), the same
rows in the same order for all. By time, how many steps fit into the seconds is measured first, then everything begins
anew; compiling and evaluating are not counted. `nanochat` is its own model, optimizer and schedule (karpathy/nanochat,
its folder as --peer; nothing of it is kept here), with its default batch for this size unless one is given. A row of a
peer names the settings that it ran with. `--sweep-peer` runs each batch once on `--sweep-seed`, continues past the ends
of the list while the best one is at an end, and then runs the best one with `--seeds`, none of which may be the seed
that chose it. What was tried goes to results/peer_sweep.json; draw.py prints next to the figure whether there was such
a sweep. With --only-missing the same command may be given again and again, where a machine is lent for minutes at a
time.

Each run is a row of results/quality.json, or of results/sweep.json where tokens are given, with its curve; earlier rows
are kept. --quick: toy sizes on any machine, nothing kept. Passes when every loss is finite and fell.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corpus import prepare

from _result import RESULTS, origin, write_result
from homing.lm.data.shards.read_shards import open_split, read_manifest
from homing.lm.evals.bits_per_byte import evaluate
from homing.lm.model import Decoder
from homing.lm.phases.pretrain import Pretrain
from homing.lm.tokenizer import load_tokenizer
from homing.lm.train.optim.param_groups import build_optimizer, clip_gradients
from homing.lm.train.optim.schedule import lr_scale
from homing.wire import codec, file_names
from homing.wire.run_json import Model, Optimizer, Run

DATA = Path("/tmp/homing-corpus")
VOCAB, MOST_BYTES = 32768, 760_000_000
ROWS, ROWS_OF_SMALL = 32, 64  # at a time
SMALL = 512  # width
WARM, PROBED = 3, 6
EVAL_ROWS = 32
POINTS, POINTS_OF_SWEEP = 60, 12  # of a curve
TOKENS_AT_HOME = "160M"  # about five minutes of an H200
AT_HOME = {
    "stock": {},
    "swift": {"model.family": "swift"},
    "stock-6": {"model.depth": "6"},
    "swift-6": {"model.depth": "6", "model.family": "swift"},
    "stock-26": {"model.depth": "26"},  # a billion weights
    "stock-adamw": {"phases.0.optimizer": "adamw"},
    "toy": {"model.depth": "2", "model.context": "128", "phases.0.tokens": "200k", "tokenizer.vocab_size": "512"},
}
PEER = "nanochat"
B_REF, DECAY, WEIGHT_DECAY, WARMUP = 2**19, 0.65, 0.28, 40  # nanochat's
PEER_RATES = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02}  # at B_REF
LEAST_BATCH, MOST_BATCH = 2**14, 2**21  # of a peer that are tried


@dataclasses.dataclass
class Trial:
    """One model in training: `step(number of the step, of how many, ids, targets)` -> loss; `judge` -> nats, bits."""

    step: Callable[[int, int, Tensor, Tensor], Tensor]
    judge: Callable[[], tuple[float, float]]
    begin: Callable[[int], None]  # anew, from a seed
    batch_tokens: int
    settings: dict[str, Any] | None = None  # of a peer: what it ran with


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-recipes", type=Path)
    parser.add_argument("--recipes", type=Path)
    parser.add_argument("--run", action="append", default=[])
    parser.add_argument("--runs", type=Path, help="a file with one in each line")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--sweep-peer", default="", help="batches in tokens, such as 65536,131072,262144,524288")
    parser.add_argument("--sweep-seed", type=int, default=100, help="chooses the batch, and is never reported")
    parser.add_argument("--out", type=Path, help="a copy of the result: a file, or a folder for several")
    parser.add_argument("--only-missing", action="store_true", help="not again what this commit has measured here")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.write_recipes:
        write_recipes(arguments.write_recipes)
        return 0
    torch.set_float32_matmul_precision("high")
    if arguments.quick:
        with tempfile.TemporaryDirectory(prefix="homing-quality-") as folder:
            return quick(Path(folder))
    if arguments.peer:
        sys.path.insert(0, str(arguments.peer))
    prepare(DATA, vocab_size=VOCAB, most_bytes=MOST_BYTES)
    recipes = read_recipes(arguments.recipes)
    lines = arguments.runs.read_text("utf-8").splitlines() if arguments.runs else []
    name = "sweep" if arguments.tokens else "quality"
    measure_or_recall = recall_or_measure if arguments.only_missing else measure_and_keep
    seeds = [int(number) for number in arguments.seeds.split(",")]
    runs = [*arguments.run, *(line for line in lines if line.strip())]
    with Bench(recipes, DATA) as bench:
        if arguments.sweep_peer:
            batches = [int(number) for number in arguments.sweep_peer.split(",")]
            work = functools.partial(measure_or_recall, bench, seconds=arguments.seconds, out=arguments.out)
            runs.append(f"{PEER} batch={sweep_peer(work, batches, arguments.sweep_seed, seeds)}")
        for recipe in runs:
            for seed in seeds:
                measure_or_recall(
                    bench,
                    name,
                    recipe,
                    seed,
                    seconds=arguments.seconds,
                    num_tokens=arguments.tokens,
                    out=arguments.out,
                )
    rows = kept_rows(name)
    passed = all(is_good(row) for row in rows)
    print(f"{'PASS' if passed else 'FAIL'} {len(rows)} runs")
    return 0 if passed else 1


def measure_and_keep(
    bench: Bench, name: str, recipe: str, seed: int, *, seconds: float, num_tokens: int = 0, out: Path | None = None
) -> dict[str, Any]:
    """In the place of an earlier row of the same run, and at once: a machine may be taken away before the next."""
    row = measure(bench, recipe, seed, seconds, num_tokens)
    rows = [old for old in kept_rows(name) if key(old) != key(row)] + [row]
    write_result(name, {"rows": rows}, passed=all(is_good(each) for each in rows))
    copy_out(name, out)
    return row


def recall_or_measure(
    bench: Bench, name: str, recipe: str, seed: int, *, seconds: float, num_tokens: int = 0, out: Path | None = None
) -> dict[str, Any]:
    """The row that this commit has measured already on such a card with this text, if there is one."""
    asked = {
        "run": recipe, "seed": seed, "asked_s": 0.0 if num_tokens else seconds, "asked_tokens": num_tokens,
        "device": device_name(bench.device), "commit": origin()["commit"],
        "corpus_tokens": read_manifest(bench.data).splits["train"].num_tokens,
    }  # fmt: skip
    for row in kept_rows(name):
        if all(row.get(field) == value for field, value in asked.items()):
            print(f"there already: {recipe}, seed {seed}: {row['val_bits_per_byte']:.4f}", flush=True)
            copy_out(name, out)
            return row
    return measure_and_keep(bench, name, recipe, seed, seconds=seconds, num_tokens=num_tokens, out=out)


def copy_out(name: str, out: Path | None) -> None:
    if out:
        shutil.copyfile(RESULTS / f"{name}.json", out / f"{name}.json" if out.is_dir() else out)


# -- a peer at its best ------------------------------------------------------------------------------------------------


def sweep_peer(
    work: Callable[[str, str, int], dict[str, Any]], batches: list[int], sweep_seed: int, seeds: list[int]
) -> int:
    """The batch at which the peer learns most in the same time, by a seed that is not reported."""
    if sweep_seed in seeds:
        raise SystemExit(f"--sweep-seed {sweep_seed} is one of --seeds: the seed that chooses must not be reported.")

    def bits_of(batch: int) -> float:
        return float(work("peer_sweep", f"{PEER} batch={batch}", sweep_seed)["val_bits_per_byte"])

    best, found = best_batch(bits_of, batches)
    tried = ", ".join(f"{batch:,}: {bits:.4f}" for batch, bits in sorted(found.items()))
    print(f"{PEER} on seed {sweep_seed}, bits per byte by batch: {tried}; best {best:,}", flush=True)
    if is_at_end(best, found):
        print(f"WARNING: {best:,} is the end of what may be tried ({LEAST_BATCH:,} to {MOST_BATCH:,}).", flush=True)
    return best


def best_batch(bits_of: Callable[[int], float], batches: list[int]) -> tuple[int, dict[int, float]]:
    """The batch with the fewest bits, and all that were tried: those asked for, and further ones by halving or doubling
    while the best is at an end."""
    found = {batch: bits_of(batch) for batch in sorted(set(batches))}
    while True:
        best = min(found, key=lambda batch: found[batch] if math.isfinite(found[batch]) else math.inf)
        further = best // 2 if best == min(found) else best * 2
        if not is_at_end(best, found) or not LEAST_BATCH <= further <= MOST_BATCH:
            return best, found
        found[further] = bits_of(further)


def is_at_end(best: int, found: dict[int, float]) -> bool:
    return best in (min(found), max(found))


def measure(bench: Bench, recipe: str, seed: int, seconds: float, num_tokens: int = 0) -> dict[str, Any]:
    own = [change for change in recipe.split() if change.startswith("tokens=")]
    if own:  # of this run alone
        recipe, num_tokens = recipe.replace(f" {own[0]}", ""), int(own[0].removeprefix("tokens="))
    trial, device = bench.trial(recipe), bench.device
    work = feed_of(bench.base(recipe), bench.data, trial.batch_tokens)
    trial.begin(seed)
    num_probed = 1 if num_tokens else 1 + WARM + PROBED  # the first compiles
    with work.open_batches(None, first_row=0, device=device) as batches:  # type: ignore[arg-type]
        times = [clock(trial, number, batches.next(), device) for number in range(num_probed)]
    if num_tokens:
        num_steps, num_points = num_tokens // trial.batch_tokens, POINTS_OF_SWEEP
    else:
        num_steps, num_points = max(10, int(seconds / statistics.median(times[1 + WARM :]))), POINTS
    trial.begin(seed)
    curve, losses, began = [], [], now(device)
    with work.open_batches(None, first_row=0, device=device) as batches:  # type: ignore[arg-type]
        for number in range(num_steps):
            losses.append(trial.step(number, num_steps, *pair(batches.next())))
            if len(losses) == max(1, num_steps // num_points) or number + 1 == num_steps:
                mean = float(torch.stack(losses).mean())
                curve.append([number + 1, round(now(device) - began, 2), round(mean, 4)])
                losses = []
    took_s = now(device) - began
    nats, bits = trial.judge()
    text = read_manifest(bench.data).splits["train"]
    row = {
        "run": recipe, "seed": seed, "asked_s": 0.0 if num_tokens else seconds, "asked_tokens": num_tokens,
        "seconds": round(took_s, 1), "steps": num_steps, "batch_tokens": trial.batch_tokens,
        "tokens_per_s": round(num_steps * trial.batch_tokens / took_s),
        "epochs": round(num_steps * trial.batch_tokens / text.num_tokens, 3), "corpus_tokens": text.num_tokens,
        "first_step_s": round(times[0], 1), "val_loss": round(nats, 5), "val_bits_per_byte": round(bits, 5),
        "curve": curve,
        "device": device_name(device), "commit": origin()["commit"],
        **({} if trial.settings is None else {"settings": trial.settings}),
    }  # fmt: skip
    shown_fields = (
        "run", "seed", "seconds", "steps", "batch_tokens", "tokens_per_s", "first_step_s", "epochs", "val_loss",
        "settings",
    )  # fmt: skip
    shown = {name: value for name, value in row.items() if name in shown_fields}
    print(f"{bits:.4f} {shown} {[round(loss, 2) for *_, loss in curve[:: max(1, len(curve) // 8)]]}", flush=True)
    return row


class Bench:
    """The trials of some recipes, one model at a time: what it compiled is kept while runs of one recipe follow each
    other."""

    def __init__(self, recipes: dict[str, Run], data: Path, peer_base: str = "stock") -> None:
        self.recipes, self.data, self.peer_base = recipes, data, peer_base  # the peer has the sizes of that recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kind: tuple[str, str] = ("", "")
        self.model: Any = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        self.model = None
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def base(self, recipe: str) -> Run:
        name = recipe.split()[0]
        return self.recipes[self.peer_base if name == PEER else name]

    def trial(self, recipe: str) -> Trial:
        name, *changes = recipe.split()
        changed = dict(change.split("=", 1) for change in changes)
        kind = (name, changed.get("precision", ""))
        base, is_peer = self.base(recipe), name == PEER
        if kind != self.kind:
            self.clear()
            self.kind = kind
            self.model = peer_model(base, self.device) if is_peer else own_model(base, self.device, kind[1])
        make = nanochat if is_peer else ours
        return make(self.model, base, self.data, self.device, changed)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["run"], row["seed"], row["asked_s"], row["asked_tokens"], row["device"]


def is_good(row: dict[str, Any]) -> bool:
    losses = [loss for *_, loss in row["curve"]]
    return all(math.isfinite(loss) for loss in [*losses, row["val_loss"]]) and losses[-1] < losses[0]


def kept_rows(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["figures"]["rows"]
    return rows


# -- ours --------------------------------------------------------------------------------------------------------------


def own_model(base: Run, device: torch.device, precision: str) -> Decoder:
    model = Decoder(base.model)
    model.to(device).set_precision(precision or ("bf16" if device.type == "cuda" else "fp32"))
    model.compile_blocks(is_on=device.type == "cuda")
    return model


def ours(model: Decoder, base: Run, data: Path, device: torch.device, changed: dict[str, str]) -> Trial:
    phase = base.phases[0]
    changed.pop("precision", None)
    batch_tokens = int(changed.pop("batch", phase.batch_tokens))
    decay = float(changed.pop("decay", phase.schedule.decay_steps / phase.num_steps))
    warmup = float(changed.pop("warmup", phase.schedule.warmup_steps / phase.num_steps))
    floor = float(changed.pop("floor", phase.schedule.floor))
    factors = {name.removeprefix("init."): float(changed.pop(name)) for name in list(changed) if name[:5] == "init."}
    spec = changed_optimizer(phase.optimizer, changed)
    kept: dict[str, Any] = {}

    def begin(seed: int) -> None:
        model.init_weights(seed, spec.kind)
        scale_weights(model, factors)
        kept["optimizer"] = build_optimizer(model, spec)
        kept["optimizer"].compile_steps(is_on=device.type == "cuda")

    rows = ROWS_OF_SMALL if base.model.width < SMALL else ROWS

    def step(number: int, of: int, ids: Tensor, targets: Tensor) -> Tensor:
        schedule = dataclasses.replace(
            phase.schedule, warmup_steps=max(1, round(warmup * of)), decay_steps=round(decay * of), floor=floor
        )
        total = backward_in_chunks(lambda a, b: model.loss(a, b), ids, targets, rows)
        norm = clip_gradients(model, spec.clip)
        is_good = torch.isfinite(total) & torch.isfinite(norm)
        kept["optimizer"].step(lr_scale(schedule, number, of), is_good, num_steps=number)
        kept["optimizer"].zero_grad()
        return total

    return Trial(step, lambda: judged(model, data), begin, batch_tokens)


@torch.no_grad()
def scale_weights(model: Decoder, factors: dict[str, float]) -> None:
    for ending, factor in factors.items():
        found = [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]
        assert found, f"no weight ends with {ending}"
        for parameter in found:
            parameter.mul_(factor)


def changed_optimizer(spec: Optimizer, changed: dict[str, str]) -> Optimizer:
    values: dict[str, Any] = {}
    for name, text in changed.items():
        before = getattr(spec, name)  # a name that is none is an error
        if text.startswith("*"):
            values[name] = before * float(text[1:])
        else:
            values[name] = text == "true" if isinstance(before, bool) else type(before)(text)
    return dataclasses.replace(spec, **values)


# -- nanochat, as scripts/base_train.py drives it ----------------------------------------------------------------------


def peer_model(base: Run, device: torch.device) -> Any:
    from nanochat.gpt import GPT, GPTConfig

    shape = base.model
    config = GPTConfig(
        sequence_len=shape.context, vocab_size=shape.vocab_size, n_layer=shape.num_layers, n_head=shape.num_heads,
        n_kv_head=shape.num_kv_heads, n_embd=shape.width, window_pattern="L",
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    return model, torch.compile(model, dynamic=False) if device.type == "cuda" else model


def nanochat(models: Any, base: Run, data: Path, device: torch.device, changed: dict[str, str]) -> Trial:
    model, compiled = models
    batch_tokens = int(changed.get("batch", B_REF))
    scale = (batch_tokens / B_REF) ** 0.5
    rates = {name: rate * scale for name, rate in PEER_RATES.items()}
    settings = {
        "batch_tokens": batch_tokens, "is_default_batch": batch_tokens == B_REF, "rate_factor": round(scale, 4),
        "weight_decay": round(WEIGHT_DECAY * scale, 4), "warmup_steps": WARMUP, "decay": DECAY,
        "compile": compiled is not model,
    }  # fmt: skip
    kept: dict[str, Any] = {}

    def begin(seed: int) -> None:
        torch.manual_seed(seed)
        model.init_weights()
        kept["optimizer"] = model.setup_optimizer(**rates, weight_decay=WEIGHT_DECAY * scale)

    def step(number: int, of: int, ids: Tensor, targets: Tensor) -> Tensor:
        total = backward_in_chunks(compiled, ids, targets, ROWS)
        decay_steps = round(DECAY * of)
        since = max(0, number - (of - decay_steps)) / max(1, decay_steps)
        rate = min((number + 1) / WARMUP, 1.0 if number <= of - decay_steps else 1.0 - 0.95 * since)
        momentum = 0.85 + 0.12 * number / 400 if number < 400 else 0.97 - 0.07 * since
        for group in kept["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * rate
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = WEIGHT_DECAY * scale * 0.5 * (1 + math.cos(math.pi * number / of))
        kept["optimizer"].step()
        model.zero_grad(set_to_none=True)
        return total

    return Trial(step, lambda: judged(Judged(model, base.model, device), data), begin, batch_tokens, settings)


class Judged:
    """What `evaluate` asks of a model."""

    def __init__(self, model: Any, shape: Model, device: torch.device) -> None:
        self.model, self.shape, self.device = model, shape, device

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        # -1 is what it ignores.
        targets_BT = torch.where(targets_BT < 0, -1, targets_BT)
        losses: Tensor = self.model(ids_BT, targets_BT, loss_reduction="none")
        return losses.view(targets_BT.shape).float()


# -- common to both ----------------------------------------------------------------------------------------------------


def backward_in_chunks(loss_of: Callable[[Tensor, Tensor], Tensor], ids: Tensor, targets: Tensor, rows: int) -> Tensor:
    chunks = list(zip(ids.split(rows), targets.split(rows), strict=True))
    total = torch.zeros((), device=ids.device)
    for some_ids, some_targets in chunks:
        loss = loss_of(some_ids, some_targets) / len(chunks)
        loss.backward()
        total = total + loss.detach()
    return total


def judged(model: Any, data: Path) -> tuple[float, float]:
    manifest = read_manifest(data)
    found = evaluate(
        model, open_split(data, manifest, "val"), token_bytes=load_tokenizer(data / file_names.TOKENIZER).token_bytes(),
        num_tokens=0, rows_at_a_time=EVAL_ROWS,
    )  # fmt: skip
    assert found.bits_per_byte is not None
    return found.loss, found.bits_per_byte


def feed_of(base: Run, data: Path, batch_tokens: int) -> Pretrain:
    return Pretrain(base, dataclasses.replace(base.phases[0], batch_tokens=batch_tokens), data)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.ids_RT, batch.targets_RT


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def clock(trial: Trial, number: int, batch: Any, device: torch.device) -> float:
    began = now(device)
    trial.step(number, 1000, *pair(batch))
    return now(device) - began


# -- recipes -----------------------------------------------------------------------------------------------------------


def write_recipes(path: Path) -> None:
    """Resolved by the run file's own rules, which need packages that a card's machine may lack."""
    from homing.config.load import load_run

    made = {}
    with tempfile.TemporaryDirectory(prefix="homing-recipes-") as folder:
        file = Path(folder) / "recipe.yaml"
        (Path(folder) / "text.txt").write_text("Nothing of this is read.\n", encoding="utf-8")
        file.write_text(
            f"name: recipe\ndata: {{text: [{folder}/text.txt]}}\nmodel: {{depth: 12}}\n"
            f"phases: [{{kind: pretrain, tokens: {TOKENS_AT_HOME}}}]\n",
            encoding="utf-8",
        )
        for name, sets in AT_HOME.items():
            loaded = load_run(str(file), [f"{key}={value}" for key, value in sets.items()])
            made[name] = json.loads(codec.dumps(loaded.run))
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def read_recipes(path: Path) -> dict[str, Run]:
    return {name: codec.loads(Run, json.dumps(run)) for name, run in json.loads(path.read_text("utf-8")).items()}


def quick(folder: Path) -> int:
    write_recipes(folder / "recipes.json")
    runs = read_recipes(folder / "recipes.json")
    here = str(Path(__file__).resolve().parents[2])
    prepare(folder / "data", (f"{here}/docs", f"{here}/src"), vocab_size=512, most_bytes=300_000)
    with Bench(runs, folder / "data") as bench:
        rows = [
            measure(bench, "toy batch=2048", 0, 2.0),
            measure(bench, "toy batch=2048 lr=*2 decay=0.3", 0, 0, 60_000),
        ]
    passed = all(is_good(row) for row in rows)
    print(f"{'PASS' if passed else 'FAIL'} two toys, {rows[0]['val_bits_per_byte']:.3f} bits a byte")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
