"""Which figures are older than the code that they are about: one line for each, and nothing if there is none.

    python benchmarks/stale.py        part of `make check`; always exits 0, because proofs take hours

    results/NAME.json, proofs/NAME.json   its commit, and those of its parts
    AREAS[NAME]                           the files that it is about
    commits since that changed their code -> "proofs/landing.json: 12 commits behind"

A file that names no commit, one of another repository, or that was written from changed sources is listed too: the
code that it is about is unknown. A test checks that every file has an area and that every path in it exists.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["AREAS", "stale"]

ROOT = Path(__file__).resolve().parents[1]
_FIELDS = ("what", "why", "fix", "help")  # keywords of calls whose text a person reads
_SAYING = ("say", "notify", "warn", "alert")  # calls whose last argument a person reads
_CLOUD = ("src/homing/cloud", "src/homing/instance", "src/homing/wire", "src/homing/world", "src/homing/store")
_TRAIN = ("src/homing/lm/train", "src/homing/lm/model", "src/homing/lm/phases", "src/homing/lm/data/shards")
_SIMULATED = (*_CLOUD, "tests/sim", "tests/doubles", "benchmarks/simulate.py")
AREAS: dict[str, tuple[str, ...]] = {
    "proofs/chat_faults": ("src/homing/lm/data/chat", "benchmarks/chat_faults.py"),
    "proofs/gguf_in_llama_cpp": ("src/homing/lm/export", "src/homing/lm/tokenizer", "benchmarks/gguf_in_llama_cpp.py"),
    "proofs/kill_points": (*_CLOUD, "tests/sim", "tests/doubles", "benchmarks/kill_points.py"),
    "proofs/landing": ("src/homing/lm/train", "src/homing/instance", "src/homing/cloud/plan/timing.py",
                       "benchmarks/landing.py"),
    "proofs/mutants": (*_CLOUD, "src/homing/lm/train", "benchmarks/mutants.py", "benchmarks/mutant_list.py"),
    "proofs/offers": ("src/homing/cloud/providers", "src/homing/cloud/plan/offers.py", "benchmarks/offers.py"),
    "proofs/preempt": (*_CLOUD, "src/homing/lm/train", "benchmarks/preempt.py"),
    "proofs/races": (*_SIMULATED[:-1], "benchmarks/races.py"),
    "proofs/regressions": ("src", "tests", "benchmarks/regressions.py", "benchmarks/regression_list.py"),
    "proofs/simulate": _SIMULATED,
    "proofs/simulate_aws": _SIMULATED,
    "proofs/simulate_modal": _SIMULATED,
    "proofs/simulate_runpod": _SIMULATED,
    "proofs/simulate_shadeform": _SIMULATED,
    "proofs/store_faults": ("src/homing/store", "src/homing/world", "benchmarks/store_faults.py"),
    "results/bad_input": ("src/homing/cli", "src/homing/config", "benchmarks/bad_input.py"),
    "results/chain": (*_TRAIN, "src/homing/lm/rl", "src/homing/lm/data/chat", "benchmarks/chain.py"),
    "results/dashboard": ("src/homing/web/dashboard", "src/homing/page_assets", "src/homing/api/pages",
                          "benchmarks/dashboard.py"),
    "results/decode": ("src/homing/lm/generate", "src/homing/lm/model", "src/homing/lm/cuda_graphs.py",
                       "src/homing/lm/decoding_step.py", "benchmarks/gpu/decode.py"),
    "results/engine": ("src/homing/lm/train", "src/homing/lm/model", "benchmarks/engine.py"),
    "results/engine-cpu": ("src/homing/lm/train", "src/homing/lm/model", "benchmarks/engine.py"),
    "results/going_on": ("src/homing/lm/train", "benchmarks/going_on.py"),
    "results/gpu-first-run": (*_TRAIN, "benchmarks/gpu/first_run.py"),
    "results/gpu-variants": ("src/homing/lm/train", "src/homing/lm/model", "benchmarks/gpu/variants.py"),
    "results/graphs": ("src/homing/lm/cuda_graphs.py", "src/homing/lm/train/compute/forward_backward.py",
                       "benchmarks/gpu/graphs.py"),
    "results/hours": ("src/homing/lm/train", "benchmarks/gpu/hours.py"),
    "results/lm_eval_serve": ("src/homing/lm/generate", "src/homing/lm/export", "src/homing/lm/model", "src/homing/web",
                              "benchmarks/lm_eval_serve.py"),
    "results/loader": ("src/homing/lm/data/shards", "src/homing/lm/train/compute/batch.py", "benchmarks/loader.py"),
    "results/lora": ("src/homing/lm/model", "src/homing/lm/train", "benchmarks/gpu/lora.py"),
    "results/parallel": (*_TRAIN, "tests/lm/parallel_cells.py", "benchmarks/parallel.py"),
    "results/peer_sweep": ("benchmarks/gpu/quality.py",),
    "results/persona": (*_TRAIN, "src/homing/lm/data/chat", "benchmarks/gpu/persona.py"),
    "results/prep": ("src/homing/lm/data/prep", "src/homing/lm/data/text", "src/homing/lm/tokenizer",
                     "benchmarks/prep.py"),
    "results/records": ("src/homing/cloud", "src/homing/report", "src/homing/web", "benchmarks/records.py"),
    "results/quality": ("src/homing/lm/model", "src/homing/lm/train", "src/homing/config/resolve/depth_dial.py",
                        "benchmarks/gpu/quality.py"),
    "results/quickstart": ("src/homing", "benchmarks/quickstart.py"),
    "results/resume": (*_TRAIN, "benchmarks/resume.py"),
    "results/rl": ("src/homing/lm/rl", "src/homing/lm/generate", "src/homing/lm/model", "benchmarks/gpu/rl.py"),
    "results/serve_batch": ("src/homing/lm/generate", "src/homing/lm/model", "src/homing/lm/cuda_graphs.py",
                            "src/homing/lm/decoding_step.py", "benchmarks/gpu/serve_batch.py"),
    "results/save_stall": ("src/homing/lm/train/checkpoints/manager.py",
                           "src/homing/lm/train/checkpoints/checkpoint_files.py",
                           "benchmarks/save_stall.py"),
    "results/serve": ("src/homing/web", "src/homing/lm/generate", "benchmarks/serve.py"),
    "results/sweep": ("src/homing/lm/model", "src/homing/lm/train", "src/homing/config/resolve/depth_dial.py",
                      "benchmarks/gpu/quality.py"),
}  # fmt: skip


def main() -> int:
    lines = list(stale(ROOT))
    for line in lines:
        print(f"stale: {line}")
    if lines:
        print(
            f"{len(lines)} of {len(list(_files(ROOT)))} result files are older than the code they are about (AREAS in"
        )
        print(
            "benchmarks/stale.py), or of unknown age. Not a failure: renew them with `make prove`, and those of a GPU"
        )
        print("as benchmarks/gpu/README.md says.")
    return 0


def stale(root: Path) -> Iterator[str]:
    """Yields a line for each file that is older than its code or of unknown age."""
    if _git(root, "rev-parse", "HEAD") is None:
        yield "not a git checkout: cannot compare figures with the commits of their code"
        return
    for path in _files(root):
        name = path.relative_to(root / "benchmarks").with_suffix("").as_posix()
        document = json.loads(path.read_text(encoding="utf-8"))
        reasons = list(_reasons(root, document, AREAS.get(name, ())))
        if reasons:
            yield f"{name}.json: {'; '.join(reasons)}"


def _files(root: Path) -> Iterator[Path]:
    for folder in ("proofs", "results"):
        yield from sorted((root / "benchmarks" / folder).glob("*.json"))


def _reasons(root: Path, document: dict[str, Any], area: tuple[str, ...]) -> Iterator[str]:
    commits = set(_commits(document))
    if not area:
        yield "no area in benchmarks/stale.py"
    if not commits:
        yield "names no commit"
    behind = {commit: _behind(root, commit, area) for commit in commits}
    unknown = [commit[:7] for commit, number in behind.items() if number is None]
    if unknown:
        yield f"commit {', '.join(sorted(unknown))} is not in the history of this checkout"
    worst = max((number for number in behind.values() if number), default=0)
    if worst:
        yield f"{worst} commit{'s' if worst > 1 else ''} behind"
    if not _is_clean(document):
        yield "written from changed sources"


def _commits(value: Any) -> Iterator[str]:
    """Of the document and of its parts, which may have been run one by one."""
    if isinstance(value, dict):
        if isinstance(value.get("commit"), str):
            yield value["commit"]
        for inner in value.values():
            yield from _commits(inner)


def _is_clean(value: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return value.get("is_clean", True) is True and all(_is_clean(inner) for inner in value.values())


def _behind(root: Path, commit: str, area: tuple[str, ...]) -> int | None:
    """Commits since that changed the area; None where the commit is no ancestor of what is checked out.

    Commits that together changed only comments, docstrings and the wording of messages do not count."""
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    if not area or not _is_code_changed(root, commit, area):
        return 0
    return int(_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *area) or 0)


def _is_code_changed(root: Path, commit: str, area: tuple[str, ...]) -> bool:
    changed = (_git(root, "diff", "--name-only", "--no-renames", commit, "HEAD", "--", *area) or "").splitlines()
    return any(_code(root, commit, file) != _code(root, "HEAD", file) for file in changed)


def _code(root: Path, commit: str, file: str) -> str | None:
    """Return the file in a form that changes only with what it does; None if the commit does not have it."""
    text = _git(root, "show", f"{commit}:{file}")
    if text is None or not file.endswith(".py"):
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_body and ast.get_docstring(node) is not None:
            del node.body[0]
        if isinstance(node, ast.Call):
            for shown in _shown_texts(node):
                for part in ast.walk(shown):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        part.value = ""
    return ast.dump(tree)


def _shown_texts(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call that are only shown to a person: fields of an error, help, and messages."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    fields = [word.value for word in call.keywords if word.arg in _FIELDS]
    return [*fields, *(call.args[-1:] if name in _SAYING else [])]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
