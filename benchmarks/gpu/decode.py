"""Texts by captured steps on a real card: the same ids as by plain calls, then tokens per second both ways.

    PYTHONPATH=src python benchmarks/gpu/decode.py [--shapes 12x768,20x1280-swift] [--tokens 256] [--out FILE] [--quick]

    grown    a cache that is looked at as far as it is filled, kernel by kernel: how processors do it
    plain    steps of fixed shapes, kernel by kernel: what is done where capturing fails or is not worth it
    graph    the same steps captured, as `homing generate` does it on CUDA; capturing is in its tokens per second

    same     ids of graph that are those of plain, the likeliest and drawn ones: all of them, or it fails
    as grown how many of the first ids are those of grown too; it adds in another order, so near ties may fall otherwise
    ms       of a token in the middle of a text, so without capturing
    pays     tokens after which a capture has paid for itself (lm.generate.reader.WORTH)

A batch of 1 is `generate`, its ids picked on the host; a batch of 8 is the step alone with the likeliest id of each
row, read by the host at each step as rollouts do. Random weights in bf16. Passes when all ids are the same, each was
captured, graph is not slower than plain and memory is given back. Results go to results/decode.json, and to FILE.
--quick: a toy on any machine, where capturing is left out; it shows that the script works, nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from _result import RESULTS, write_result  # noqa: E402
from homing.lm.cuda_graphs import Graphs  # noqa: E402
from homing.lm.decoding_step import REACH, Steps, room_for  # noqa: E402
from homing.lm.generate import generate, sampling  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.model.attention import RowCache  # noqa: E402
from homing.lm.rl.rollout import lean_copy  # noqa: E402
from homing.sampling_settings import SamplingSettings  # noqa: E402
from homing.wire.run_json import Model  # noqa: E402

CASES = {
    "12x768": Model("stock", "qwen3", 12, 768, 6, 6, 128, 2048, 2048, 32768, False),
    "12x768-swift": Model("swift", "swift", 12, 768, 6, 6, 128, 3072, 2048, 32768, False, rope_base=1e5),
    "20x1280": Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, False),
    "20x1280-swift": Model("swift", "swift", 20, 1280, 10, 10, 128, 5120, 2048, 32768, False, rope_base=1e5),
}
TOY = Model("stock", "qwen3", 2, 32, 2, 1, 16, 64, 256, 256, False)
BATCHES = (1, 8)
WAYS = ("grown", "plain", "graph")
NUM_PROMPT = 32
GREEDY: dict[str, Any] = {"sampling": SamplingSettings(temperature=0.0)}
DRAWN: dict[str, Any] = {"sampling": SamplingSettings(seed=1)}
REPEATS = 2


class Captures:
    """What was captured, and how long it took."""

    def __init__(self, *, is_quick: bool) -> None:
        self.seconds: list[float] = []
        really = Graphs.capture

        def timed(graphs: Graphs, compute: Callable[[], None]) -> Callable[[], None]:
            begun = now()
            replay = really(graphs, compute)
            self.seconds.append(now() - begun)
            return replay

        def left_out(steps: Steps[Any], reach: int) -> None:
            self.seconds.append(0.0)

        if is_quick:
            Steps._capture = left_out  # type: ignore[method-assign]
        else:
            Graphs.capture = timed  # type: ignore[method-assign]


class Trial:
    """One shape with its weights, and texts of any way."""

    def __init__(self, shape: Model, batch: int, num_tokens: int, device: torch.device) -> None:
        self.shape, self.batch, self.num_tokens = shape, batch, num_tokens
        model = Decoder(shape)
        model.init_weights(0)
        with torch.no_grad():  # fresh heads are all alike, and the likeliest of them is chance
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        model.to(device)
        self.model = lean_copy(model, torch.bfloat16) if device.type == "cuda" else model
        self.problems: list[str] = []
        generator = torch.Generator().manual_seed(2)
        self.prompt_BT = torch.randint(shape.vocab_size, (batch, NUM_PROMPT), generator=generator)

    def text(self, way: str, settings: dict[str, Any]) -> Iterator[list[int]]:
        """The next ids of all rows, one after the other."""
        if self.batch > 1:
            yield from self._rows(way)
            return
        sampling.is_stepped = lambda device: way != "grown"
        sampling.WORTH = REACH + 1 if way == "plain" else WORTH
        ids = self.prompt_BT[0].tolist()
        for picked in generate(self.model, ids, num_tokens=self.num_tokens, notify=self.problems.append, **settings):
            yield [picked]

    @torch.no_grad()
    def _rows(self, way: str) -> Iterator[list[int]]:
        """Everything but the last of the prompt is read at once; then a step for each id."""
        model, prompt_BT, places = self.model, self.prompt_BT.to(self.model.device), NUM_PROMPT + self.num_tokens
        cache = model.new_cache(batch=self.batch, capacity=places)
        rows = RowCache(
            self.shape, batch=self.batch, capacity=room_for(places), device=model.device, dtype=model.compute_dtype
        )
        steps = Steps(model, rows, _likeliest, is_captured=way == "graph", notify=self.problems.append)
        model.next_logits(prompt_BT[:, :-1], cache if way == "grown" else rows)
        ids_B = self.prompt_BT[:, -1]
        for place in range(NUM_PROMPT - 1, places - 1):
            if way == "grown":
                ids_B = _likeliest(model.next_logits(ids_B.unsqueeze(1).to(model.device), cache)).cpu()
            else:
                ids_B = steps.step(ids_B, torch.full((self.batch,), place), furthest=place).cpu()
            yield ids_B.tolist()
        steps.close()

    def timed(self, way: str, captures: Captures) -> dict[str, Any]:
        """Of drawn ids; what is set up once was so when ids were compared."""
        whole, each = [], []
        captures.seconds.clear()
        for _ in range(REPEATS):
            begun = last = now()
            for _ in self.text(way, DRAWN):
                after = time.perf_counter()  # ids are read by the host: the card is done with them
                each.append(after - last)
                last = after
            whole.append(now() - begun)
        rate = self.batch * self.num_tokens / statistics.median(whole)
        found = {"tokens_per_s": round(rate, 1), "token_s": round(statistics.median(each), 7)}
        if way == "graph":
            found["capture_s"] = round(statistics.median(captures.seconds), 4) if captures.seconds else None
            found["captures_per_text"] = len(captures.seconds) / REPEATS
        return found


WORTH = sampling.WORTH


def _likeliest(logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(dim=-1)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("FAIL there is no CUDA card here; --quick runs a toy without it")
        return 1
    device = torch.device("cpu" if arguments.quick else "cuda")
    cases = {"toy": TOY} if arguments.quick else {name: CASES[name] for name in arguments.shapes.split(",")}
    num_tokens = 40 if arguments.quick else arguments.tokens
    captures, rows = Captures(is_quick=arguments.quick), dict[str, dict[str, Any]]()
    print(
        f"{'shape':14} {'batch':>5} {'same':>9} {'as grown':>8} {'grown/s':>8} {'plain/s':>8} {'graph/s':>8}"
        f" {'faster':>7} {'grown ms':>8} {'plain ms':>8} {'graph ms':>8} {'capture s':>9} {'pays':>5}"
    )
    for name, shape in cases.items():
        for batch in BATCHES:
            gc.collect()
            rows[f"{name} x {batch}"] = row = measure(Trial(shape, batch, num_tokens, device), captures)
            print(line(name, row), flush=True)
            if not arguments.quick:
                figures = {"card": torch.cuda.get_device_name(), "worth": WORTH, "reach": REACH, "rows": rows}
                write_result("decode", figures, passed=all(row["passed"] for row in rows.values()))
                if arguments.out:
                    shutil.copyfile(RESULTS / "decode.json", arguments.out)
    bad = [name for name, row in rows.items() if not row["passed"]]
    summary = f"PASS {len(rows)} shapes and batches, the ids of captured steps are those of plain calls"
    print(f"FAIL {', '.join(bad)}" if bad else summary)
    return 1 if bad else 0


def measure(trial: Trial, captures: Captures) -> dict[str, Any]:
    """Correctness first."""
    row: dict[str, Any] = {"shape": dataclasses.asdict(trial.shape), "batch": trial.batch, "tokens": trial.num_tokens}
    num_same = num_ids = 0
    for settings in (GREEDY, DRAWN) if trial.batch == 1 else (GREEDY,):
        grown, plain, graph = ([ids for step in trial.text(way, settings) for ids in step] for way in WAYS)
        num_ids += len(plain)
        num_same += sum(one == other for one, other in zip(plain, graph, strict=True))
        row["as_grown"] = _num_first_same(grown, graph)
    held_before = _held()
    row |= {way: trial.timed(way, captures) for way in WAYS}
    saved_s = row["plain"]["token_s"] - row["graph"]["token_s"]
    capture_s = row["graph"]["capture_s"]
    pays = round(capture_s / saved_s, 1) if capture_s and saved_s > 0 else None
    is_faster = row["graph"]["tokens_per_s"] >= row["plain"]["tokens_per_s"] or not torch.cuda.is_available()
    held_more = _held() - held_before
    passed = num_same == num_ids and capture_s is not None and not trial.problems and held_more <= 0 and is_faster
    row |= {"num_ids": num_ids, "num_same": num_same, "pays_tokens": pays, "held_bytes": held_more}
    return row | {"problems": trial.problems, "passed": passed}


def _held() -> int:
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _num_first_same(one: list[int], other: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def line(name: str, row: dict[str, Any]) -> str:
    same = f"{row['num_same']}/{row['num_ids']}"
    rates = " ".join(f"{row[way]['tokens_per_s']:8,.0f}" for way in WAYS)
    times = " ".join(f"{1e3 * row[way]['token_s']:8.2f}" for way in WAYS)
    faster = f"{row['graph']['tokens_per_s'] / row['plain']['tokens_per_s']:.2f}x"
    capture = "none" if row["graph"]["capture_s"] is None else f"{row['graph']['capture_s']:.3f}"
    pays = "never" if row["pays_tokens"] is None else f"{row['pays_tokens']:.0f}"
    why = f" {row['problems'][0]}" if row["problems"] else ""
    head = f"{name:14} {row['batch']:5} {same:>9} {row['as_grown']:8}"
    return f"{head} {rates} {faster:>7} {times} {capture:>9} {pays:>5}{why}"


if __name__ == "__main__":
    raise SystemExit(main())
