"""Whether lm-eval gets the same figures from `homing serve` as from the exported model in transformers.

    LM_EVAL_PYTHON=PATH python benchmarks/lm_eval_serve.py     PATH: an interpreter with lm-eval installed
    LM_EVAL_PYTHON=PATH python benchmarks/lm_eval_serve.py --quick     models hardly trained; keeps no result

choices    multiple choice: the end of a paragraph, among the ends of others    acc, acc_norm, each log-likelihood
rolling    the log-likelihood of pages that are longer than the context         bits_per_byte, perplexities
texts      generate_until: the sentence that a paragraph begins with            exact_match, chrf, each text
chat       the same as a question to a fine-tuned model, in its chat template   exact_match, chrf, each text

    hf                       lm-eval computes with transformers on the export in fp32
    local-completions        lm-eval asks `homing serve` with prompts of token ids: one at a time, in batches at once,
                             and with prompts as text, to which the server adds <|endoftext|>
    local-chat-completions   lm-eval asks /v1/chat/completions

The tasks and both models are made from the pages in docs/, which the models are trained on for a minute: the figures
show that two programs agree, not that a model is good. No part of the test suite, because lm-eval and what it needs
take half a gigabyte: `pip install 'lm-eval[api]'`.

These arguments make the two agree, for a model with a context of C tokens that was trained by homing:

    --model hf                 --model_args pretrained=EXPORT,dtype=float32,max_length=C-2,add_bos_token=B
    --model local-completions  --model_args model=NAME,tokenizer=EXPORT,base_url=URL/v1/completions,max_length=C,...
                               ...add_bos_token=B

    and for texts              --gen_kwargs skip_special_tokens=True

B is True, because documents begin with <|endoftext|> in training, but False for rolling tasks, to whose texts lm-eval
adds that token itself. local-completions reserves two tokens of its max_length, so C-2 gives hf the same windows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from _result import write_result  # noqa: E402
from homing.api.models.serve_model import ModelServer, serve_model  # noqa: E402
from homing.hf_config import config_of  # noqa: E402
from homing.lm.export import Facts, Order, export  # noqa: E402
from homing.lm.generate.chat_and_text import ChatTurns  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from homing.lm.tokenizer.tokenizer import SPECIALS  # noqa: E402
from homing.lm.tokenizer.train_bpe import learn_merges  # noqa: E402
from homing.lm.tokenizer.write_files import build_tokenizer_json, write_extras  # noqa: E402
from homing.wire import codec, file_names  # noqa: E402
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash  # noqa: E402
from homing.wire.run_json import Model  # noqa: E402

MISSING = 77  # the exit code that `make prove` takes for "skipped"
CONTEXT = 256
MOST_NATS = 1e-3  # largest difference of a log-likelihood; rounding in fp32 gives less
NEW_TOKENS = 24
END_WORDS = 6  # of a paragraph, which are the right choice
BATCH, ROW = 16, 128  # of the training
CHILD = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
job = json.load(open(sys.argv[1]))
manager = TaskManager(include_path=job["tasks"], include_defaults=False)
found = {}
for name, each in job["runs"].items():
    done = lm_eval.simple_evaluate(
        model=each["model"], model_args=each["args"], tasks=[each["task"]], task_manager=manager,
        batch_size=each["batch_size"], apply_chat_template=each["is_chat"], device="cpu", bootstrap_iters=0,
        log_samples=True, gen_kwargs=each["gen_kwargs"],
    )
    samples = sorted(done["samples"][each["task"]], key=lambda sample: sample["doc_id"])
    figures = done["results"][each["task"]].items()
    found[name] = {
        "metrics": {key.partition(",")[0]: value for key, value in figures if isinstance(value, float)
                    and "stderr" not in key},
        "answers": [sample["resps"] for sample in samples],
    }
import transformers
versions = {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
json.dump({"versions": versions, "runs": found}, open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Run:
    """One evaluation of a task by lm-eval. Those of a task must agree with its first one, which is hf."""

    task: str
    name: str
    model: str
    args: dict[str, Any]
    batch_size: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    # From the environment, because the result records the arguments, and this is a path on this machine.
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval, tenacity"], capture_output=True).returncode:
        print(f"SKIPPED {python} has no lm-eval: pip install 'lm-eval[api]', and name it by LM_EVAL_PYTHON")
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), python, num_steps=20 if arguments.quick else 250)
    is_same = all(each["is_same"] for each in figures["comparisons"])
    if not arguments.quick:
        write_result("lm_eval_serve", figures, passed=is_same)
    print(f"{'PASS' if is_same else 'FAIL'} {len(figures['comparisons'])} evaluations through homing serve")
    sys.exit(not is_same)


def measure(folder: Path, python: str, *, num_steps: int) -> dict[str, Any]:
    started = time.monotonic()
    paragraphs = read_paragraphs()
    make_models(folder, paragraphs, num_steps)
    for phase in ("pretrain", "sft"):
        export(Order(folder / phase, "hf", folder / "exports" / phase, Facts("tiny"), dtype="fp32"))
    num_questions = write_tasks(folder / "tasks", paragraphs)
    print(f"two models of {num_steps} steps after {time.monotonic() - started:.0f} s")
    with serve(folder / "pretrain") as base, serve(folder / "sft") as chat:
        runs = plan(folder, base, chat)
        job = {"tasks": str(folder / "tasks"), "runs": {run.name: _as_job(run) for run in runs}}
        results = ask(folder, python, job, base.token)
    comparisons = [compare(run, results["runs"]) for run in runs if run.model != "hf"]
    show(runs, comparisons, results["runs"])
    return {
        "versions": results["versions"],
        "num_questions": num_questions,
        "context": CONTEXT,
        "num_steps": num_steps,
        "hf": {run.task: results["runs"][run.name]["metrics"] for run in runs if run.model == "hf"},
        "comparisons": comparisons,
    }


# -- models ------------------------------------------------------------------------------------------------------------


def read_paragraphs() -> list[str]:
    """Return the prose of the pages in docs/: paragraphs without headings, lists, tables and code."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for part in page.read_text(encoding="utf-8").split("\n\n"):
            text = " ".join(part.split())
            if text[:1].isalpha() and len(text.split()) >= 25 and text.endswith("."):
                found.append(text)
    return found


def make_models(folder: Path, paragraphs: Sequence[str], num_steps: int) -> None:
    """Write a base model that was trained on the paragraphs, and one that was then trained on questions about them."""
    tokenizer = write_tokenizer(folder / "pretrain", paragraphs)
    write_tokenizer(folder / "sft", paragraphs)
    shape = Model(
        family="stock", arch="qwen3", num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_size=32,
        ffn_width=256, context=CONTEXT, vocab_size=tokenizer.vocab_size, is_tied=True, rope_base=10000.0,
    )  # fmt: skip
    model = Decoder(shape)
    model.init_weights(5)
    documents = [[tokenizer.end_of_text_id, *tokenizer.encode(text)] for text in paragraphs]
    train(model, documents, num_steps)
    write_checkpoint(model, folder / "pretrain", "pretrain")
    train(model, [conversation(tokenizer, text) for text in paragraphs], num_steps // 2)
    write_checkpoint(model, folder / "sft", "sft")


def write_tokenizer(folder: Path, paragraphs: Sequence[str]) -> Tokenizer:
    folder.mkdir(parents=True)
    merges = learn_merges([text.encode() for text in paragraphs], num_merges=1200, split="gpt4")
    (folder / file_names.TOKENIZER).write_text(build_tokenizer_json(merges, SPECIALS["standard"], "gpt4"))
    write_extras(folder)
    return load_tokenizer(folder / file_names.TOKENIZER)


def train(model: Decoder, documents: Sequence[Sequence[int]], num_steps: int) -> None:
    source = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model.train()
    stream: list[int] = []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / num_steps)
        while len(stream) < BATCH * (ROW + 1):
            stream += [i for document in source.sample(documents, len(documents)) for i in document]
        rows_BT = torch.tensor(stream[: BATCH * (ROW + 1)]).view(BATCH, ROW + 1)
        stream = stream[BATCH * (ROW + 1) :]
        logits_BTV = model(rows_BT[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), rows_BT[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 49 or step == num_steps - 1:
            print(f"step {step + 1} of {num_steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


def conversation(tokenizer: Tokenizer, text: str) -> list[int]:
    turns = ChatTurns(tokenizer)
    turns.ask(question_about(text))
    turns.answered(tokenizer.encode(answer_about(text)))
    return turns.ids


def question_about(text: str) -> str:
    return f"What follows: {' '.join(text.split()[:8])}"


def answer_about(text: str) -> str:
    return " ".join(text.split()[8:16])


def write_checkpoint(model: Decoder, folder: Path, phase: str) -> None:
    """Write what `homing serve` and `homing export` need to know which kind of model it is."""
    save_file(model.weights_for_disk(), folder / file_names.WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(model.shape)))
    files = [
        FileHash(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
    ]
    manifest = CheckpointManifest("tiny", "tiny-20260101-000000-abcd", phase, 1, 1, True, "", 5, files)
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))


def serve(folder: Path) -> ModelServer:
    os.environ["HOMING_SERVE_TOKEN"] = "a-token-for-this-benchmark"
    return serve_model(folder, port=0, device="cpu")


# -- tasks -------------------------------------------------------------------------------------------------------------


def write_tasks(folder: Path, paragraphs: Sequence[str]) -> dict[str, int]:
    folder.mkdir()
    source = random.Random(2)
    chosen = source.sample(paragraphs, 48)
    rows = {
        "choices": [_choice(text, source, paragraphs) for text in chosen],
        "rolling": [{"text": "\n\n".join(source.sample(paragraphs, 4))} for _ in range(12)],
        "texts": [{"question": " ".join(text.split()[:8]), "answer": answer_about(text)} for text in chosen],
        "chat": [{"question": question_about(text), "answer": answer_about(text)} for text in chosen],
    }
    generated: dict[str, Any] = {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "metric_list": [_metric("exact_match"), _metric("chrf")],
    }  # fmt: skip
    # The keys that real tasks send: lm-eval passes on what it does not know, such as num_beams.
    more = {"max_gen_toks": NEW_TOKENS, "do_sample": False, "temperature": 0.0, "num_beams": 1}
    settings: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}", "metric_list": [_metric("acc"), _metric("acc_norm")],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [
                _metric(name, is_high_good=False) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
            ],
        },
        "texts": {**generated, "generation_kwargs": {"until": ["\n", ", "], **more}},
        "chat": {**generated, "generation_kwargs": {"until": ["\n\n"], **more}},
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        task = {
            "task": f"homing_{name}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}, **settings[name],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return {name: len(lines) for name, lines in rows.items()}


def _choice(text: str, source: random.Random, paragraphs: Sequence[str]) -> dict[str, Any]:
    others = source.sample([each for each in paragraphs if each != text], 3)
    ends = [" ".join(each.split()[-END_WORDS:]) for each in (text, *others)]
    right = ends[0]
    source.shuffle(ends)
    return {"question": " ".join(text.split()[-24:-END_WORDS]), "choices": ends, "gold": ends.index(right)}


def _metric(name: str, *, is_high_good: bool = True) -> dict[str, Any]:
    return {"metric": name, "higher_is_better": is_high_good}


# -- evaluations -------------------------------------------------------------------------------------------------------


def plan(folder: Path, base: ModelServer, chat: ModelServer) -> list[Run]:
    runs = []
    for task in ("choices", "rolling", "texts", "chat"):
        exported = folder / "exports" / ("sft" if task == "chat" else "pretrain")
        adds_mark = task in ("choices", "texts")  # the chat template adds the mark itself, and lm-eval to rolling texts
        runs.append(Run(task, f"{task}: hf", "hf", {
            "pretrained": str(exported), "dtype": "float32", "max_length": CONTEXT - 2, "add_bos_token": adds_mark,
        }, 8))  # fmt: skip
        server = chat if task == "chat" else base
        local = Run(task, f"{task}: local-completions", "local-completions", {
            "model": server.session.name, "tokenizer": str(exported), "tokenizer_backend": "huggingface",
            "base_url": f"{server.url}/v1/completions", "max_length": CONTEXT, "add_bos_token": adds_mark,
        })  # fmt: skip
        at_once = f"{local.name}, 8 prompts in each of 4 requests"
        runs += [local, replace(local, name=at_once, args={**local.args, "num_concurrent": 4}, batch_size=8)]
        if adds_mark:
            as_text = {**local.args, "tokenized_requests": False, "add_bos_token": False}
            runs.append(replace(local, name=f"{local.name}, prompts as text", args=as_text))
        if task == "chat":
            args = {"model": server.session.name, "base_url": f"{server.url}/v1/chat/completions"}
            runs += [
                Run(task, f"{task}: local-chat-completions", "local-chat-completions", args),
                Run(task, f"{task}: local-chat-completions, 8 requests at once", "local-chat-completions", {
                    **args, "num_concurrent": 8,
                }),
            ]  # fmt: skip
    return runs


def _as_job(run: Run) -> dict[str, Any]:
    return {
        "model": run.model, "args": run.args, "task": f"homing_{run.task}", "batch_size": run.batch_size,
        "is_chat": run.task == "chat",
        # transformers leaves special tokens out of texts, and the server does so on demand.
        "gen_kwargs": None if run.model == "hf" else {"skip_special_tokens": True},
    }  # fmt: skip


def ask(folder: Path, python: str, job: dict[str, Any], token: str) -> dict[str, Any]:
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "OPENAI_API_KEY": token, "NO_PROXY": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false",
        "LMEVAL_LOG_LEVEL": "WARNING",
    }  # fmt: skip
    done = subprocess.run(
        [python, "-c", CHILD, folder / "job.json", folder / "results.json"], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"lm-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def compare(run: Run, results: dict[str, Any]) -> dict[str, Any]:
    expected, found = results[f"{run.task}: hf"], results[run.name]
    pairs = list(zip(_leaves(expected["answers"]), _leaves(found["answers"]), strict=True))
    numbers = [(a, b) for a, b in pairs if isinstance(a, float)]
    gap = max((abs(a - b) for a, b in numbers), default=0.0)
    others = sum(a != b for a, b in pairs if not isinstance(a, float))
    metric_gap = max(
        abs(value - found["metrics"].get(name, math.inf)) / max(1.0, abs(value))
        for name, value in expected["metrics"].items()
    )
    return {
        "evaluation": run.name,
        "metrics": found["metrics"],
        "num_log_likelihoods": len(numbers),
        "largest_gap_nats": gap,
        "num_texts_or_flags": len(pairs) - len(numbers),
        "num_different": others,
        "largest_metric_gap": metric_gap,
        "is_same": gap <= MOST_NATS and not others and metric_gap <= MOST_NATS,
    }


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list) else [value]


def show(runs: Sequence[Run], comparisons: Sequence[dict[str, Any]], results: dict[str, Any]) -> None:
    by_name = {each["evaluation"]: each for each in comparisons}
    for run in runs:
        metrics = "  ".join(f"{name} {value:.5f}" for name, value in results[run.name]["metrics"].items())
        print(f"{run.name}\n    {metrics}")
        if found := by_name.get(run.name):
            print(
                f"    {found['num_log_likelihoods']} log-likelihoods, at most {found['largest_gap_nats']:.1e} nats"
                f" apart; {found['num_different']} of {found['num_texts_or_flags']} texts or greedy flags differ"
            )


if __name__ == "__main__":
    main()
