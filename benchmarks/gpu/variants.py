"""What was written without a card, tried on one: each variant first compared with the plain form, then timed.

    PYTHONPATH=src python benchmarks/gpu/variants.py [--quick]

    optimizer   Muon's step compiled and eager: the largest difference after three steps, seconds, graphs, first call
    attention   the start-up race at the shapes of the engine's table, with who is out and why
    segments    a decoder on packed rows by FlexAttention and by a mask: gradients compared, tokens a second
    engine      whole steps at d12, d12-swift and d20 with the optimizer compiled and eager
    saving      how long training waits for a checkpoint

--quick runs all of it on a CPU at toy sizes, traced but not turned into kernels: that the script works, nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

import engine  # noqa: E402
import save_stall  # noqa: E402
from _result import write_result  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.model.attention_backends import race_attention, race_segments  # noqa: E402
from homing.lm.model.sdpa import can_flex  # noqa: E402
from homing.lm.train.optim.param_groups import build_optimizer  # noqa: E402
from homing.wire.run_json import Model, Optimizer  # noqa: E402

TOY = Model("stock", "qwen3", 2, 64, 4, 4, 16, 128, 128, 256, False)
TOY_SWIFT = Model("swift", "swift", 2, 64, 4, 4, 16, 128, 128, 256, False)
SPEC = Optimizer(
    "muon", 0.01, 0.01, 0.004, 0.004, 0.1, lr_scalar=0.01, variance_beta=0.9, is_cautious=True, momentum_start=0.85
)
# Of the weights after three steps: bf16 products in another order move an update by its last bits.
MOST_DIFFERENCE = 2e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    is_quick = parser.parse_args().quick
    device = torch.device("cpu" if is_quick else "cuda")
    shapes = {"toy": TOY, "toy-swift": TOY_SWIFT}
    if not is_quick:
        shapes = {name: engine.CASES[name].shape for name in ("d12", "d12-swift", "d20", "cs336", "2b")}
    figures: dict[str, Any] = {"optimizer": {}, "attention": {}, "segments": {}, "engine": {}}
    problems: list[str] = []
    for name, shape in shapes.items():
        if name != "2b":  # it uses AdamW
            figures["optimizer"][name] = found = try_optimizer(shape, device, is_quick)
            problems += [f"optimizer {name}"] * (found["difference"] > MOST_DIFFERENCE)
            print(f"{name:10} optimizer {found}", flush=True)
        figures["attention"][name] = found = try_attention(shape, device)
        print(f"{name:10} attention {found}", flush=True)
    for name in ("toy", "toy-swift") if is_quick else ("d12", "d12-swift"):
        figures["segments"][name] = found = try_segments(shapes[name], device, rows=2 if is_quick else 16)
        problems += [f"segments {name}"] * (found["difference"] > 0.05)
        print(f"{name:10} segments {found}", flush=True)
    if not is_quick:
        figures["errors"] = engine.compare_kernels(device)
        figures["engine"] = {name: try_engine(name, device) for name in ("d12", "d12-swift", "d20")}
    figures["saving"] = try_saving(shapes["toy" if is_quick else "d20"], device)
    print(f"saving {figures['saving']}", flush=True)
    if not is_quick:
        write_result("gpu-variants", figures, passed=not problems)
    summary = f"differs: {', '.join(problems)}" if problems else "every variant computes what the plain form does"
    print(f"{'FAIL' if problems else 'PASS'} {summary}")
    return 1 if problems else 0


def try_optimizer(shape: Model, device: torch.device, is_quick: bool) -> dict[str, Any]:
    models = [built(shape, device) for _ in range(2)]
    eager, compiled = (build_optimizer(model, SPEC) for model in models)
    compiled.compile_steps(**({"backend": "aot_eager"} if is_quick else {}))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    begun = time.perf_counter()
    compiled.rehearse()
    wait(device)
    first_s = time.perf_counter() - begun
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    for step in range(3 if is_quick else 10):
        for name, model, optimizer in (("eager", models[0], eager), ("compiled", models[1], compiled)):
            generator = torch.Generator(device).manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = 1e-3 * torch.randn(parameter.shape, device=device, generator=generator)
            wait(device)
            begun = time.perf_counter()
            optimizer.step(1.0 / (1 + step), num_steps=40 * step)
            wait(device)
            seconds[name].append(time.perf_counter() - begun)
        if step == 2:
            pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
            difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs, "a rate or a momentum compiled it anew"
    found = {f"{name}_s": round(statistics.median(times), 4) for name, times in seconds.items()}
    engine.forget()
    return {**found, "difference": difference, "num_graphs": num_graphs - before, "first_s": round(first_s, 1)}


def try_attention(shape: Model, device: torch.device) -> dict[str, Any]:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    causal, inside = race_attention(shape, device, kind), race_segments(shape, device, kind)
    return {"causal": causal.winner, "causal_told": causal.summary(), "inside": inside.winner, "told": inside.summary()}


def try_segments(shape: Model, device: torch.device, rows: int) -> dict[str, Any]:
    """Against fp32 by the mask, as bf16 alone would hide what differs."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(0, shape.vocab_size, (rows, shape.context), device=device, generator=generator)
    edges = torch.rand(rows, shape.context, device=device, generator=generator) < 6.0 / shape.context
    segments = edges.int().cumsum(1).int()
    segments[:, -shape.context // 8 :] = -1
    found: dict[str, Any] = {}
    wanted = gradients(shape, device, ids[:2], segments[:2], "fp32", is_flex=False)
    worst = 0.0
    for name, is_flex in (("mask", False), ("flex", True)):
        if is_flex and not can_flex(shape.context, device):
            continue
        precision = "bf16" if device.type == "cuda" else "fp32"
        mine = gradients(shape, device, ids[:2], segments[:2], precision, is_flex=is_flex)
        floor = 1e-3 * max(float(right.norm()) for right in wanted)
        pairs = zip(mine, wanted, strict=True)
        worst = max(worst, *(float((a - b).norm() / (b.norm() + floor)) for a, b in pairs))
        found[f"{name}_tokens_per_s"] = round(speed(shape, device, ids, segments, precision, is_flex=is_flex))
    found["without_tokens_per_s"] = round(speed(shape, device, ids, None, precision, is_flex=False))
    return {**found, "difference": worst}


def gradients(
    shape: Model, device: torch.device, ids: torch.Tensor, segments: torch.Tensor, precision: str, *, is_flex: bool
) -> list[torch.Tensor]:
    model = built(shape, device).set_precision(precision)
    model.has_flex = is_flex
    model.loss(ids, ids.roll(-1, 1), segments=segments).backward()
    return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]


def speed(
    shape: Model, device: torch.device, ids: torch.Tensor, segments: torch.Tensor | None, precision: str, *,
    is_flex: bool,
) -> float:  # fmt: skip
    model = built(shape, device).set_precision(precision)
    model.has_flex = is_flex
    model.compile_blocks(is_on=device.type == "cuda")

    def step() -> None:
        model.loss(ids, ids.roll(-1, 1), segments=segments).backward()
        for parameter in model.parameters():
            parameter.grad = None

    engine.seconds_of(step, 2, device)
    seconds = statistics.median(engine.seconds_of(step, 3, device) for _ in range(3))
    engine.forget()
    return ids.numel() / seconds


def try_engine(name: str, device: torch.device) -> dict[str, Any]:
    case, found = engine.CASES[name], {}
    for word, is_on in (("compiled", True), ("eager", False)):
        step = engine.our_step(case, device, has_compiled_optimizer=is_on)
        rate = engine.tokens_of(case) / statistics.median(engine.timed(step, device))
        found[word] = {"tokens_per_s": round(rate), "mfu": rate * engine.flops_per_token(case.shape)}
        found[word]["mfu"] = round(found[word]["mfu"] / engine.peak_flops(), 4)
        print(f"{name:10} optimizer {word}: {found[word]}", flush=True)
        del step
        engine.forget()
    return found


def try_saving(shape: Model, device: torch.device) -> dict[str, Any]:
    model = built(shape, device)
    with tempfile.TemporaryDirectory(prefix="homing-variants-") as folder:
        return save_stall.measure(model, build_optimizer(model, SPEC), Path(folder))


def built(shape: Model, device: torch.device) -> Decoder:
    model = Decoder(shape)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # fresh scales and gates are nearly 0, and would hide what they let through
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
