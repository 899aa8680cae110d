"""LoRA and QLoRA of the Qwen2.5-7B shape with random weights on a real card, against transformers + peft.

    PYTHONPATH=src python benchmarks/gpu/lora.py [--parts check,lora,qlora,peer] [--profile] [--out FILE] [--quick]

    check   kernels and gradients on the card against plain torch on the CPU, before anything is timed
    lora    tokens a second at the best micro-batch and recompute; peak memory at micro-batch 1 with all recomputed
    qlora   the same memory with the base in NF4, and how much slower it is at equal micro-batch and recompute
    peer    transformers + peft as people run it (bf16 base, fp32 adapters under autocast, SDPA, fused AdamW), the same
            shape, rank and tokens, at its own best micro-batch, with and without recomputing; not compiled

Rows of 2,048 random tokens, adapters of rank 16 on all seven projections, AdamW. A setting is looked at for a few steps
and the best one measured in three windows of ten, without and with documents that do not see each other; memory in one.
Bounds: LoRA on packed rows 14,000 tok/s and 1.6 times the peer (which computes such rows as one text), 20 GB at
micro-batch 1; QLoRA 9 GB, and at most 1.3 times slower than LoRA.
--quick runs every part with a tiny shape, on any machine, and bounds nothing but that losses are finite and equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _result import RESULTS, write_result
from homing.lm.model import Decoder, config_json, lora, nf4
from homing.lm.model.sdpa import can_flex
from homing.lm.train.optim.param_groups import build_optimizer, clip_gradients
from homing.wire.run_json import Lora, Model, Optimizer

SEVEN_B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False, rope_base=1e6)
TINY = Model("stock", "qwen2", 2, 64, 4, 2, 16, 96, 32, 256, False)
SETTINGS = Lora(rank=16, alpha=32.0, targets=["all"])
ADAM = Optimizer(kind="adamw", lr=1e-4, lr_embedding=1e-4, lr_head=1e-4, lr_norm=1e-4, weight_decay=0.0)
WINDOWS, STEPS, LOOK, WARM = 3, 10, 3, 3
DOCUMENTS = 4  # in a packed row
PEER_ROWS = (2, 4, 6, 8)
MUST = {"tokens_per_s": 14_000, "peak": 20e9, "ratio": 1.6, "qlora_peak": 9e9, "qlora_slowdown": 1.3}

Step = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Where:
    device: torch.device
    shape: Model
    rows: tuple[int, ...]  # micro-batches to look at
    recompute: tuple[str, ...]
    is_card: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,lora,qlora,peer")
    parser.add_argument("--rows", default="2,4,8,12", help="micro-batches to look at")
    parser.add_argument("--recompute", default="none,half,all", help="and what is computed again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the time of the best LoRA step goes")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("FAIL no CUDA device; --quick runs a tiny shape anywhere")
        return 1
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # a graph for every setting that is looked at
    rows, kinds = tuple(int(n) for n in arguments.rows.split(",")), tuple(arguments.recompute.split(","))
    where = Where(torch.device("cuda"), SEVEN_B, rows, kinds, True)
    if arguments.quick:
        where = Where(torch.device("cpu"), TINY, (1, 2), kinds, False)
    figures = measure(where, arguments.parts.split(","), has_profile=arguments.profile)
    misses = judge(figures) if where.is_card else judge_quick(figures)
    if where.is_card:
        write_result("lora", figures, passed=not misses)
        if arguments.out:
            shutil.copyfile(RESULTS / "lora.json", arguments.out)
    print(f"FAIL {'; '.join(misses)}" if misses else f"PASS {summary(figures)}")
    return 1 if misses else 0


def measure(where: Where, parts: list[str], *, has_profile: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name() if where.is_card else "cpu"}
    print(f"{figures['card']}; NF4 is dequantised by {nf4.dequantize_path(where.device)}")
    if "check" in parts:
        figures["check"] = check(where)
    if "lora" in parts:
        figures["lora"] = our_figures(where, "lora", has_profile=has_profile)
        keep(where, figures)
    if "qlora" in parts:
        rows = figures.get("lora", {}).get("best", {}).get("rows", 1)
        recompute = figures.get("lora", {}).get("best", {}).get("recompute", "all")
        figures["qlora"] = our_figures(where, "qlora", only=(rows, recompute))
        keep(where, figures)
    if "peer" in parts:
        figures["peer"] = peer_figures(where)
    return figures


def keep(where: Where, figures: dict[str, Any]) -> None:
    """A card is lent for minutes: what is measured stays, not yet judged, if the next part is cut off."""
    if where.is_card:
        write_result("lora", figures, passed=False)


# -- ours --------------------------------------------------------------------------------------------------------------


def our_figures(
    where: Where, method: str, *, has_profile: bool = False, only: tuple[int, str] | None = None
) -> dict[str, Any]:
    """The base is built once and kept; what changes between settings is how much of a forward is kept."""
    model, optimizer = our_model(where, method)
    figures: dict[str, Any] = {"least": least(where, method, model, optimizer)}
    settings = [only] if only else list(itertools.product(where.rows, where.recompute))
    looked = []
    for rows, kind in settings:
        row = look(where, our_step(where, model, optimizer, rows, kind), rows)
        looked.append({**row, "rows": rows, "recompute": kind})
        print(f"{method:<6} look  {looked[-1]}", flush=True)
    figures["looked_at"] = looked
    best = max((row for row in looked if "tokens_per_s" in row), key=lambda row: row["tokens_per_s"])
    step = our_step(where, model, optimizer, **setting(best))
    figures["best"] = {**best, **timed(where, step, best["rows"])}
    print(f"{method:<6} best  {row_text(figures['best'])}")
    figures["packed"] = packed_row(where, model, optimizer, best)
    if has_profile and where.is_card:
        figures["profile"] = profile(step)
    del model, optimizer, step
    clean(where)
    return figures


def least(where: Where, method: str, model: Decoder, optimizer: Any) -> dict[str, Any]:
    """One row at a time, everything computed again."""
    row = {"rows": 1, "recompute": "all", **timed(where, our_step(where, model, optimizer, 1, "all"), 1, 1)}
    if importlib.util.find_spec("pydantic") is None:
        print(f"{method:<6} least {row_text(row)}; no plan to compare with: pydantic is not installed here")
        return row
    from homing.config.estimate.memory import memory_of

    plan = memory_of(where.shape, "adamw", precision="bf16", method=method, lora=SETTINGS, recompute="all")
    row["planned_bytes"] = plan.peak(1) - plan.cuda
    print(f"{method:<6} least {row_text(row)}; planned {row['planned_bytes'] / 1e9:.2f} GB without CUDA itself")
    return row


def our_model(where: Where, method: str) -> tuple[Decoder, Any]:
    with torch.device("meta"):
        model = Decoder(where.shape)
    precision = "bf16" if where.is_card else "fp32"
    begun = time.perf_counter()
    storage = lora.storage_for(method, precision)
    lora.load_base(model, random_weights(model, where.device), storage=storage, device=where.device)
    lora.add_lora(model, SETTINGS, seed=0)
    model.set_precision(precision)
    model.compile_blocks(is_on=where.is_card)
    print(f"{method:<6} base in {storage} after {time.perf_counter() - begun:.1f} s")
    return model, build_optimizer(model, ADAM)


def random_weights(model: Decoder, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """As a checkpoint would bring them: one at a time, in bf16, the same for every method. Billions are drawn on the
    card: on a CPU that alone takes minutes."""
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        shape = model.cut_padding(name, parameter).shape
        if len(shape) == 1:
            yield name, torch.full(shape, 1.0 if "norm" in name else 0.0, dtype=torch.bfloat16)
        else:
            generator = torch.Generator(device).manual_seed(number)
            drawn = torch.empty(shape, device=device, dtype=torch.bfloat16)
            yield name, drawn.normal_(0.0, 0.02, generator=generator)


def packed_row(where: Where, model: Decoder, optimizer: Any, best: dict[str, Any]) -> dict[str, Any]:
    """What fails here fails the verdict, and not the figures that are measured already."""
    try:
        step = our_step(where, model, optimizer, **setting(best), is_packed=True)
        row = {**best, **timed(where, step, best["rows"])}
    except RuntimeError as error:
        print(f"       packed rows fail: {error}")
        return {"error": str(error)[:500]}
    print(f"       with {DOCUMENTS} documents in a row, each by itself: {row_text(row)}")
    return row


def setting(row: dict[str, Any]) -> dict[str, Any]:
    return {"rows": row["rows"], "recompute": row["recompute"]}


def our_step(
    where: Where, model: Decoder, optimizer: Any, rows: int, recompute: str, *, is_packed: bool = False
) -> Step:
    ids, targets = tokens(where, rows)
    numbers = itertools.count()
    segments = None
    if is_packed:
        at = torch.arange(where.shape.context, device=where.device)
        segments = (at * DOCUMENTS // where.shape.context).int().expand(rows, -1).contiguous()
    model.has_flex = is_packed and can_flex(where.shape.context, where.device)

    def step() -> Tensor:
        model.set_recompute(recompute)
        lora.begin_step(model, next(numbers))
        loss = model.loss(ids, targets, segments=segments)
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    return step


# -- transformers + peft -----------------------------------------------------------------------------------------------


def peer_figures(where: Where) -> dict[str, Any]:
    if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
        print("peer   is not installed here")
        return {"missing": "transformers and peft are not both installed"}
    model, optimizer = peer_model(where)
    looked = []
    # Whatever we are asked to look at ourselves: the peer gets what suits it best.
    for rows, is_again in itertools.product(PEER_ROWS if where.is_card else where.rows, (False, True)):
        row = look(where, peer_step(where, model, optimizer, rows, is_again), rows)
        looked.append({**row, "rows": rows, "recompute": "all" if is_again else "none"})
        print(f"peer   look  {looked[-1]}", flush=True)
    best = max((row for row in looked if "tokens_per_s" in row), key=lambda row: row["tokens_per_s"])
    step = peer_step(where, model, optimizer, best["rows"], best["recompute"] == "all")
    settings = "bf16 base, fp32 adapters under autocast, SDPA, fused AdamW, not compiled"
    figures = {"looked_at": looked, "settings": settings, "best": {**best, **timed(where, step, best["rows"])}}
    print(f"peer   best  {row_text(figures['best'])}")
    del model, optimizer, step
    clean(where)
    return figures


def peer_model(where: Where) -> tuple[Any, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{k: v for k, v in config_json(where.shape).items() if k != "architectures"})
    dtype = torch.bfloat16 if where.is_card else torch.float32
    with torch.device(where.device):
        model = Qwen2ForCausalLM(config).to(dtype)
    targets = lora.adapter_config(SETTINGS, "")["target_modules"]
    settings = LoraConfig(
        r=SETTINGS.rank, lora_alpha=int(SETTINGS.alpha), target_modules=targets, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, settings)
    adapted.enable_input_require_grads()  # without it nothing is recomputed, because the embedding is frozen
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return adapted.train(), torch.optim.AdamW(trained, lr=ADAM.lr, weight_decay=0.0, fused=where.is_card)


def peer_step(where: Where, model: Any, optimizer: Any, rows: int, is_again: bool) -> Step:
    ids, targets = tokens(where, rows)

    def step() -> Tensor:
        if is_again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        # Targets are shifted already; the model would shift them once more.
        with torch.autocast(where.device.type, torch.bfloat16, enabled=where.is_card):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# -- the stop-watch ----------------------------------------------------------------------------------------------------


def tokens(where: Where, rows: int) -> tuple[Tensor, Tensor]:
    size = (rows, where.shape.context + 1)
    drawn = torch.randint(where.shape.vocab_size, size, generator=torch.Generator().manual_seed(rows)).to(where.device)
    return drawn[:, :-1], drawn[:, 1:]


def look(where: Where, step: Step, rows: int) -> dict[str, Any]:
    """A few steps, to see whether a setting fits and is worth measuring."""
    try:
        seconds_of(where, step, 1)
        seconds = seconds_of(where, step, LOOK) / LOOK
    except torch.OutOfMemoryError:
        clean(where)
        return {"out_of_memory": True}
    return {"tokens_per_s": round(rows * where.shape.context / seconds)}


def timed(where: Where, step: Step, rows: int, num_windows: int = WINDOWS) -> dict[str, Any]:
    for _ in range(WARM if where.is_card else 1):  # a late graph would be compiled in the first window
        loss = float(step())
    clean(where)
    if where.is_card:
        torch.cuda.reset_peak_memory_stats()
    num_windows, num_steps = (num_windows, STEPS) if where.is_card else (1, 1)
    windows = [seconds_of(where, step, num_steps) / num_steps for _ in range(num_windows)]
    rate = rows * where.shape.context / statistics.median(windows)
    peak = torch.cuda.max_memory_allocated() if where.is_card else 0
    free, total = torch.cuda.mem_get_info() if where.is_card else (0, 0)
    return {
        "tokens_per_s": round(rate), "windows_s": [round(s, 4) for s in windows], "peak_bytes": peak,
        "card_bytes": total - free, "loss": loss,
    }  # fmt: skip


def seconds_of(where: Where, step: Step, num: int) -> float:
    begun = time.perf_counter()
    for _ in range(num):
        step()
    if where.is_card:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def clean(where: Where) -> None:
    gc.collect()
    if where.is_card:
        torch.cuda.empty_cache()


def profile(step: Step) -> list[dict[str, Any]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda event: event.self_device_time_total, reverse=True)[:25]
    for row in rows:
        print(f"       {row.self_device_time_total / 1e3:9.2f} ms  {row.count:5d}  {row.key[:90]}")
    return [{"name": r.key[:120], "ms": r.self_device_time_total / 1e3, "count": r.count} for r in rows]


# -- right before fast -------------------------------------------------------------------------------------------------


def check(where: Where) -> dict[str, float]:
    """The largest relative error of what the card computes, by part, against fp32 on the CPU."""
    errors = {}
    for storage in ("bf16", "nf4"):
        plain = gradients(storage, torch.device("cpu"), "fp32")
        there = gradients(storage, where.device, "bf16" if where.is_card else "fp32")
        errors[f"gradients {storage}"] = max(relative(there[name], plain[name]) for name in plain)
    weight = torch.empty(512, 640).normal_(generator=torch.Generator().manual_seed(0))
    parts = nf4.quantize(weight)
    moved = nf4.Nf4(*(part.to(where.device) for part in parts))
    exact = nf4.dequantize(parts, weight.shape, torch.float32)
    errors["nf4"] = relative(nf4.dequantize(moved, weight.shape, torch.float32).cpu(), exact)
    errors["nf4 made there"] = relative(
        nf4.dequantize(nf4.quantize(weight.to(where.device)), weight.shape, torch.float32).cpu(), exact
    )
    print("check  " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    return errors


def gradients(storage: str, device: torch.device, precision: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Decoder(TINY)
    lora.load_base(model, random_weights(model), storage=storage, device=device)
    lora.add_lora(model, SETTINGS, seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            noise = torch.empty(parameter.shape).normal_(0.0, 0.05, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise.to(device))
    model.set_precision(precision).set_recompute("half")
    drawn = torch.randint(TINY.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1)).to(device)
    model.loss(drawn[:, :-1], drawn[:, 1:]).backward()
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(figures: dict[str, Any]) -> list[str]:
    ours, four, peer = (figures.get(part, {}) for part in ("lora", "qlora", "peer"))
    errors = figures.get("check", {})
    misses = [f"{name} is off by {error:.1%}" for name, error in errors.items() if error > bound(name)]
    if ours:
        rate, peak = ours["packed"].get("tokens_per_s", 0), ours["least"]["peak_bytes"]
        misses += [f"LoRA {rate:,} tok/s of {MUST['tokens_per_s']:,}"] if rate < MUST["tokens_per_s"] else []
        misses += [f"LoRA {peak / 1e9:.1f} GB"] if peak > MUST["peak"] else []
    if ours and "best" in peer:
        figures["ratio"] = ours["packed"].get("tokens_per_s", 0) / peer["best"]["tokens_per_s"]
        misses += [f"{figures['ratio']:.2f} of the peer"] if figures["ratio"] < MUST["ratio"] else []
    misses += [peer["missing"]] if "missing" in peer else []
    misses += ["packed rows fail" for part in (ours, four) if "error" in part.get("packed", {})]
    if four:
        peak = four["least"]["peak_bytes"]
        misses += [f"QLoRA {peak / 1e9:.1f} GB"] if peak > MUST["qlora_peak"] else []
    if four and ours:
        figures["qlora_slowdown"] = ours["best"]["tokens_per_s"] / four["best"]["tokens_per_s"]
        slow = figures["qlora_slowdown"]
        misses += [f"QLoRA {slow:.2f} times slower"] if slow > MUST["qlora_slowdown"] else []
    return misses


def bound(name: str) -> float:
    return 5e-2 if name.startswith("gradients") else 1e-3


def judge_quick(figures: dict[str, Any]) -> list[str]:
    rows = [figures[part][row] for part in ("lora", "qlora") for row in ("least", "best") if part in figures]
    misses = [f"a loss of {row['loss']}" for row in rows if not 0.0 < row["loss"] < 20.0]
    return misses + [f"{name} is off" for name, error in figures.get("check", {}).items() if error > 1e-4]


def row_text(row: dict[str, Any]) -> str:
    memory = f", {row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] else ""
    return f"{row['tokens_per_s']:,} tok/s at {row['rows']} rows, recompute {row['recompute']}{memory}"


def summary(figures: dict[str, Any]) -> str:
    parts = [f"{name} {figures[name]['best']['tokens_per_s']:,} tok/s" for name in ("lora", "qlora") if name in figures]
    parts += [f"{figures['ratio']:.2f} of transformers + peft"] if "ratio" in figures else []
    return ", ".join(parts) or "checked"


if __name__ == "__main__":
    sys.exit(main())
