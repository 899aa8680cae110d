"""How fast the training engine is: whole optimizer steps on random tokens, by shape, with the parts apart.

    PYTHONPATH=src python benchmarks/engine.py [--shapes d12,d20] [--peer] [--memory] [--warm] [--quick]

Each row trains a decoder as the trainer does (micro-batches, clipping, optimizer) and reports the median of three
windows of ten steps: tokens a second, MFU by (6 N + 12 L d T) over the card's dense bf16 peak, peak memory, the first
step with compiling, the optimizer's share. `--peer` trains the same shape in transformers in the same process, with
fused AdamW, at the fastest of several rows at a time and modes of torch.compile; the row says which, and what was
tried. `--memory` measures peaks of more shapes, for the memory plan; `--warm` the first step of another process, with
what these compiled. Before anything is timed, kernels are compared with plain torch. Rows of the same card that are not
measured anew stay in the file. On a machine without CUDA, and with --quick, one small shape runs on the CPU against
transformers, neither of them compiled; passing there means at least its speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

# As the trainer does: threads that wait sleep. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from _result import RESULTS, origin, write_result
from homing.gpus import find_gpu
from homing.lm.model import Decoder
from homing.lm.model import fused_ops as fused_module
from homing.lm.model.model_shape import count_params
from homing.lm.train.optim.param_groups import build_optimizer, clip_gradients
from homing.wire.run_json import Model, Optimizer

WINDOWS, STEPS, WARMUP = 3, 10, 3
CPU_TURNS = 12


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Model
    rows: int  # of a micro-batch
    num_micro: int
    optimizer: str
    precision: str = "bf16"
    must: float = 0.0  # tokens a second, or MFU where below 1
    has_peer: bool = False


def stock(layers: int, width: int, heads: int, ffn: int, context: int, vocab: int, arch: str = "llama") -> Model:
    return Model("stock", arch, layers, width, heads, heads, width // heads, ffn, context, vocab, is_tied=False)


D12 = stock(12, 768, 6, 2048, 2048, 32768, "qwen3")
D20 = stock(20, 1280, 10, 3456, 2048, 32768, "qwen3")
TWO_B = stock(24, 2560, 40, 6912, 2048, 32000)
SWIFT = Model("swift", "swift", 12, 768, 6, 6, 128, 3072, 2048, 32768, is_tied=False, rope_base=1e5)
CASES = {
    # 524,288 tokens a step: what the dial gives depth 12, and half of what it gives depth 20.
    "d12": Case(D12, 32, 8, "muon", must=0.52),
    "d12-swift": Case(SWIFT, 32, 8, "muon"),
    "124m": Case(stock(12, 768, 12, 2048, 1024, 50304), 64, 4, "adamw", must=500_000, has_peer=True),
    "cs336": Case(stock(6, 512, 8, 1344, 1024, 10000), 128, 4, "adamw", must=2_000_000, has_peer=True),
    "d20": Case(D20, 32, 8, "muon", must=0.56),
    "d20-fp8": Case(D20, 32, 4, "muon", "fp8", must=0.65),
    "2b": Case(TWO_B, 16, 2, "adamw", must=40_000),
    "2b-fp8": Case(TWO_B, 16, 2, "adamw", "fp8", must=46_000),
}
PEAKS = {
    "goethe-75m": Case(Model("stock", "llama", 12, 640, 10, 5, 64, 1728, 512, 32768, True), 64, 2, "muon"),
    "medium-22m": Case(stock(6, 384, 6, 1024, 1024, 16384), 64, 2, "muon"),
    "1b-4": Case(stock(20, 2048, 32, 5504, 2048, 32000), 4, 2, "adamw"),
    "1b-8": Case(stock(20, 2048, 32, 5504, 2048, 32000), 8, 2, "muon"),
    "1b-8-fp8": Case(stock(20, 2048, 32, 5504, 2048, 32000), 8, 2, "muon", "fp8"),
    "124m-16": Case(stock(12, 768, 12, 2048, 1024, 50304), 16, 2, "muon"),
    "cs336-16": Case(stock(6, 512, 8, 1344, 1024, 10000), 16, 2, "muon"),
    "d12-8": Case(D12, 8, 2, "adamw"),
    "d12-swift-8": Case(SWIFT, 8, 2, "muon"),
}
PEER_MODES = ("default", "max-autotune-no-cudagraphs")  # of torch.compile, for transformers
SMALL = Case(stock(4, 128, 4, 344, 256, 2048), 16, 1, "adamw", "fp32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(CASES))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--first", help="time only that shape's first step, with the compiler's cache as it is")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if arguments.first:
        print(seconds_of(our_step(CASES[arguments.first], torch.device("cuda")), 1, torch.device("cuda")))
        return 0
    if arguments.quick or not torch.cuda.is_available():
        figures = on_cpu()
    else:
        with tempfile.TemporaryDirectory(prefix="homing-compiled-") as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # empty: first steps are cold
            figures = on_card([name for name in arguments.shapes.split(",") if name], arguments)
    best = ", ".join(f"{name} {row['tokens_per_s']:,.0f} tok/s" for name, row in figures["speed"].items())
    if not arguments.quick:
        keep(figures)
    print(f"{'PASS' if is_passed(figures) else 'FAIL'} {best}")
    return 0 if is_passed(figures) else 1


def keep(figures: dict[str, Any]) -> None:
    write_result("engine" if torch.cuda.is_available() else "engine-cpu", figures, passed=is_passed(figures))


def is_passed(figures: dict[str, Any]) -> bool:
    return all(row["passed"] for row in figures["speed"].values())


def on_cpu() -> dict[str, Any]:
    """Ours and transformers take turns, and of each the undisturbed turns count: the quickest third."""
    device = torch.device("cpu")
    ours, reference = our_step(SMALL, device), peer_step(SMALL, device, is_compiled=False)
    seconds_of(ours, 2, device), seconds_of(reference, 2, device)
    turns = [(seconds_of(ours, 1, device), seconds_of(reference, 1, device)) for _ in range(CPU_TURNS)]
    ours_s, peer_s = (statistics.mean(sorted(side)[: CPU_TURNS // 3]) for side in zip(*turns, strict=True))
    rate, ratio = tokens_of(SMALL) / ours_s, peer_s / ours_s
    print(f"small  {rate:,.0f} tok/s, {ratio:.2f} of transformers on this processor")
    return {"speed": {"small": {"tokens_per_s": rate, "ratio": ratio, "passed": ratio >= 1.0}}}


def on_card(names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name(), "errors": compare_kernels(device)}
    print(f"{figures['card']}; kernels against plain torch: {figures['errors']}")
    before = kept(figures["card"])
    figures["speed"], figures["peaks"] = before.get("speed", {}), before.get("peaks", {})
    for name in names:
        figures["speed"][name] = speed_row(name, CASES[name], device, arguments.peer)
        if arguments.warm:
            figures["speed"][name]["first_step_warm_s"] = warm_first_step(name)
        keep(figures)
    for name, case in PEAKS.items() if arguments.memory else ():
        figures["peaks"][name] = peak_row(name, case, device)
        keep(figures)
    return figures


def kept(card: str) -> dict[str, Any]:
    path = RESULTS / "engine.json"
    figures: dict[str, Any] = json.loads(path.read_text("utf-8"))["figures"] if path.exists() else {}
    return figures if figures.get("card") == card else {}


def warm_first_step(name: str) -> float:
    done = subprocess.run([sys.executable, __file__, "--first", name], capture_output=True, text=True, check=True)
    seconds = float(done.stdout.splitlines()[-1])
    print(f"{name:12} first step of a process that finds it compiled: {seconds:.1f} s", flush=True)
    return round(seconds, 1)


def speed_row(name: str, case: Case, device: torch.device, has_peer: bool) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    parts: dict[str, float] = {}
    step = our_step(case, device, parts)
    built_s = time.perf_counter() - begun
    first_s = seconds_of(step, 1, device)
    windows = timed(step, device)
    rate = tokens_of(case) / statistics.median(windows)
    row = {
        "tokens_per_s": round(rate),
        "mfu": round(rate * flops_per_token(case.shape) / peak_flops(), 4),
        "windows_s": [round(seconds, 4) for seconds in windows],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "rows": case.rows,
        "batch_tokens": tokens_of(case),
        "precision": case.precision,
        "optimizer": case.optimizer,
        "commit": origin()["commit"],
        "built_s": round(built_s, 1),
        "first_step_s": round(first_s, 1),
        "optimizer_s": round(optimizer_seconds(parts, step, device), 4),
        "shape": dataclasses.asdict(case.shape),
    }
    row["passed"] = (row["mfu"] if case.must < 1 else rate) >= case.must
    del step
    forget()
    if has_peer and case.has_peer:
        row |= peer_at_its_best(case, device)
        row["ratio"] = round(rate / row["peer_tokens_per_s"], 3)
    against = f", {row['ratio']:.2f} of transformers" if "ratio" in row else ""
    memory = row["peak_bytes"] / 1e9
    print(
        f"{name:12} {rate:>11,.0f} tok/s  mfu {row['mfu']:.1%}  {memory:5.1f} GB  first {first_s:.1f} s{against}",
        flush=True,
    )
    return row


def peak_row(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    step = our_step(case, device)
    seconds_of(step, 3, device)
    peak = torch.cuda.max_memory_allocated()
    print(f"{name:12} {peak / 1e9:6.2f} GB", flush=True)
    del step
    forget()
    return {
        "peak_bytes": peak, "rows": case.rows, "optimizer": case.optimizer, "precision": case.precision,
        "shape": dataclasses.asdict(case.shape),
    }  # fmt: skip


# -- what is timed -----------------------------------------------------------------------------------------------------


def our_step(
    case: Case, device: torch.device, parts: dict[str, Any] | None = None, *, has_compiled_optimizer: bool = True
) -> Callable[[], None]:
    """One optimizer step as the trainer takes it. `parts` gets the optimizer's half, to be timed alone."""
    model = Decoder(case.shape)
    model.init_weights(0)
    model.to(device).set_precision(case.precision)
    if device.type == "cuda":
        model.compile_blocks()
    optimizer = build_optimizer(model, spec_of(case.optimizer))
    optimizer.compile_steps(is_on=device.type == "cuda" and has_compiled_optimizer)
    micro = batches(case, device)

    def update() -> None:
        norm = clip_gradients(model, 1.0)
        optimizer.step(0.1, torch.isfinite(norm))

    def step() -> None:
        for ids, targets in micro:
            (model.loss(ids, targets) / case.num_micro).backward()
        update()
        if parts is None or "keep" not in parts:
            optimizer.zero_grad()

    if parts is not None:
        parts["update"] = update
    return step


def peer_at_its_best(case: Case, device: torch.device) -> dict[str, Any]:
    """Looks at each setting for a few steps, and measures the fastest as we are measured."""
    tried: list[dict[str, Any]] = []
    for setting in peer_settings(case):
        try:
            step = peer_step(setting.case, device, is_compiled=True, mode=setting.mode)
            seconds_of(step, WARMUP, device)
            rate = tokens_of(setting.case) / seconds_of(step, WARMUP, device)
            tried.append({"rows": setting.case.rows, "mode": setting.mode, "tokens_per_s": round(rate)})
            del step
        except torch.OutOfMemoryError:
            tried.append({"rows": setting.case.rows, "mode": setting.mode, "out_of_memory": True})
        forget()
        print(f"  transformers {tried[-1]}", flush=True)
    best = max((row for row in tried if "tokens_per_s" in row), key=lambda row: row["tokens_per_s"])
    chosen = next(s for s in peer_settings(case) if (s.case.rows, s.mode) == (best["rows"], best["mode"]))
    step = peer_step(chosen.case, device, is_compiled=True, mode=chosen.mode)
    rate = tokens_of(chosen.case) / statistics.median(timed(step, device))
    del step
    forget()
    text = f"torch.compile (mode {chosen.mode}), SDPA, bf16 autocast, fused AdamW, {chosen.case.rows} rows at a time"
    return {"peer_tokens_per_s": round(rate), "peer_settings": text, "peer_tried": tried}


@dataclasses.dataclass(frozen=True)
class PeerSetting:
    case: Case
    mode: str  # of torch.compile


def peer_settings(case: Case) -> list[PeerSetting]:
    """As many tokens in a step for all; rows at a time from half of ours to twice as many."""
    total = case.rows * case.num_micro
    rows = [each for each in (case.rows // 2, case.rows, case.rows * 2) if each and total % each == 0]
    return [
        PeerSetting(dataclasses.replace(case, rows=each, num_micro=total // each), mode)
        for each in rows
        for mode in PEER_MODES
    ]


def peer_step(case: Case, device: torch.device, *, is_compiled: bool, mode: str = "default") -> Callable[[], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = case.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.width, intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    loss_of: Any = torch.compile(model, dynamic=False, mode=mode) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    micro = batches(case, device)

    def step() -> None:
        for ids, _ in micro:
            with torch.autocast(device.type, torch.bfloat16, enabled=case.precision != "fp32"):
                loss = loss_of(input_ids=ids, labels=ids).loss / case.num_micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def optimizer_seconds(parts: dict[str, Any], step: Callable[[], None], device: torch.device) -> float:
    parts["keep"] = True  # the gradients of one more step stay, to be used again and again
    step()
    return seconds_of(parts["update"], STEPS, device)


def compare_kernels(device: torch.device) -> dict[str, float]:
    """Largest relative difference of any gradient between kernels and plain torch, both in bf16, and of the loss."""
    worst = {}
    for family, shape in (("stock", stock(2, 256, 2, 512, 128, 1000, "qwen3")), ("swift", None)):
        shape = shape or Model("swift", "swift", 4, 256, 2, 1, 128, 512, 128, 1000, False)
        found = [gradients(shape, device, has_triton) for has_triton in (True, False)]
        # A gradient that is tiny next to the others is only rounding error.
        floor = 1e-4 * max(float(gradient.norm()) for gradient in found[1])
        differences = [float((a - b).norm() / (b.norm() + floor)) for a, b in zip(*found, strict=True)]
        worst[family] = round(max(differences), 4)
        assert worst[family] < 0.05, f"{family}: kernels and plain torch differ by {worst[family]}"
    return worst


def gradients(shape: Model, device: torch.device, has_triton: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Decoder(shape)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.to(device).set_precision("bf16")
    ids = torch.randint(0, shape.vocab_size, (4, shape.context), device=device)
    before = fused_module.HAS_TRITON
    fused_module.HAS_TRITON = has_triton
    try:
        model.loss(ids, ids.roll(-1, 1)).backward()
    finally:
        fused_module.HAS_TRITON = before
    return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]


# -- measuring ---------------------------------------------------------------------------------------------------------


def timed(step: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds per step of each window."""
    seconds_of(step, WARMUP, device)
    return [seconds_of(step, STEPS, device) for _ in range(WINDOWS)]


def seconds_of(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / num_steps


def batches(case: Case, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    size = (case.rows, case.shape.context)
    made = [torch.randint(0, case.shape.vocab_size, size, device=device) for _ in range(case.num_micro)]
    return [(ids, ids.roll(-1, 1)) for ids in made]


def spec_of(kind: str) -> Optimizer:
    return Optimizer(
        kind, lr=0.01, lr_embedding=0.01, lr_head=0.004, lr_norm=0.004, weight_decay=0.1, lr_scalar=0.01,
        variance_beta=0.9 if kind == "muon" else 0.0,
    )  # fmt: skip


def tokens_of(case: Case) -> int:
    return case.rows * case.num_micro * case.shape.context


def flops_per_token(shape: Model) -> float:
    parts = count_params(shape)
    matrices = parts["attention"] + parts["feed-forward"] + shape.vocab_size * shape.width
    return 6.0 * matrices + 12.0 * shape.num_layers * shape.num_heads * shape.head_size * shape.context


def peak_flops() -> float:
    gpu = find_gpu(torch.cuda.get_device_name())
    assert gpu is not None, "the MFU needs the GPU's peak, which is unknown"
    return gpu.bf16_tflops * 1e12


def forget() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
