"""Whether llama.cpp reads an exported GGUF as the trainer's model: the same ids of fuzzed text, the same greedy text.

    LLAMA_PYTHON=PATH python benchmarks/gguf_in_llama_cpp.py     PATH: an interpreter with llama-cpp-python installed
    LLAMA_PYTHON=PATH python benchmarks/gguf_in_llama_cpp.py --quick     fewer texts, one model; keeps no proof

ids     texts of every kind that has ever been split differently (digits, spaces, contractions, scripts, emoji, code,
        spelled specials, random characters), by llama.cpp from the F32 GGUF and by `tokenizers` from tokenizer.json
greedy  twenty prompts continued in F32 by llama.cpp and by the trainer's decoder, id by id

Models have random weights: what is compared is reading and computing, not what was learned. It is no part of the test
suite, because llama-cpp-python compiles llama.cpp when it is installed: `pip install llama-cpp-python` needs a C++
compiler and half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from _result import write_proof
from homing.hf_config import config_of
from homing.lm.export import Facts, Order, export
from homing.lm.generate import generate, load_for_use
from homing.lm.model import Decoder
from homing.lm.tokenizer.encode import AWKWARD
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.tokenizer.train_bpe import learn_merges
from homing.lm.tokenizer.write_files import build_tokenizer_json, write_extras
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import Model

ROOT = Path(__file__).resolve().parents[1]
NUM_PROMPTS, NUM_NEW = 20, 32
MISSING = 77  # the exit code that `make prove` takes for "skipped"
FRAGMENTS = [
    *("a", "Zebra", "don't", "WE'LL", "'S", "1", "12", "1234567", "3.14", "x=1;", "_id", "C++", "\n", "\r\n", "\n\n\n"),
    *(" ", "  ", "   ", "\t", " \n ", "!", "?!...", "--", "(", ")}", "é", "e\u0301", "ß", "naïve", "Ελλάδα", "русский"),
    *(
        "日本語",
        "한국어",
        "ไทย",
        "עברית",
        "العربية",
        "١٢٣",
        "½",
        "Ⅷ",
        "🙂",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "\u00a0",
        "\u200b",
        "\u3000",
    ),
    *("<|endoftext|>", "<|im_start|>", "http://a.b/c?d=e", "def f(x):\n    return x", "\ufeff", "\u2019s", "Ǆ", "ﬁ"),
]
CHILD = """
import json, sys
from llama_cpp import Llama
job = json.load(open(sys.argv[1]))
# Its cache is F16 by default; set both types to F32 so that the comparison is in F32.
model = Llama(job["gguf"], n_ctx=256, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in job["texts"]]
with_bos = [model.tokenize(text.encode(), add_bos=True, special=False) for text in job["texts"][:20]]
greedy = []
for prompt in job["prompts"]:
    model.reset()
    out = []
    for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        out.append(token)
        if len(out) == job["num_new"]:
            break
    greedy.append(out)
import llama_cpp
results = {"ids": ids, "with_bos": with_bos, "greedy": greedy, "version": llama_cpp.__version__}
json.dump(results, open(sys.argv[2], "w"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    # From the environment, because the proof records the arguments, and this is a path on this machine.
    python = os.environ.get("LLAMA_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        print(f"SKIPPED {python} has no llama-cpp-python: pip install llama-cpp-python, and name it by LLAMA_PYTHON")
        sys.exit(MISSING)
    kinds = ["qwen3"] if arguments.quick else ["llama", "llama-3.1", "qwen2", "qwen3", "qwen3-tied"]
    num_texts = 300 if arguments.quick else 5000
    figures: dict[str, Any] = {}
    for kind in kinds:
        for split in ("gpt4", "gpt2"):
            with tempfile.TemporaryDirectory() as folder:
                figures[f"{kind} {split}"] = compare(Path(folder), kind, split, num_texts, python)
            print(f"{kind} {split}: {figures[f'{kind} {split}']}")
    wrong = sum(each["texts_with_other_ids"] + each["prompts_with_other_text"] for each in figures.values())
    if not arguments.quick:
        sys.argv[1:] = []  # they hold paths of this machine and do not change the figures
        write_proof("gguf_in_llama_cpp", figures, passed=wrong == 0)
    print(f"{'PASS' if not wrong else 'FAIL'} {len(figures)} models, {num_texts} texts and {NUM_PROMPTS} prompts each")
    sys.exit(bool(wrong))


def compare(folder: Path, kind: str, split: str, num_texts: int, python: str) -> dict[str, Any]:
    make_model(folder / "model", kind, split)
    made = export(Order(folder / "model", "gguf", folder / "out", Facts("tiny"), gguf_type="f32"))
    model, tokenizer = load_for_use(folder / "model", "cpu")
    texts = [*AWKWARD, *fuzzed(num_texts - len(AWKWARD))]
    prompts = [[tokenizer.end_of_text_id, *tokenizer.encode(text)[:60]] for text in texts[:NUM_PROMPTS]]
    job = {"gguf": str(next((folder / "out").glob("*.gguf"))), "texts": texts, "prompts": prompts, "num_new": NUM_NEW}
    (folder / "job.json").write_text(json.dumps(job))
    subprocess.run([python, "-c", CHILD, folder / "job.json", folder / "results.json"], check=True)
    results = json.loads((folder / "results.json").read_text())
    odd = [text for text, ids in zip(texts, results["ids"], strict=True) if ids != tokenizer.encode(text)]
    marked = [[tokenizer.end_of_text_id, *tokenizer.encode(text)] for text in texts[:20]]
    ours = [
        list(generate(model, prompt, num_tokens=NUM_NEW, sampling=SamplingSettings(temperature=0.0)))
        for prompt in prompts
    ]
    other = sum(a != b for a, b in zip(ours, results["greedy"], strict=True))
    for text in odd[:5]:
        print(f"  other ids: {text!r}")
    return {
        "texts_with_other_ids": len(odd) + sum(a != b for a, b in zip(marked, results["with_bos"], strict=True)),
        "prompts_with_other_text": other,
        "num_texts": len(texts),
        "num_prompts": len(prompts),
        "tensors": made.checked[0],
        "llama_cpp_python": results["version"],
    }


def make_model(folder: Path, kind: str, split: str) -> None:
    folder.mkdir(parents=True)
    pages = [page.read_bytes() for page in sorted((ROOT / "docs").rglob("*.md"))]
    merges = learn_merges(pages, num_merges=2000, split=split)
    (folder / "tokenizer.json").write_text(build_tokenizer_json(merges, SPECIALS["standard"], split))
    write_extras(folder)
    vocab_size = len(SPECIALS["standard"]) + 256 + len(merges)
    shape = Model(
        family="stock", arch=kind.split("-")[0], num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_size=32,
        ffn_width=256, context=256, vocab_size=vocab_size, is_tied=kind.endswith("tied"), rope_base=10000.0,
        norm_eps=1e-6, rope_scaling=_scaling() if kind == "llama-3.1" else None,
    )  # fmt: skip
    model = Decoder(shape)
    model.init_weights(5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of 1 and biases of 0 would hide a forgotten one.
            scale = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    save_file(model.weights_for_disk(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape)))


def _scaling() -> Any:
    from homing.wire.run_json import RopeScaling

    return RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)


def fuzzed(count: int) -> list[str]:
    source = random.Random(3)
    texts = []
    for number in range(count):
        length = source.randint(1, 14)
        if number % 4:
            texts.append("".join(source.choice(FRAGMENTS) + source.choice(("", "", " ")) for _ in range(length)))
        else:
            texts.append(
                "".join(chr(source.choice(RANGES)[source.randint(0, 1)] + source.randint(0, 90)) for _ in "x" * length)
            )
    return texts


# Ranges of code points of common Unicode blocks: letters, marks, symbols, digits.
RANGES = [
    *((0x20, 0xA1), (0x100, 0x180), (0x370, 0x400), (0x5D0, 0x621), (0x905, 0xE01), (0x1E00, 0x2010), (0x2070, 0x20A0)),
    *((0x2190, 0x2200), (0x3041, 0x30A1), (0x4E00, 0x9F00), (0xAC00, 0xD700), (0x1F300, 0x1F600), (0x660, 0x966)),
]

if __name__ == "__main__":
    main()
