"""Samples texts of the repository for a blind reading: are they clear, and do they sound natural?

    python tools/sample_texts.py --seed 7 [--count 100]     numbered texts on standard output, sources hidden
    python tools/sample_texts.py --seed 7 --where           the same texts with file and line

Half of the sample is user-facing: error messages, warnings, help texts and sentences of the docs. The other half is
docstrings and comments of the package. Each kind has the same chance, whatever its number of texts. A reader who has
not seen the code marks each text as clear at first reading or not, and as natural English or not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "homing"
USER_FACING = ("error", "message", "help", "docs")
INTERNAL = ("docstring", "comment")
WITH_LINES = ("error", "message", "docstring")  # their line breaks are kept, because a person sees them
MIN_WORDS = 5
ERROR_FIELDS = {"what": "error:", "why": "why", "fix": "fix"}  # each is one line on the terminal, with this label
SAYING = ("say", "notify", "warn", "alert", "append")  # calls whose text a person reads


@dataclass(frozen=True)
class Text:
    kind: str
    text: str
    where: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="use a new one for each reading")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--where", action="store_true", help="print the source of each text as well")
    arguments = parser.parse_args()
    for number, found in enumerate(sample(arguments.seed, arguments.count), start=1):
        place = f" [{found.where}]" if arguments.where else ""
        print(f"{number}. ({found.kind}){place} {found.text}\n")
    return 0


def sample(seed: int, count: int) -> list[Text]:
    """Return `count` texts, half of them user-facing, in a random order that the seed decides."""
    by_kind: dict[str, dict[str, Text]] = {kind: {} for kind in (*USER_FACING, *INTERNAL)}
    for found in all_texts():
        by_kind[found.kind].setdefault(found.text, found)
    chance = random.Random(seed)
    chosen: list[Text] = []
    for kinds, wanted in ((USER_FACING, count // 2), (INTERNAL, count - count // 2)):
        for number, kind in enumerate(kinds):
            share = wanted // len(kinds) + (number < wanted % len(kinds))
            chosen += chance.sample(sorted(by_kind[kind].values(), key=lambda each: each.where), share)
    chance.shuffle(chosen)
    return chosen


@functools.cache
def all_texts() -> tuple[Text, ...]:
    return tuple(_read_texts())


def _read_texts() -> Iterator[Text]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for kind, text, line in (*code_texts(ast.parse(source)), *comments(source)):
            if len(text.split()) >= MIN_WORDS:
                shown = text.strip() if kind in WITH_LINES else " ".join(text.split())
                yield Text(kind, shown, f"{path.relative_to(ROOT)}:{line}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for text, line in sentences(path.read_text(encoding="utf-8")):
            yield Text("docs", text, f"{path.relative_to(ROOT)}:{line}")


def code_texts(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield docstrings, fields of errors, help texts of options, and texts that are printed or logged."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                yield "docstring", docstring, getattr(node, "lineno", 1)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            fields = {word.arg: word.value for word in node.keywords}
            if "what" in fields:
                parts = {ERROR_FIELDS[each]: literal(fields[each]) for each in ERROR_FIELDS if each in fields}
                yield "error", "\n".join(f"{label} {text}" for label, text in parts.items() if text), node.lineno
            elif "help" in fields:
                yield "help", literal(fields["help"]), node.lineno
            elif name in SAYING and node.args:
                yield "message", literal(node.args[-1]), node.lineno


def literal(node: ast.expr) -> str:
    """Return the text of a string or f-string with `{...}` for each value, "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{...}" for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return ""


def comments(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield comments; whole lines of comment that follow each other are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ")
        if re.match(r"(noqa|type:|fmt:|--)", text):
            continue
        is_after_code = bool(token.line[: token.start[1]].strip())
        if block and (is_after_code or token.start[0] != last + 1):
            yield "comment", " ".join(block), first
            block = []
        if is_after_code:
            yield "comment", text, token.start[0]
            continue
        first = first if block else token.start[0]
        block.append(text)
        last = token.start[0]
    if block:
        yield "comment", " ".join(block), first


def sentences(page: str) -> Iterator[tuple[str, int]]:
    """Yield the sentences of a Markdown page, without its code blocks, tables, headings, link targets and settings."""
    # Keep the line numbers when leaving out the settings at the top of a page.
    page = re.sub(r"\A---\n.*?\n---\n", lambda found: "\n" * found[0].count("\n"), page, flags=re.DOTALL)
    is_code = False
    paragraph: list[str] = []
    start = 1
    for number, line in enumerate([*page.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_prose = (
            not is_code and bool(line.strip()) and not line.lstrip().startswith(("#", "|", "```", "<", "!", "---"))
        )
        if is_prose and not re.match(r"\s*([-*]|\d+\.) ", line):
            start = start if paragraph else number
            paragraph.append(line.strip())
            continue
        whole = re.sub(r"\]\([^)]*\)(\{[^}]*\})?", "]", " ".join(paragraph))
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`])", whole):
            if len(sentence.split()) >= MIN_WORDS:
                yield sentence, start
        paragraph, start = ([re.sub(r"^\s*([-*]|\d+\.) ", "", line)] if is_prose else []), number


if __name__ == "__main__":
    raise SystemExit(main())
