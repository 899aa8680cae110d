"""`model.from`: read open weights (config, tokenizer, file list) before anything is rented.

  hf:OWNER/NAME[@REVISION] | FOLDER  ->  read_source  ->  Source: shape, tokenizer, template, files
  Source                             ->  bring        ->  a local folder that holds all files

Small files are read immediately; the weights are downloaded only by `bring`. The Hub is accessed through
huggingface_hub. If the Hub does not respond, or HF_HUB_OFFLINE is set, its local cache is used and `Source.note` says
so. torch is not needed, because the shape is computed from config.json.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.config.weights.fetch_from_hub import Listing, bring_files, list_repository
from homing.errors import DataError, UsageError
from homing.hf_config import model_of
from homing.tokenizer_json import read_tokenizer_bytes
from homing.wire import file_names
from homing.wire.chat_template import Unreadable, read_chat_template
from homing.wire.run_json import Model

__all__ = ["Source", "SourceFile", "bring", "chat_template_in", "is_hub_address", "read_source"]

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = f"{file_names.WEIGHTS}.index.json"
# Files other than the weights. The first two are required; the rest are used if present.
METADATA_FILES = (
    CONFIG,
    file_names.TOKENIZER,
    file_names.TOKENIZER_CONFIG,
    GENERATION,
    file_names.CHAT_TEMPLATE,
    INDEX,
)
_ADDRESS = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class SourceFile:
    name: str
    num_bytes: int
    sha256: str = ""  # the Hub reports the hash of large files; "" if unknown


@dataclass(frozen=True)
class Source:
    """Open weights as named in the run file, read and checked."""

    address: str  # hf:OWNER/NAME@COMMIT, or the folder; stored in run.json
    shape: Model
    metadata_dir: Path  # local folder with config.json and tokenizer.json
    files: tuple[SourceFile, ...]  # every file needed to use the model, including the weights
    tokenizer_size: int  # number of token ids; the model may have more embedding rows
    dtype: str  # from config.json, such as bfloat16; "" if unknown
    chat_template: str = ""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    repo_id: str = ""  # "" for a folder
    revision: str = ""  # the commit
    licence: str = ""
    note: str = ""  # a notice for the user, such as that the cache was used
    is_public: bool = False  # on the Hub and readable without a token

    @property
    def weights(self) -> tuple[SourceFile, ...]:
        return tuple(file for file in self.files if file.name.endswith(".safetensors"))

    @property
    def num_weight_bytes(self) -> int:
        return sum(file.num_bytes for file in self.weights)

    @property
    def hub_files(self) -> tuple[SourceFile, ...]:
        """The weight files that an instance can download directly from the Hub: all of them, or none.

        An instance can download them if the repository is public and the Hub reports a hash for every file.
        """
        return self.weights if self.is_public and all(file.sha256 for file in self.weights) else ()


def is_hub_address(text: str) -> bool:
    return text.startswith("hf:")


def read_source(text: str, *, base: Path | None = None) -> Source:
    """Read and check open weights. A relative folder is relative to `base`, the run file's folder."""
    if not is_hub_address(text):
        return _read_folder((base or Path()) / Path(text).expanduser())
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise UsageError(
            what=f"{text!r} is not a valid address for open weights.",
            why="Use hf:OWNER/NAME for a model on the Hub, or hf:OWNER/NAME@REVISION for one revision.",
            fix="For example: model.from: hf:Qwen/Qwen2.5-7B-Instruct",
        )
    repo_id, revision = found["repo"], found["revision"] or ""
    listing = list_repository(repo_id, revision)
    chosen = _chosen(listing.sizes, f"hf:{repo_id}")
    metadata_dir = bring_files(listing, [name for name in METADATA_FILES if name in listing.sizes])
    return _source(f"hf:{repo_id}@{listing.commit}", metadata_dir, chosen, listing)


def bring(source: Source) -> Path:
    """Return a local folder that holds all files. If they come from the Hub, download any that are missing."""
    if not source.repo_id:
        return source.metadata_dir
    listing = Listing(source.repo_id, source.revision, {file.name: file.num_bytes for file in source.files}, {})
    return bring_files(listing, [file.name for file in source.files])


def _read_folder(folder: Path) -> Source:
    if not folder.is_dir():
        raise DataError(
            what=f"No open weights found at {folder}.",
            why="model.from must be hf:OWNER/NAME, or a folder with config.json, tokenizer.json and safetensors files.",
            fix="Fix the path, or use a model on the Hub: model.from: hf:OWNER/NAME",
        )
    folder = folder.absolute()  # the trainer runs in a different working directory
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return _source(str(folder.resolve()), folder, _chosen(sizes, str(folder)), Listing("", "", sizes, {}))


def _chosen(sizes: dict[str, int], where: str) -> list[str]:
    """Return the names of the config files and any unsharded weights. Raise DataError, listing all missing files."""
    missing = [name for name in (CONFIG, file_names.TOKENIZER) if name not in sizes]
    if file_names.WEIGHTS not in sizes and INDEX not in sizes:
        pickled = sorted(name for name in sizes if name.endswith((".bin", ".pt", ".pth")))
        also = f"; its {', '.join(pickled[:3])} are pickles, which homing never opens" if pickled else ""
        missing.append(f"{file_names.WEIGHTS} (or {INDEX} with its shards{also})")
    if missing:
        raise DataError(
            what=f"{where} is not a model that homing can open.",
            why=f"It lacks {' and '.join(missing)}.",
            fix="Use weights in safetensors format with a tokenizer.json.",
        )
    weights = [file_names.WEIGHTS] if file_names.WEIGHTS in sizes else []
    return [*(name for name in METADATA_FILES if name in sizes and not (weights and name == INDEX)), *weights]


def _source(address: str, metadata_dir: Path, chosen: list[str], listing: Listing) -> Source:
    config = _read_json(metadata_dir / CONFIG)
    try:
        shape = model_of(config)
    except ValueError as exc:
        raise DataError(
            what=f"The {CONFIG} of {address} cannot be read.", why=str(exc), fix="Download it again."
        ) from exc
    except DataError as exc:
        exc.what = f"{address} is a model that homing cannot build."
        raise
    if INDEX in chosen:
        chosen = [*chosen, *_shards(metadata_dir / INDEX, listing.sizes, address)]
    generation = _read_json(metadata_dir / GENERATION) if GENERATION in chosen else {}
    return Source(
        address=address,
        shape=shape,
        metadata_dir=metadata_dir,
        files=tuple(SourceFile(name, listing.sizes[name], listing.hashes.get(name, "")) for name in chosen),
        tokenizer_size=_check_tokenizer(_read_json(metadata_dir / file_names.TOKENIZER), shape, address),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        chat_template=chat_template_in(metadata_dir),
        eos_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        bos_id=next(iter(_ids(generation.get("bos_token_id", config.get("bos_token_id")))), None),
        repo_id=listing.repo_id,
        revision=listing.commit,
        licence=listing.licence,
        note=listing.note,
        is_public=listing.is_public,
    )


def _shards(path: Path, sizes: dict[str, int], address: str) -> list[str]:
    index = _read_json(path)
    where = index.get("weight_map")
    shards = sorted({str(name) for name in where.values()}) if isinstance(where, dict) else []
    missing = [name for name in shards if name not in sizes]
    if missing or not shards:
        raise DataError(
            what=f"The weights of {address} are incomplete.",
            why=f"{len(missing)} of {len(shards)} files are missing: {', '.join(missing)}."
            if missing
            else f"{INDEX} lists no file.",
            fix="Download the missing files into the same folder.",
        )
    return shards


def _check_tokenizer(data: dict[str, Any], shape: Model, address: str) -> int:
    """Return the number of token ids. Reject tokenizers other than byte-level BPE, and ids without an embedding row."""
    given = data.get("model")
    model: dict[str, Any] = given if isinstance(given, dict) else {}
    vocab, added = model.get("vocab"), data.get("added_tokens") or []
    why = ""
    if model.get("type") != "BPE" or not isinstance(vocab, dict) or model.get("byte_fallback"):
        kind = "BPE with byte fallback (SentencePiece)" if model.get("byte_fallback") else str(model.get("type"))
        why = f"It is {kind}; homing supports byte-level BPE, as in Llama 3 and Qwen."
        size = 0
    else:
        ids = [*vocab.values(), *(entry.get("id", 0) for entry in added if isinstance(entry, dict))]
        size = 1 + max((number for number in ids if isinstance(number, int)), default=-1)
        if size > shape.vocab_size:
            why = f"It has {size:,} ids, but the model has only {shape.vocab_size:,} embedding rows."
    if why:
        raise DataError(
            what=f"The {file_names.TOKENIZER} of {address} cannot be used.",
            why=why,
            fix="Use weights of the Llama 3, Qwen2.5 or Qwen3 family with the tokenizer that came with them.",
        )
    return size


def chat_template_in(folder: Path) -> str:
    """Return the chat template in a model folder; "" if it has none."""
    try:
        return read_chat_template(folder).source
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be read.", str(exc), "Download the folder again.") from exc


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_tokenizer_bytes(path) if path.name == file_names.TOKENIZER else path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(what=f"{path} cannot be read.", why=str(exc), fix="Download the folder again.") from exc
    if not isinstance(data, dict):
        raise DataError(f"{path} cannot be read.", f"It is {type(data).__name__}, not an object.", "Download it again.")
    return data
