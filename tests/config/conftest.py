"""A folder of its own for each test, and a way to say what a run file holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.config.load import Loaded, load_run
from homing.errors import Mistake, RunFileError
from homing.wire.codec import dumps
from homing.wire.shard_manifest import DataManifest, Shard, SourceFile, Split

BASE = """\
name: base
model:
  layers: 2
  width: 64
  heads: 2
  context: 32
phases:
  - steps: 100
    batch_tokens: 256
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "work"
    (place / "runs").mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def load(folder: Path) -> Callable[..., Loaded]:
    """load(text, *sets, name="base.yaml"): the run that this text describes."""

    def run(text: str | bytes, *sets: str, name: str = "base.yaml", **options: bool) -> Loaded:
        raw = text if isinstance(text, bytes) else text.encode()
        (folder / "runs" / name).write_bytes(raw)
        return load_run(f"runs/{name}", sets, **options)

    return run


@pytest.fixture
def mistakes(load: Callable[..., Loaded]) -> Callable[..., list[Mistake]]:
    def run(text: str | bytes, *sets: str, name: str = "base.yaml") -> list[Mistake]:
        with pytest.raises(RunFileError) as caught:
            load(text, *sets, name=name)
        assert caught.value.exit_code == 2
        return caught.value.mistakes

    return run


def put_data(folder: Path, name: str = "base", vocab_size: int = 512, num_tokens: int = 10_000) -> Path:
    """A data directory as `homing prep` would leave it; the tokens are zeros."""
    place = folder / "data" / name
    place.mkdir(parents=True)
    tokenizer = json.dumps({"model": {"vocab": {str(n): n for n in range(vocab_size)}}, "added_tokens": []}).encode()
    (place / "tokenizer.json").write_bytes(tokenizer)
    splits = {}
    for split, count in (("train", num_tokens), ("val", num_tokens // 10)):
        tokens, index = bytes(2 * count), count.to_bytes(16, "little")
        (place / f"{split}-00000.bin").write_bytes(tokens)
        (place / f"{split}-00000.idx").write_bytes(index)
        shard = Shard(f"{split}-00000.bin", f"{split}-00000.idx", count, 1, len(tokens), _sha(tokens), _sha(index))
        splits[split] = Split(count, 1, 4 * count, [shard])
    manifest = DataManifest(
        dtype="uint16",
        vocab_size=vocab_size,
        tokenizer_sha256=_sha(tokenizer),
        specials=["<|endoftext|>"],
        splits=splits,
        source=[SourceFile("a.txt", 1, "0")],
        source_sha256="0",
        settings={"vocab_size": vocab_size},
    )
    (place / "manifest.json").write_text(dumps(manifest))
    return place


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
