"""A tiny language, its shards and a run that trains on them in a second or two, on any machine.

make_data(folder)         tokenizer.json (one id a byte, sixteen specials before), shards, manifest.json
make_run(data_dir, ...)   the resolved run of a small model on that data
make_run_dir(folder, run) a run directory that `python -m homing.lm.train` accepts
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from homing.wire import codec, file_names
from homing.wire.run_json import Cloud, Data, Limits, Model, Optimizer, Phase, Run, Sampling, Schedule, Sizes, Train
from homing.wire.shard_manifest import DataManifest, Shard, Split

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|reserved_{n}|>" for n in range(4, 16))]
VOCAB_SIZE = len(SPECIALS) + 256
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "home", "to", "eat", "red", "fish", "at", "night"]


def write_shards(
    folder: Path, split: str, documents: Sequence[Sequence[int]], *, dtype: str = "uint16", num_shards: int = 1
) -> Split:
    """Documents of ids as they stand (the caller puts <|endoftext|> first), spread over shards in order."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(num_shards):
        part = documents[number * len(documents) // num_shards : (number + 1) * len(documents) // num_shards]
        offsets = np.cumsum([0, *(len(document) for document in part)])
        tokens = np.array([token for document in part for token in document])
        bin_bytes, idx_bytes = (
            tokens.astype(f"<u{2 if dtype == 'uint16' else 4}").tobytes(),
            offsets.astype("<u8").tobytes(),
        )
        bin_name, idx_name = file_names.shard_name(split, number), file_names.index_name(split, number)
        (folder / bin_name).write_bytes(bin_bytes)
        (folder / idx_name).write_bytes(idx_bytes)
        shards.append(
            Shard(
                name=bin_name,
                index_name=idx_name,
                num_tokens=len(tokens),
                num_documents=len(part),
                num_bytes=len(bin_bytes),
                sha256=hashlib.sha256(bin_bytes).hexdigest(),
                index_sha256=hashlib.sha256(idx_bytes).hexdigest(),
            )
        )
    return Split(
        num_tokens=sum(s.num_tokens for s in shards),
        num_documents=len(documents),
        num_text_bytes=sum(len(document) - 1 for document in documents if len(document)),
        shards=shards,
    )


def write_manifest(folder: Path, splits: dict[str, Split], *, dtype: str = "uint16") -> DataManifest:
    tokenizer = folder / file_names.TOKENIZER
    manifest = DataManifest(
        dtype=dtype,
        vocab_size=VOCAB_SIZE,
        tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else "",
        specials=SPECIALS,
        splits=splits,
        source=[],
        source_sha256="",
    )
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest, indent=1))
    return manifest


def write_byte_tokenizer(folder: Path, specials: Sequence[str] = SPECIALS) -> None:
    """Byte-level BPE without a merge: id = 16 + the byte's rank in the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(specials)}
    vocab |= {char: len(specials) + number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / file_names.TOKENIZER))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    (folder / file_names.TOKENIZER_CONFIG).write_text(json.dumps(config))


def make_documents(count: int, *, seed: int) -> list[list[int]]:
    """Sentences of common words: enough order to learn something in fifty steps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    char_of = {" ": "Ġ", "\n": "Ċ"}
    source = random.Random(seed)
    documents = []
    for _ in range(count):
        text = " ".join(source.choice(WORDS) for _ in range(source.randint(3, 30))) + ".\n"
        documents.append([0, *(len(SPECIALS) + alphabet.index(char_of.get(c, c)) for c in text)])
    return documents


def make_data(
    folder: Path, *, num_documents: int = 300, num_shards: int = 2, specials: Sequence[str] = SPECIALS
) -> DataManifest:
    write_byte_tokenizer(folder, specials)
    splits = {
        "train": write_shards(folder, "train", make_documents(num_documents, seed=1), num_shards=num_shards),
        "val": write_shards(folder, "val", make_documents(max(4, num_documents // 10), seed=2)),
    }
    return write_manifest(folder, splits)


def make_run(data_dir: Path, *, train: dict[str, Any] | None = None, **phase: Any) -> Run:
    """The keywords change the one phase; `train` changes the section of that name."""
    manifest_bytes = (data_dir / file_names.MANIFEST).read_bytes()
    manifest = codec.loads(DataManifest, manifest_bytes)
    model = Model(
        family="stock",
        arch="qwen3",
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        ffn_width=64,
        context=32,
        vocab_size=manifest.vocab_size,
        is_tied=True,
    )
    settings: dict[str, Any] = {
        "kind": "pretrain",
        "method": "full",
        "num_steps": 12,
        "batch_tokens": 256,
        "micro_batch": 4,
        "optimizer": Optimizer("muon", 0.02, 0.01, 0.01, 0.01, 0.0),
        "schedule": Schedule("wsd", 2, 4, 0.0),
        "eval_every": 4,
        "eval_tokens": 512,
        "save_every": 4,
        "save_every_s": 0.0,
        "sample_every": 0,
        "keep_last": 2,
    }
    num_params, num_matmul_params = count_params(model)
    return Run(
        name="tiny",
        seed=7,
        model=model,
        sizes=Sizes(num_params, num_matmul_params, 6.0 * num_matmul_params + 12.0 * 2 * 32 * 32),
        data=Data(
            dir=str(data_dir),
            manifest_sha256=hashlib.sha256(manifest_bytes).hexdigest(),
            tokenizer_sha256=manifest.tokenizer_sha256,
            num_train_tokens=manifest.splits["train"].num_tokens,
            num_val_tokens=manifest.splits["val"].num_tokens,
        ),
        phases=[Phase(**(settings | phase))],
        train=dataclasses.replace(Train(device="cpu", num_threads=1, log_every=1), **(train or {})),
        sampling=Sampling(prompts=["the cat"], num_tokens=8),
        limits=Limits(),
        cloud=Cloud(),
        store="file:/nowhere",
        id="tiny-20260101-000000-abcd",
    )


def count_params(model: Model) -> tuple[int, int]:
    """(every parameter, those in matrix products) of a tied qwen3."""
    assert (model.arch, model.is_tied) == ("qwen3", True)
    heads = (model.num_heads * 2 + model.num_kv_heads * 2) * model.head_size
    blocks = model.num_layers * (model.width * heads + 3 * model.width * model.ffn_width)
    norms = model.num_layers * (2 * model.width + 2 * model.head_size) + model.width
    embedding = model.vocab_size * model.width
    return blocks + norms + embedding, blocks + embedding


def make_run_dir(folder: Path, run: Run) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_names.RUN).write_text(codec.dumps(run, indent=1))
    return folder
