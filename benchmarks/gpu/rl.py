"""How long a step of rl takes: 16 prompts x 16 samples x 256 tokens at the d20 shape, with its parts apart.

    PYTHONPATH=src python benchmarks/gpu/rl.py [--gsm8k train.jsonl] [--steps 6] [--quick]

Each step is what the trainer does: questions -> samples (bf16, KV cache, CUDA graphs) -> rewards -> forward and
backward in micro-batches -> clipping -> Muon. Weights are random, so hardly a sample ends by itself and every step is a
full one. Questions are GSM8K's where the file is given, else made-up ones of about their length. Passes when the median
step takes at most 5 s, the graphs were captured, and the samples made with graphs are those made without.

--quick: a small shape on the CPU, to see that it runs; the bound on time is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _result import write_result
from homing.lm.model import Decoder
from homing.lm.phases.rl import Reinforce
from homing.lm.rl.named_random import draws
from homing.lm.rl.rollout import Sampler
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.train.optim.param_groups import build_optimizer, clip_gradients
from homing.wire import run_json as wire
from homing.wire.run_json import Model, Optimizer, Phase, Rl, RlTask, Run, Schedule

MUST_S = 5.0
D20 = Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, is_tied=False)
SMALL = Model("stock", "qwen3", 2, 64, 2, 2, 32, 128, 256, 1024, is_tied=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=64, help="rows at a time in the backward pass")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("FAIL no CUDA device; --quick runs a small shape on the CPU")
        return 1
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), arguments)
        figures = measure(run, Path(folder), arguments)
    passed = figures["are_samples_equal"] and (
        arguments.quick or (figures["step_s"] <= MUST_S and figures["is_captured"])
    )
    if not arguments.quick:
        write_result("rl", figures, passed=passed)
    for name, value in figures.items():
        print(f"{name:<22} {value:.3f}" if isinstance(value, float) else f"{name:<22} {value}")
    rows = f"{figures['prompts']} x {figures['samples']} x {figures['answer_tokens']}"
    summary = f"{rows} in {figures['step_s']:.2f} s a step, sampling {figures['sampling_s']:.2f} s"
    print(f"{'PASS' if passed else 'FAIL'} {summary}")
    return 0 if passed else 1


def measure(run: Run, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cpu" if arguments.quick else "cuda")
    model = Decoder(run.model)
    model.init_weights(0)
    model.to(device).set_precision("fp32" if arguments.quick else "bf16")
    if device.type == "cuda":
        model.compile_blocks()
    phase = run.phases[0]
    optimizer, work = build_optimizer(model, phase.optimizer), Reinforce(run, phase, folder)
    steps: list[dict[str, float]] = []
    said: list[str] = []
    with work.open_batches(model, first_row=0, device=device) as batches:
        for _ in range(arguments.steps):
            marks = [now(device)]
            batch = batches.next()
            said += [kind for kind, _ in batch.notices]
            marks.append(now(device))
            for piece in batch.micro_batches(arguments.micro_batch):
                piece.loss(model).backward()
            marks.append(now(device))
            norm = clip_gradients(model, 1.0)
            optimizer.step(1e-3, torch.isfinite(norm))
            optimizer.zero_grad()
            marks.append(now(device))
            parts = dict(zip(("rollout_s", "backward_s", "optimizer_s"), np.diff(marks).tolist(), strict=True))
            more = {name: batch.figures[name] for name in ("sampling_s", "judging_s", "length", "truncated")}
            steps.append({"step_s": marks[-1] - marks[0], **parts, **more, "row_tokens": float(batch.ids_RT.shape[1])})
    assert phase.rl is not None
    settled = steps[1:] or steps  # the first compiles and captures
    figures: dict[str, Any] = {name: statistics.median(step[name] for step in settled) for name in steps[0]}
    figures |= {"first_step_s": steps[0]["step_s"], "prompts": phase.rl.prompts_per_step}
    figures |= {"samples": phase.rl.samples_per_prompt, "answer_tokens": phase.rl.max_new_tokens}
    figures["is_captured"] = device.type == "cuda" and "graphs_failed" not in said
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures |= compare(work, model)
    return figures


def compare(work: Reinforce, model: Decoder) -> dict[str, Any]:
    """The same draws with graphs and without, and on the CPU row by row: the same tokens."""
    rl, settings = work.rl, {"stop_ids": work.stop_ids, "calculator": None, "top_k": 0, "temperature": 1.0}
    prompts = [question.ids for _, question in work.held_out[: rl.prompts_per_step]]
    num_new = min(64, rl.max_new_tokens)
    drawn = np.stack([draws(num_new, "compare", n) for n in range(2 * len(prompts))])
    timings: dict[str, Any] = {}
    made = {}
    for name in ("auto", "off"):
        sampler = Sampler(model, max_new_tokens=num_new, graphs=name, **settings)
        sampler.sample(prompts, drawn)
        began = now(model.device)
        made[name] = [sample.ids for sample in sampler.sample(prompts, drawn)]
        timings[f"sampling_64_graphs_{name}_s"] = now(model.device) - began
    if model.device.type == "cpu":
        alone = Sampler(model, max_new_tokens=num_new, rows_at_a_time=2, **settings)
        made["auto"] = [sample.ids for sample in alone.sample(prompts, drawn)]
    # One different number in bf16 may tip a draw, and everything after it is another text: not all rows must agree.
    share = statistics.mean(float(left == right) for left, right in zip(made["auto"], made["off"], strict=True))
    return {
        **timings,
        "equal_share": share,
        "are_samples_equal": share >= (1.0 if model.device.type == "cpu" else 0.9),
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def make_run(folder: Path, arguments: argparse.Namespace) -> Run:
    shape = SMALL if arguments.quick else D20
    write_tokenizer(folder, shape.vocab_size)
    questions = arguments.gsm8k.read_text(encoding="utf-8") if arguments.gsm8k else made_up(200)
    (folder / "questions.jsonl").write_text(questions, encoding="utf-8")
    task = RlTask(kind="gsm8k", file="questions.jsonl")
    rl = (
        Rl([task], prompts_per_step=4, samples_per_prompt=4, max_new_tokens=16, eval_prompts=4)
        if arguments.quick
        else Rl([task], max_new_tokens=256)
    )
    optimizer = Optimizer("muon", 0.01, 0.01, 0.004, 0.004, 0.0)
    phase = Phase(
        kind="rl", method="full", num_steps=arguments.steps, batch_tokens=0, micro_batch=arguments.micro_batch,
        optimizer=optimizer, schedule=Schedule("constant", 0, 0, 1.0), eval_every=0, eval_tokens=0, save_every=0,
        save_every_s=0.0, sample_every=0, keep_last=1, rl=rl,
    )  # fmt: skip
    return Run(
        name="rl", seed=1, model=shape, sizes=wire.Sizes(0, 0, 0.0), data=wire.Data(str(folder), "", "", 0, 0),
        phases=[phase], train=wire.Train(), sampling=wire.Sampling(), limits=wire.Limits(), cloud=wire.Cloud(),
        store="",
    )  # fmt: skip


def made_up(count: int) -> str:
    """About as long as GSM8K's: 45 words, give or take."""
    words = ["clips", "friends", "sold", "half", "as", "many", "each", "day", "12", "dollars", "when", "Natalia", "for"]
    source = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        chosen = source.choice(words, size=int(source.integers(25, 60)))
        lines.append(json.dumps({"question": f"{' '.join(chosen)}?", "answer": "It is\n#### 7"}))
    return "\n".join(lines) + "\n"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes and pairs of bytes, as many as fill the vocabulary."""
    specials, alphabet = SPECIALS["standard"], sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isalnum()] + [c for c in alphabet if not c.isalnum()]
    pairs = list(itertools.islice(itertools.product(letters, letters), vocab_size - len(specials) - len(alphabet)))
    tokens = [*specials, *alphabet, *(left + right for left, right in pairs)]
    vocab = {token: number for number, token in enumerate(tokens)}
    assert len(vocab) == vocab_size
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    raise SystemExit(main())
