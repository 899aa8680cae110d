"""Tokens per second of many texts at once, as `homing serve` generates them, against one text and transformers.

    PYTHONPATH=src python benchmarks/gpu/serve_batch.py [--shape 20x1280] [--batch 64] [--tokens 256]
    PYTHONPATH=src python benchmarks/gpu/serve_batch.py --tiny          a toy on any machine; nothing is kept

    one            one text in the batch of the server, alone
    batch          as many texts as --batch at once
    transformers   the same weights, prompts and lengths by `transformers.generate`, greedy, with its static cache and
                   its forward pass compiled (--tiny: not compiled)

All texts are greedy and are never ended by a stop token, so everyone generates the same number of tokens. The first run
of each captures or compiles, and does not count; the best of the others does. Passes if the batch has at least
LEAST_GAIN times the tokens per second of one text, no more graphs are kept than their bound, and nearly all first
tokens are those of transformers. Random weights in bf16. Results go to results/serve_batch.json.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from _result import write_result  # noqa: E402
from homing.hf_config import config_of  # noqa: E402
from homing.lm.cuda_graphs import MOST_GRAPHS  # noqa: E402
from homing.lm.export.hf_folder import write_json  # noqa: E402
from homing.lm.generate.batching import BatchGenerator, TextRequest  # noqa: E402
from homing.lm.generate.pick_token import Picked  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.rl.rollout import lean_copy  # noqa: E402
from homing.sampling_settings import SamplingSettings  # noqa: E402
from homing.wire.run_json import Model  # noqa: E402

SHAPES = {
    "12x768": Model("stock", "qwen3", 12, 768, 6, 6, 128, 2048, 2048, 32768, False),
    "20x1280": Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, False),
}
TINY = Model("stock", "qwen3", 2, 32, 2, 1, 16, 64, 256, 256, False)
NUM_PROMPT = 32
REPEATS = 3  # the first one does not count
LEAST_GAIN = 8.0  # of 64 texts against one; a step reads the weights once for all of them
LEAST_SAME = 0.9  # of the first tokens; near ties may fall otherwise, and random weights have many


class Listener:
    """Keeps the ids of a text."""

    is_wanted = True

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.error: Exception | None = None

    def scored(self, picked: Sequence[Picked]) -> None: ...

    def picked(self, picked: Picked) -> bool:
        self.ids.append(picked.id)
        return True

    def ended(self, *, is_stopped: bool, stop: Picked | None = None) -> None: ...

    def failed(self, error: Exception) -> None:
        self.error = error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="20x1280", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("FAIL there is no CUDA GPU here; --tiny runs a toy without it")
        return 1
    device = torch.device("cpu" if arguments.tiny else "cuda")
    name, shape = ("tiny", TINY) if arguments.tiny else (arguments.shape, SHAPES[arguments.shape])
    batch, num_tokens = (8, 16) if arguments.tiny else (arguments.batch, arguments.tokens)
    model, plain = make_model(shape, device)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(shape.vocab_size, (batch, NUM_PROMPT), generator=generator).tolist()
    figures: dict[str, Any] = {"shape": name, "batch": batch, "tokens": num_tokens, "prompt_tokens": NUM_PROMPT}
    if device.type == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
    figures |= measure(model, prompts, num_tokens)
    del model
    gc.collect()
    found, theirs = transformers_rate(plain, prompts, num_tokens, device, is_compiled=not arguments.tiny)
    same = sum(ours[0] == first for ours, first in zip(figures.pop("ids"), theirs, strict=True))
    figures |= {"transformers_tok_s": found, "same_first_tokens": same, "is_compiled": not arguments.tiny}
    figures["against_transformers"] = round(figures["batch_tok_s"] / found, 2)
    for key, value in figures.items():
        print(f"{key:24} {value}")
    checks = {
        "gain": arguments.tiny or figures["gain"] >= LEAST_GAIN,
        "graphs": figures["graphs"] <= MOST_GRAPHS,
        "same first tokens": same >= LEAST_SAME * batch,
        "no problems": not figures["problems"],
    }
    failed = [check for check, is_met in checks.items() if not is_met]
    if not arguments.tiny:
        write_result("serve_batch", figures, passed=not failed)
    print(f"FAIL {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


def make_model(shape: Model, device: torch.device) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """Return a model as the server loads it, and its weights as transformers reads them."""
    model = Decoder(shape)
    model.init_weights(0)
    with torch.no_grad():  # fresh heads are all alike, and the likeliest of them is chance
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = {key: tensor.to(dtype) for key, tensor in model.weights_for_disk().items()}
    model.to(device)
    return (lean_copy(model, dtype) if device.type == "cuda" else model).eval(), weights


def measure(model: Decoder, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    problems: list[str] = []
    batch = BatchGenerator(model, max_rows=len(prompts), notify=problems.append)
    texts: list[list[int]] = []

    def generate(chosen: list[list[int]]) -> None:
        listeners = [Listener() for _ in chosen]
        for prompt, listener in zip(chosen, listeners, strict=True):
            batch.add(TextRequest(prompt, num_tokens, SamplingSettings(temperature=0.0)), listener)
        while not batch.is_idle:
            batch.step()
        problems.extend(str(listener.error) for listener in listeners if listener.error)
        texts[:] = [listener.ids for listener in listeners]

    together_s = best_of(lambda: generate(prompts))
    ids = list(texts)
    alone_s = best_of(lambda: generate(prompts[:1]))
    num_graphs = len(batch._graphs)
    batch.close()
    one, many = num_tokens / alone_s, len(prompts) * num_tokens / together_s
    return {
        "one_tok_s": round(one, 1), "batch_tok_s": round(many, 1), "gain": round(many / one, 2), "graphs": num_graphs,
        "problems": problems, "ids": ids,
    }  # fmt: skip


def transformers_rate(
    weights: dict[str, torch.Tensor], prompts: list[list[int]], num_tokens: int, device: torch.device, *,
    is_compiled: bool,
) -> tuple[float, list[int]]:  # fmt: skip
    """Return the tokens per second of transformers, and the first token of each text.

    With a static cache, transformers compiles the forward pass itself, into CUDA graphs.
    """
    from transformers import AutoModelForCausalLM

    shape = TINY if device.type == "cpu" else next(
        each for each in SHAPES.values() if each.num_layers == sum(".input_layernorm." in key for key in weights)
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="homing-serve-batch-") as folder:
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        write_json(Path(folder) / "config.json", config_of(shape))
        dtype = next(iter(weights.values())).dtype
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ids_BT = torch.tensor(prompts, device=device)
    made: list[torch.Tensor] = []

    def generate() -> None:
        made[:] = [
            model.generate(
                ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                do_sample=False, cache_implementation="static", pad_token_id=0, disable_compile=not is_compiled,
            )
        ]  # fmt: skip

    seconds = best_of(generate)
    return round(len(prompts) * num_tokens / seconds, 1), made[0][:, NUM_PROMPT].tolist()


def best_of(run: Callable[[], None]) -> float:
    """Return the shortest time of the repeats after the first, in seconds."""
    times = []
    for _ in range(REPEATS):
        began = now()
        run()
        times.append(now() - began)
    return min(times[1:])


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
