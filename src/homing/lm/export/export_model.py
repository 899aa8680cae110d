"""Runs one export, from the request to a complete, verified and documented folder.

    --out is free -> a temporary folder -> write, check, document -> rename to --out

The folder is renamed only after the export passes its check, so an export is either complete or absent. Only a folder
that contains an export can be replaced, so a mistake such as `--out ~` never deletes other files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from homing.errors import UsageError
from homing.lm.export.check_export import Proof, expect, need_template, prove
from homing.lm.export.gguf_file import MODELFILE, modelfile, write_gguf
from homing.lm.export.hf_folder import open_with_peft, write_adapter, write_hf, write_json
from homing.lm.export.model_card import Facts, write_card
from homing.lm.export.source_model import Opened, open_for_export
from homing.lm.generate.load_adapter import find_base
from homing.lm.generate.load_model import EXPORT, read_manifest
from homing.lm.model.lora import merge

__all__ = ["DTYPES", "KINDS", "RECORD", "Made", "Order", "export", "new_folder", "read_record"]

KINDS = ("hf", "gguf", "ollama", "adapter", "merged")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    folder: Path  # the source: a checkpoint, or any model folder
    kind: str  # one of KINDS
    out: Path
    facts: Facts
    dtype: str = ""  # dtype of an hf or merged export; "" keeps the dtype of the stored weights
    gguf_type: str = "f16"
    base: Path | None = None  # folder of the adapter's base weights; needed only if its checkpoint does not record one
    force: bool = False


@dataclass(frozen=True)
class Made:
    out: Path
    kind: str
    files: dict[str, int]  # name -> bytes
    checked: list[str]
    proof: Proof | None = None
    notes: list[str] = field(default_factory=list)


def export(order: Order, notify: Notify = lambda text: None) -> Made:
    if order.kind not in KINDS:
        raise UsageError(f"Unknown export format: {order.kind!r}", f"Known formats: {', '.join(KINDS)}.", "Use --to hf")
    # Create the folder first, so that if --out already exists, the command fails before it loads the model.
    with new_folder(order.out, force=order.force) as temporary:
        notify(f"opening {order.folder}")
        opened = open_for_export(order.folder, base=order.base, is_adapter_kept=order.kind in ("adapter", "merged"))
        need_template(opened)
        checked, proof = _write(order, opened, temporary, notify)
        manifest = read_manifest(order.folder)
        note = proof.note if proof is not None else ""
        gguf = next((path.name for path in temporary.glob("*.gguf")), "")
        card = write_card(opened, order.facts, manifest, checked, kind=order.kind, note=note, gguf=gguf)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        write_json(temporary / RECORD, _record(order, opened, checked, proof))
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    return Made(order.out, order.kind, files, checked, proof, [proof.note] if proof and proof.note else [])


def _write(order: Order, opened: Opened, temporary: Path, notify: Notify) -> tuple[list[str], Proof | None]:
    if order.kind == "adapter":
        return _write_adapter(order, opened, temporary, notify)
    dtype = DTYPES[order.dtype] if order.dtype else opened.stored_dtype
    adapted = expect(opened, torch.float32) if opened.is_adapter else None
    if opened.is_adapter:
        notify("merging the adapter into the base weights")
        merge(opened.model)
        opened.model.lora = None
    if order.kind in ("gguf", "ollama"):
        return _write_gguf(order, opened, temporary, notify), None
    notify("writing the folder")
    write_hf(opened, temporary, dtype)
    # Compare a merged model with the unmerged adapter and base, unless the export also rounds the weights.
    is_exact = adapted is not None and dtype == torch.float32
    expected = adapted if is_exact and adapted is not None else expect(opened, dtype)
    notify(f"opening the export with transformers and comparing {_compared(opened)}")
    proof = prove(opened, temporary, expected)
    return [proof.sentence], proof


def _write_adapter(order: Order, opened: Opened, temporary: Path, notify: Notify) -> tuple[list[str], Proof | None]:
    assert opened.card.run is not None
    assert opened.card.adapter_phase is not None
    base = order.base or find_base(order.folder, opened.card.run, opened.card.adapter_phase)
    write_adapter(opened, temporary, base)
    notify(f"opening the adapter with peft and comparing {_compared(opened)}")
    proof = prove(opened, temporary, expect(opened, torch.float32), open_model=open_with_peft(base))
    return [proof.sentence.replace("transformers", "peft on transformers", 1)], proof


def _compared(opened: Opened) -> str:
    return "logits, ids and chats" if opened.template is not None else "logits and ids (there is no chat template)"


def _write_gguf(order: Order, opened: Opened, temporary: Path, notify: Notify) -> list[str]:
    name = f"{order.facts.name}-{order.gguf_type.upper()}.gguf"
    notify(f"writing {name} and reading it back")
    written = write_gguf(opened, temporary / name, order.gguf_type, name=order.facts.name)
    if order.kind == "ollama":
        (temporary / MODELFILE).write_text(modelfile(opened, name), encoding="utf-8")
    return [written.sentence]


def _record(order: Order, opened: Opened, checked: list[str], proof: Proof | None) -> dict[str, Any]:
    card = opened.card
    return {
        "schema": "homing.export/1",
        "kind": order.kind,
        "name": order.facts.name,
        "run": card.run.id if card.run is not None else "",
        "phase": card.phase,
        "step": card.step,
        "from": str(order.folder),
        "made_at": time.time(),
        "checked": checked,
        "proof": proof.to_dict() if proof is not None else None,
        "homing": order.facts.version,
    }


RECORD = EXPORT  # file in every export that records its format, its source and how it was checked


@contextlib.contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to. It is renamed to `out` if the block succeeds, and deleted otherwise."""
    _check_free(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        _let_others_read(temporary)
        if out.exists():
            gone = out.with_name(f".{out.name}.gone-{secrets.token_hex(4)}")
            os.replace(out, gone)
            os.replace(temporary, out)
            shutil.rmtree(gone)
        else:
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """Set the permissions of all files to 0644.

    Otherwise, a server that runs as a different user could not open them, because safetensors creates files that only
    their owner can read.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / RECORD).is_file():
        raise UsageError(
            what=f"{out} already exists and is not an export.",
            why="Exporting would replace its contents.",
            fix="Choose another folder: --out DIR",
        )
    if not force:
        raise UsageError(
            what=f"{out} already contains an export.",
            why="Exporting would replace it.",
            fix="Add --force to replace it, or choose another folder: --out DIR",
        )


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the export record, or None if the folder is not a homing export."""
    try:
        data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and str(data.get("schema", "")).startswith("homing.export/") else None
