"""Micro-batches as CUDA graphs on a real card: the same gradients as by plain calls, then the time of a step both ways.

    PYTHONPATH=src python benchmarks/gpu/graphs.py [--shapes 6x384@8k,12x768@64k] [--out FILE] [--quick]

    equal    loss and every gradient, on rows that were not captured: bit for bit where two plain passes agree so, else
             within 1%. Printed as equal / repeatable / all gradients
    plain    seconds of a whole step (pass, clipping, optimizer), the card waited for once in a window only
    graph    the same with `train.graphs: on`, and what capturing took
    auto     what `train.graphs: auto` picks by itself, in its own words

Rows of random tokens, one micro-batch a step, compiled as the trainer compiles. Passes when each is captured, all is
equal and auto never picks what is slower by more than a tenth. Results go to results/graphs.json, and to FILE.
--quick: a toy on any machine, on a stand-in for a card that computes again instead of replaying; it shows that the
script works, nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from _result import RESULTS, write_result  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.model.attention_backends import race_attention, use_attention  # noqa: E402
from homing.lm.train.compute import forward_backward as passes_module  # noqa: E402
from homing.lm.train.compute.batch import Batch  # noqa: E402
from homing.lm.train.compute.forward_backward import Card, Passes, Timing  # noqa: E402
from homing.lm.train.optim.param_groups import Optimizer, build_optimizer, clip_gradients  # noqa: E402
from homing.wire.run_json import Model  # noqa: E402
from homing.wire.run_json import Optimizer as OptimizerSpec  # noqa: E402

SMALL = Model("stock", "qwen3", 6, 384, 6, 6, 64, 1024, 1024, 16384, False)
LARGER = Model("stock", "qwen3", 12, 768, 6, 6, 128, 2048, 2048, 32768, False)
TOY = Model("stock", "qwen3", 2, 32, 2, 1, 16, 64, 32, 256, False)
CASES = {
    "6x384@8k": (SMALL, 8),
    "6x384@64k": (SMALL, 64),
    "12x768@8k": (LARGER, 4),
    "12x768@64k": (LARGER, 32),
}
MUON = OptimizerSpec("muon", 0.02, 0.01, 0.01, 0.01, 0.0)
WARM, WINDOWS, STEPS = 5, 5, 20
MOST_DIFFERENCE = 0.01  # for a gradient of kernels that add in any order
MOST_SLOWER = 1.1


class Again(Card):
    """A stand-in for a GPU: it computes again instead of replaying."""

    def timing(self, run: Callable[[], object]) -> Timing:
        begun = time.perf_counter()
        run()
        seconds = time.perf_counter() - begun
        return Timing(seconds, seconds)

    def has_room(self) -> bool:
        return True

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute

    def forget(self) -> None:
        pass


class Trial:
    """One shape with its weights and its optimizer, and passes of either kind."""

    def __init__(self, shape: Model, rows: int, device: torch.device) -> None:
        self.shape, self.rows, self.device = shape, rows, device
        self.messages: list[str] = []
        self.model = Decoder(shape)
        self.model.init_weights(0)
        self.model.to(device)
        if device.type == "cuda":
            self.model.set_precision("bf16")
            use_attention(race_attention(shape, device, torch.bfloat16).winner)
            self.model.compile_blocks()
        self.optimizer: Optimizer = build_optimizer(self.model, MUON)
        self.optimizer.compile_steps(is_on=device.type == "cuda")
        self.batch = self.drawn(0)

    def drawn(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.shape.vocab_size, (self.rows, self.shape.context + 1), generator=generator)
        ids = ids.to(self.device)
        return Batch(ids[:, :-1], ids[:, 1:], self.rows * self.shape.context)

    def passes(self, asked: str) -> Passes:
        def notify(kind: str, text: str, *, notice: bool = False, step: int | None = None, **data: object) -> None:
            self.messages.append(text)

        return Passes(self.model, self.device, asked, notify)

    def gradients(self, found: Passes, batch: Batch) -> list[Tensor]:
        """The loss, and each gradient."""
        found.begin([batch])
        loss = found.run(batch).clone()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return [loss, *gradients]

    def step(self, found: Passes) -> None:
        found.begin([self.batch])
        loss = found.run(self.batch)
        norm = clip_gradients(self.model, 1.0)
        self.optimizer.step(0.01, torch.isfinite(norm) & torch.isfinite(loss))
        self.optimizer.zero_grad()

    def step_s(self, found: Passes, num_windows: int, num_steps: int) -> float:
        for _ in range(WARM):
            self.step(found)
        windows = []
        for _ in range(num_windows):
            begun = self.now()
            for _ in range(num_steps):
                self.step(found)
            windows.append((self.now() - begun) / num_steps)
        return statistics.median(windows)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        """Since it was asked last."""
        if self.device.type != "cuda":
            return 0
        found = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("FAIL there is no CUDA card here; --quick runs a toy on a stand-in")
        return 1
    torch.set_float32_matmul_precision("high")
    device = torch.device("cpu" if arguments.quick else "cuda")
    cases = {name: CASES[name] for name in arguments.shapes.split(",")}
    if arguments.quick:
        passes_module.card_of = lambda device: Again(device)
        cases = {"toy": (TOY, 4)}
    rows: dict[str, dict[str, Any]] = {}
    print(
        f"{'shape':12} {'equal':>14} {'plain ms':>9} {'graph ms':>9} {'faster':>7} {'plain GB':>9} {'graph GB':>9} auto"
    )
    for name, (shape, num_rows) in cases.items():
        rows[name] = row = measure(Trial(shape, num_rows, device), is_quick=arguments.quick)
        print(line(name, row), flush=True)
        gc.collect()
        if not arguments.quick:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            figures = {"card": torch.cuda.get_device_name(), "rows": rows}
            write_result("graphs", figures, passed=all(row["passed"] for row in rows.values()))
            if arguments.out:
                shutil.copyfile(RESULTS / "graphs.json", arguments.out)
    bad = [name for name, row in rows.items() if not row["passed"]]
    print(f"FAIL {', '.join(bad)}" if bad else f"PASS {len(rows)} shapes, gradients equal to those of plain calls")
    return 1 if bad else 0


def measure(trial: Trial, *, is_quick: bool) -> dict[str, Any]:
    windows, steps = (1, 1) if is_quick else (WINDOWS, STEPS)
    plain, graphs, auto = (trial.passes(asked) for asked in ("off", "on", "auto"))
    trial.peak()
    plain_s = trial.step_s(plain, windows, steps)  # also what compiles and warms up
    plain_bytes = trial.peak()
    auto.decide(trial.batch)
    auto_told = trial.messages[-1]
    auto.forget()
    begun = trial.now()
    graphs.decide(trial.batch)
    capture_s = trial.now() - begun
    equal = compare(trial, plain, graphs)
    trial.peak()
    graph_s = trial.step_s(graphs, windows, steps)
    picked_s = graph_s if auto.picked == "on" else plain_s
    is_well_picked = is_quick or picked_s <= MOST_SLOWER * min(plain_s, graph_s)
    return {
        "shape": dataclasses.asdict(trial.shape), "batch_tokens": trial.rows * trial.shape.context, **equal,
        "plain_s": round(plain_s, 6), "graph_s": round(graph_s, 6), "capture_s": round(capture_s, 3),
        "plain_reserved_bytes": plain_bytes, "graph_reserved_bytes": trial.peak(),
        "auto": auto.picked, "auto_told": auto_told,
        "passed": graphs.picked == "on" and equal["is_equal"] and is_well_picked,
    }  # fmt: skip


def compare(trial: Trial, plain: Passes, graphs: Passes) -> dict[str, Any]:
    batch = trial.drawn(1)
    first, again = trial.gradients(plain, batch), trial.gradients(plain, batch)
    found = trial.gradients(graphs, batch)
    repeating = [number for number in range(len(first)) if torch.equal(first[number], again[number])]
    num_same = sum(torch.equal(first[number], found[number]) for number in repeating)
    worst = max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(first, found, strict=True))
    return {
        "num_tensors": len(first), "num_repeating": len(repeating), "num_bit_equal": num_same,
        "largest_difference": worst, "is_equal": num_same == len(repeating) and worst <= MOST_DIFFERENCE,
    }  # fmt: skip


def line(name: str, row: dict[str, Any]) -> str:
    same = f"{row['num_bit_equal']}/{row['num_repeating']}/{row['num_tensors']}"
    faster = f"{row['plain_s'] / row['graph_s']:.2f}x"
    memory = [f"{row[key] / 1e9:9.1f}" for key in ("plain_reserved_bytes", "graph_reserved_bytes")]
    times = f"{1e3 * row['plain_s']:9.1f} {1e3 * row['graph_s']:9.1f}"
    return f"{name:12} {same:>14} {times} {faster:>7} {' '.join(memory)} {row['auto']}: {row['auto_told']}"


if __name__ == "__main__":
    raise SystemExit(main())
