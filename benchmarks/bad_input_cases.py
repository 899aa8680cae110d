"""The bad inputs that `bad_input` types: each a command, the files around it, and what the answer must name.

one valid run file in three languages -> a maker for each kind of mistake, seeded -> all_cases
                                      -> good_cases, which must be taken as they stand
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from homing.config.parse.key_suggestions import FOREIGN
from homing.config.schema.keys import Key, all_keys

__all__ = ["Case", "all_cases", "good_cases"]

GOOD = """\
name: base
seed: 7
data:
  text: [text.txt]
  val_fraction: 5%
tokenizer:
  vocab_size: 512
model:
  layers: 2
  width: 64
  heads: 4
  context: 32
phases:
  - kind: pretrain
    steps: 100
    batch_tokens: 256
    lr: 3e-4
train:
  device: cpu
eval:
  every: 10
checkpoint:
  every: 50
sample:
  tokens: 20
limits:
  spend: $3.00
  idle: 30m
cloud:
  providers: [local]
"""
TOML = "[model]\nlayers = 2\nwidth = 64\nheads = 4\ncontext = 32\n[[phases]]\nsteps = 100\nbatch_tokens = 256\n"
JSON = '{\n "model": {\n  "layers": 2,\n  "width": 64,\n  "heads": 4,\n  "context": 32\n },\n "phases": [\n  {"steps": 100, "batch_tokens": 256}\n ]\n}\n'  # noqa: E501
VERIFY = ("verify", "base", "--no-run")


@dataclass
class Case:
    kind: str
    argv: tuple[str, ...]
    files: dict[str, bytes | None] = field(default_factory=dict)  # None: a directory
    file: str = ""  # must be named
    line: int | None = None  # must be named after the file
    hint: str = ""  # should be said
    never: str = ""  # must not be said
    is_fuzz: bool = False  # may turn out valid


def all_cases(random_: random.Random, *, is_quick: bool) -> Iterator[Case]:
    makers: list[Callable[[random.Random], Iterator[Case]]] = [
        typos, values, foreign, languages, cross_fields, sets, flags, places, secrets, data_dirs, prep_inputs, fuzz,
    ]  # fmt: skip
    most = {"typo": 120, "value": 120, "foreign": 40, "fuzz": 60} if is_quick else {"fuzz": 500}
    for maker in makers:
        made = list(maker(random_))
        limit = most.get(made[0].kind, len(made)) if made else 0
        yield from made if len(made) <= limit else random_.sample(made, limit)


def run_file(text: str | bytes, name: str = "runs/base.yaml") -> dict[str, bytes | None]:
    return {name: text if isinstance(text, bytes) else text.encode()}


def with_key(found: Key, name: str, value: str) -> tuple[str, int]:
    """GOOD with `name: value` put into the section of `found`; and its line."""
    lines = [line for line in GOOD.splitlines() if not _is_key(line, found)]
    section, *inner = found.section.replace("phases.N", "phases").split(".")
    if not section:
        return "\n".join([*lines, f"{name}: {value}"]) + "\n", len(lines) + 1
    at = lines.index(f"{section}:") + (2 if section == "phases" else 1)  # a phase begins behind its dash
    indent, dash, new = "    " if section == "phases" else "  ", "", []
    for part in inner:
        if part == "N":  # the next key is the first of an item
            dash = "- "
            continue
        new.append(f"{indent}{dash}{part}:")
        indent, dash = indent + "  " + " " * len(dash), ""
    new.append(f"{indent}{dash}{name}: {value}")
    lines[at:at] = new
    return "\n".join(lines) + "\n", at + len(new)


def _is_key(line: str, found: Key) -> bool:
    """The same key already in GOOD, in the same section, would only be 'given twice'."""
    section = {"seed": "", "name": "", "text": "data", "val_fraction": "data", "vocab_size": "tokenizer",
               "layers": "model", "width": "model", "heads": "model", "context": "model", "steps": "phases.N",
               "batch_tokens": "phases.N", "lr": "phases.N", "device": "train", "spend": "limits", "idle": "limits",
               "providers": "cloud", "tokens": "sample"}  # fmt: skip
    name = line.strip().split(":")[0]
    if name == "every":
        return found.name == "every" and ("10" in line) == (found.section == "eval")
    return name == found.name and section.get(name) == found.section and not line.strip().startswith("-")


def typos(random_: random.Random) -> Iterator[Case]:
    for found in all_keys().values():
        valid = {other.name for other in all_keys().values() if other.section == found.section}
        valid |= {"data", "tokenizer", "model", "phases", "train", "eval", "checkpoint", "sample", "limits", "cloud"}
        meant = found.path.replace(".N.", ".0.")
        for typed in sorted({misspell(random_, found.name) for _ in range(6)} - valid):
            text, line = with_key(found, typed, found.example)
            yield Case("typo", VERIFY, run_file(text), "runs/base.yaml", line, f"Did you mean {meant}?")


def misspell(random_: random.Random, name: str) -> str:
    at = random_.randrange(len(name))
    letter = random_.choice(string.ascii_lowercase)
    kind = random_.choice(("change", "drop", "add", "swap"))
    if kind == "drop" and len(name) > 1:
        return name[:at] + name[at + 1 :]
    if kind == "add":
        return name[:at] + letter + name[at:]
    if kind == "swap" and at + 1 < len(name) and name[at] != name[at + 1]:
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return name[:at] + (letter if letter != name[at] else "x") + name[at + 1 :]


def values(random_: random.Random) -> Iterator[Case]:
    for found in all_keys().values():
        for value in wrong_values(found):
            text, line = with_key(found, found.name, value)
            argv = VERIFY if random_.random() < 0.8 else (*VERIFY, "--json")
            yield Case("value", argv, run_file(text), "runs/base.yaml", line)


def wrong_values(found: Key) -> list[str]:
    if found.kind.startswith("a list"):
        return ["7", "{a: b}", "[[1]]"]
    if found.kind.startswith("one of"):
        return ["nonsense", "12", "[a]"]
    if found.kind.startswith("true"):
        return ["maybe", "3"]
    if found.kind == "a string":
        return ["12", "{a: b}", "[a]"] if found.path != "name" else ["Not A Name", "12", "x" * 80]
    wrong = ["nonsense", "true", "[1, 2]", "-3", "'9e99999999'", ".nan"]
    return wrong[1:] if found.kind.startswith("dollars") else wrong


def foreign(random_: random.Random) -> Iterator[Case]:
    for number, (reference, ours) in enumerate(sorted(FOREIGN.items())):
        text = GOOD + f"{reference}: 1\n"
        hint = ours.split(" ")[0].replace(".N.", ".0.")
        yield Case("foreign", VERIFY, run_file(text), "runs/base.yaml", text.count("\n"), hint)
        if number % 3 == 0:
            setting = f"train.{reference}=1"
            yield Case("foreign", (*VERIFY, "--set", setting), run_file(GOOD), f"--set {setting}", hint=hint)


def languages(random_: random.Random) -> Iterator[Case]:
    lines = GOOD.splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("  ") and ":" in line:
            tabbed = [*lines[: number - 1], "\t" + line.strip(), *lines[number:]]
            yield Case("language", VERIFY, run_file("\n".join(tabbed)), "runs/base.yaml", number)
        if ":" in line and not line.strip().startswith("-"):
            doubled = [*lines[:number], *([line] if not line.endswith(":") else []), *lines[number:]]
            if len(doubled) > len(lines):
                yield Case(
                    "language", VERIFY, run_file("\n".join(doubled)), "runs/base.yaml", number + 1, "given twice"
                )
    for text, line in (
        ("", 1), ("# nothing\n", 1), ("just words\n", 1), ("- a\n- b\n", 1), ("a: [1\nb: 2\n", 2), ("a: 'x\n", None),
        ("a: b: c\n", 1), ("a: {b\n", None), ("%YAML 9\n", None), ("a: *x\n", 1), ("a: !!python/object x\n", 1),
        ("a: &a [*a]\n", None), ("---\nname: a\n---\nname: b\n", 3), ("? [a]\n: b\n", 1), ("name: base\n12: x\n", 2),
        ("<<: 3\n", 1), ("name: \x00\n", 1), ("a" * 1_100_000, None),
    ):  # fmt: skip
        yield Case("language", VERIFY, run_file(text), "runs/base.yaml", line)
    for text, line in (("name = base\n", 1), ("[model\n", 1), ("a = 1\na = 2\n", 2), ("", 1), ("x\n", 1)):
        yield Case("language", VERIFY, run_file(text, "runs/base.toml"), "runs/base.toml", line)
    for text, line in (("{", 1), ("[]", 1), ('{"a": 1,}', 1), ('{\n"seed": 1,\n"seed": 2}', 3), ("", 1), ("nul", 1)):
        yield Case("language", VERIFY, run_file(text, "runs/base.json"), "runs/base.json", line)
    for name, text, line in (("runs/base.toml", TOML, 3), ("runs/base.json", JSON, 4)):
        yield Case("language", VERIFY, run_file(text.replace("width", "widht"), name), name, line, "model.width")


def cross_fields(random_: random.Random) -> Iterator[Case]:
    def change(old: str, new: str, hint: str, line_of: str) -> Case:
        text = GOOD.replace(old, new)
        line = next(n for n, typed in enumerate(text.splitlines(), start=1) if line_of in typed)
        return Case("cross", VERIFY, run_file(text), "runs/base.yaml", line, hint)

    for heads in (3, 5, 6, 7, 9, 33):
        yield change("heads: 4", f"heads: {heads}", "Nearest", "heads")
    for kv_heads in (3, 5, 8):
        yield change("heads: 4", f"heads: 4\n  kv_heads: {kv_heads}", "Nearest", "kv_heads")
    for size in (1, 3, 15, 63):
        yield change("heads: 4", f"heads: 4\n  head_size: {size}", "", "head_size")
    for batch in (1, 31, 33, 100, 257, 1000):
        yield change("batch_tokens: 256", f"batch_tokens: {batch}", "Nearest", "batch_tokens")
    for rows in (3, 5, 6, 7, 9, 16):
        yield change("lr: 3e-4", f"micro_batch: {rows}", "Nearest", "micro_batch")
    for vocabulary in (257, 260, 271):
        yield change("vocab_size: 512", f"vocab_size: {vocabulary}", "at least 272", "vocab_size")
    for kind, lacking in (("sft", "no conversations to train on"), ("rl", "rl has no tasks")):
        yield change("kind: pretrain", f"kind: {kind}", lacking, "kind")
    for method in ("lora", "qlora"):
        yield change("lr: 3e-4", f"method: {method}", "needs trained weights", "method")
    yield change("steps: 100", "steps: 100\n    epochs: 2", "Keep one of", "steps: 100")
    yield change("steps: 100", "tokens: 1M\n    epochs: 2", "Keep one of", "epochs")
    yield change("    steps: 100\n", "", "has no length", "- kind")
    yield change("lr: 3e-4", "warmup_steps: 100", "less than 100", "warmup_steps")
    yield change("lr: 3e-4", "schedule: cosine\n    decay_fraction: 0.5", "does not apply", "decay_fraction")
    yield change("lr: 3e-4", "optimizer: adamw\n    momentum: 0.5", "does not apply", "momentum")
    yield change("providers: [local]", "providers: [locl]", "Did you mean local", "providers")
    yield change("providers: [local]", "gpu: H1000", "Did you mean H100", "gpu")


def sets(random_: random.Random) -> Iterator[Case]:
    settings = """
        x|=|=3|a..b=1|.=1|phases.9.lr=1|phases.lr=1|phases[x].lr=1|model.width=[1|model.width={|name.deep.er=1|model.0=1
        |phases.0=1|phases=1|model=1|limits.spend=|limits.spend=-1|limits.idle=forever|model.width=1e400|seed=1.5
        |model.context=12k3"""
    for setting in settings.split("|"):
        typed = setting.strip()
        yield Case("set", (*VERIFY, "--set", typed), run_file(GOOD), f"--set {typed}")
    yield Case("set", (*VERIFY, "--set"), run_file(GOOD))
    yield Case("set", (*VERIFY, "--set", "x", "--json"), run_file(GOOD), "--set x")


def flags(random_: random.Random) -> Iterator[Case]:
    typed = """
        verfy|verify --norun|verify a b|new|new a|new a --from|new a --from tiyn|new A_B --from tiny|new a --form tiny
        |explain nonsense|explain .|explain phases.0.nonsense|explain a b|verify|verify --json|--nope|explain --no"""
    for argv in typed.split("|"):
        yield Case("flag", tuple(argv.split()))
    for argv in (("new", "a b"), ("new", ""), ("new", "x" * 200)):
        yield Case("flag", (*argv, "--from", "tiny"))
    yield Case("flag", ("explain", "", "--json"))
    yield Case("flag", ("new", "base", "--from", "tiny"), run_file(GOOD), "runs/base.yaml", hint="--force")
    yield Case("flag", ("new", "a", "--from", "goethe"), hint="Did you mean goethe-75m?")


def places(random_: random.Random) -> Iterator[Case]:
    for typed in ("bas", "Base", "basee", "abse"):
        yield Case("place", ("verify", typed, "--no-run"), run_file(GOOD), hint="Did you mean base?")
    yield Case("place", ("verify", "runs/none.yaml", "--no-run"), run_file(GOOD), "runs/none.yaml")
    yield Case("place", ("verify", "runs", "--no-run"), run_file(GOOD), "runs", hint="directory")
    yield Case("place", ("verify", "d.yaml", "--no-run"), {"d.yaml": None}, "d.yaml", hint="directory")
    yield Case("place", ("verify", "base", "--no-run"), {"runs/base.yaml": None}, "runs/base.yaml")
    yield Case("place", ("verify", "plain", "--no-run"), {"plain": b"name: a\n"}, "plain")
    yield Case("place", ("verify", "", "--no-run"), run_file(GOOD))
    yield Case("place", ("verify", "a\nb", "--no-run"), run_file(GOOD))
    yield Case("place", ("verify", "x" * 4000, "--no-run"), run_file(GOOD))
    for raw, line in (
        (b"\xff\xfe\x00n", 1),
        (b"name: base\nseed: \xe4\n", 2),
        (random_.randbytes(500), None),
        (b"\x7fELF\x00\x00", None),
    ):
        yield Case("place", VERIFY, run_file(raw), "runs/base.yaml", line)


def secrets(random_: random.Random) -> Iterator[Case]:
    for value in ("hf_" + "A1b2" * 8, "sk-" + "x9" * 16, "AKIA" + "Q" * 16, "rpa_" + "Z0" * 14):
        for name in ("api_key", "hf_token", "password", "store"):
            text = GOOD + f"{name}: {value}\n"
            line = text.count("\n")
            yield Case("secret", VERIFY, run_file(text), "runs/base.yaml", line, "secret", never=value)
        yield Case("secret", (*VERIFY, "--set", f"store={value}"), run_file(GOOD), "--set", hint="secret", never=value)


def good_cases() -> list[tuple[tuple[str, ...], dict[str, bytes | None]]]:
    return [
        (VERIFY, run_file(GOOD)),
        (VERIFY, run_file(TOML, "runs/base.toml")),
        (VERIFY, run_file(JSON, "runs/base.json")),
        (VERIFY, whole_data()[0]),
    ]


def whole_data() -> tuple[dict[str, bytes | None], bytes]:
    """A data directory with nothing wrong but the hashes of its shards, which only --hash looks at; its manifest."""
    tokenizer = json.dumps({"model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(512)}}}).encode()
    sha256 = hashlib.sha256(tokenizer).hexdigest()
    manifest = {
        "schema": "homing.data/1", "dtype": "uint16", "vocab_size": 512, "tokenizer_sha256": sha256, "specials": [],
        "source": [], "source_sha256": "0", "splits": {"train": {
            "num_tokens": 9, "num_documents": 1, "num_text_bytes": 9, "shards": [{
                "name": "train-00000.bin", "index_name": "train-00000.idx", "num_tokens": 9, "num_documents": 1,
                "num_bytes": 18, "sha256": "0", "index_sha256": "0"}]}},
    }  # fmt: skip
    good = json.dumps(manifest).encode()
    whole: dict[str, bytes | None] = {
        **run_file(GOOD), "data/base/manifest.json": good, "data/base/tokenizer.json": tokenizer,
        "data/base/train-00000.bin": bytes(18), "data/base/train-00000.idx": bytes(16),
    }  # fmt: skip
    return whole, good


def data_dirs(random_: random.Random) -> Iterator[Case]:
    whole, good = whole_data()
    other = {**whole, "data/base/tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}}}'}
    yield Case("data", VERIFY, other, "data/base/tokenizer.json", hint="vocab_size mismatch: 512")
    yield Case("data", VERIFY, {**whole, "data/base/tokenizer.json": b"{}"}, "tokenizer.json", hint="has changed")
    for name in ("tokenizer.json", "train-00000.bin", "train-00000.idx"):
        missing = {path: content for path, content in whole.items() if not path.endswith(name)}
        yield Case("data", VERIFY, missing, name, hint="missing")
        yield Case("data", VERIFY, {**whole, f"data/base/{name}": b""}, name, hint="empty")
    yield Case("data", VERIFY, {**whole, "data/base/train-00000.bin": bytes(17)}, "train-00000.bin", hint="17 bytes")
    yield Case("data", (*VERIFY, "--hash"), whole, "train-00000.bin", hint="changed")
    for raw in (b"", b"{", b"[]", b"\xff", b'{"schema": "homing.run/1"}', good.replace(b"512", b'"many"')):
        yield Case("data", VERIFY, {**whole, "data/base/manifest.json": raw}, "manifest.json")
    for vocabulary in (300, 511, 513, 32768):
        text = GOOD.replace("vocab_size: 512", f"vocab_size: {vocabulary}")
        line = next(n for n, typed in enumerate(text.splitlines(), start=1) if "vocab_size" in typed)
        case = {**whole, **run_file(text)}
        yield Case("data", VERIFY, case, "runs/base.yaml", line, "data/base/tokenizer.json")


def prep_inputs(random_: random.Random) -> Iterator[Case]:
    text = b"A line of text.\n" * 400
    prep = ("prep", "base")
    yield Case("prep", prep, run_file(GOOD), "text.txt")
    yield Case("prep", prep, {**run_file(GOOD), "text.txt": b""}, "text.txt")
    yield Case("prep", prep, {**run_file(GOOD), "text.txt": b"good\n\xff\xfe bad\n" * 50}, "text.txt")
    yield Case("prep", prep, {**run_file(GOOD), "text.txt": None}, "text.txt")
    yield Case("prep", (*prep, "--vocab-size", "100"), {**run_file(GOOD), "text.txt": text})
    yield Case("prep", (*prep, "--vocab-size", "many"), {**run_file(GOOD), "text.txt": text})
    yield Case("prep", (*prep, "--use-existing-tokenizer"), {**run_file(GOOD), "text.txt": text}, "tokenizer.json")
    yield Case("prep", (*prep, "--tokenizer", "none.json"), {**run_file(GOOD), "text.txt": text}, "none.json")
    yield Case("prep", prep, {**run_file(GOOD), "text.txt": text, "data": b"a file, not a folder"}, "data")
    yield Case("prep", ("prep", "absent"), run_file(GOOD), hint="base")
    yield Case("prep", ("prep",))


def fuzz(random_: random.Random) -> Iterator[Case]:
    """Whole files with a random wound each: whatever they are now, no traceback."""
    for name, text in (("runs/base.yaml", GOOD), ("runs/base.toml", TOML), ("runs/base.json", JSON)):
        for _ in range(200):
            raw = bytearray(text.encode())
            for _ in range(random_.randint(1, 4)):
                at = random_.randrange(len(raw))
                kind = random_.choice(("flip", "drop", "add", "cut", "swap"))
                if kind == "flip":
                    raw[at] = random_.randrange(256)
                elif kind == "drop":
                    del raw[at : at + random_.randint(1, 6)]
                elif kind == "add":
                    raw[at:at] = random_.choice(
                        (b"\t", b": ", b"\n", b"- ", b"[", b"{", b"'", b"&a ", b"*a", b"!!x ", b"\xc3")
                    )
                elif kind == "cut" and random_.random() < 0.3:
                    del raw[at:]
                else:
                    other = random_.randrange(len(raw))
                    raw[at], raw[other] = raw[other], raw[at]
                raw = raw or bytearray(b" ")
            yield Case("fuzz", VERIFY, {name: bytes(raw)}, name, is_fuzz=True)
