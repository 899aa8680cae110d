"""A model folder from a stranger: nothing in it runs, nothing is written next to it, and each is refused in words.

Weights are safetensors and everything else is JSON, so there is no code to run; these files try all the same: pickles
under our names, headers that lie about sizes, shapes that would fill the memory, documents that a parser chokes on.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.lm.tiny import make_data, make_run

from homing.errors import HomingError
from homing.lm.generate import load_for_use
from homing.lm.model import Decoder, config_json
from homing.wire import file_names

CANARY = "canary-fired"


class Payload:
    """What a pickle would do if anybody opened it: leave a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    make_data(root / "data", num_documents=20)
    run = make_run(root / "data")
    model = Decoder(run.model)
    model.init_weights(3)
    folder = root / "model"
    folder.mkdir()
    save_file(model.weights_for_disk(), folder / file_names.WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config_json(run.model)))
    (folder / file_names.TOKENIZER).write_bytes((root / "data" / file_names.TOKENIZER).read_bytes())
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    for path in whole.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def header(text: bytes, *, length: int | None = None, tail: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + tail


def one_tensor(**entry: Any) -> bytes:
    return header(
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}}).encode()
    )


def zip_of_pickle(tmp_path: Path) -> bytes:
    """What torch.save writes: torch.load would run it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(str(tmp_path / CANARY))))
    return buffer.getvalue()


WEIGHTS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda _: b"",
    "one byte": lambda _: b"\0",
    "a pickle": lambda tmp: pickle.dumps(Payload(str(tmp / CANARY))),
    "a pickle of protocol 0": lambda tmp: pickle.dumps(Payload(str(tmp / CANARY)), protocol=0),
    "a torch archive with a pickle": zip_of_pickle,
    "a pickle behind a safetensors length": lambda tmp: header(pickle.dumps(Payload(str(tmp / CANARY)))),
    "a header of 2^63 bytes": lambda _: header(b"{}", length=2**63),
    "a header of 1 TB": lambda _: header(b"{}", length=2**40),
    "a header longer than the file": lambda _: header(b"{}", length=4096),
    "a header of no length": lambda _: header(b"", length=0),
    "a header that is a list": lambda _: header(b"[]"),
    "a header that is not JSON": lambda _: header(b"{'a': __import__('os')}"),
    "a header that is not UTF-8": lambda _: header(b'{"\xff\xfe": 1}'),
    "a header of nested lists": lambda _: header(b"[" * 100_000 + b"]" * 100_000),
    "a tensor of no file": lambda _: header(b"{}", tail=b""),
    "an unknown dtype": lambda _: one_tensor(dtype="PICKLE"),
    "negative offsets": lambda _: one_tensor(data_offsets=[-16, 0]),
    "offsets past the end": lambda _: one_tensor(data_offsets=[0, 2**40]),
    "offsets that go back": lambda _: one_tensor(data_offsets=[16, 0]),
    "a negative shape": lambda _: one_tensor(shape=[-4]),
    "a shape that overflows": lambda _: one_tensor(shape=[2**62, 2**62]),
    "a shape that is no list": lambda _: one_tensor(shape="4"),
    "a name that is a path": lambda _: header(
        json.dumps({"../../x": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    ),
    "the same tensor twice": lambda _: header(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    ),
    "tensors over each other": lambda _: header(
        json.dumps({n: {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} for n in "ab"}).encode()
    ),
}


def changed(**keys: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: {**config, **keys}


CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a billion layers": changed(num_hidden_layers=10**9),
    "a vocabulary of a trillion": changed(vocab_size=10**12),
    "a width of a trillion": changed(hidden_size=10**12),
    "a context of a trillion": changed(max_position_embeddings=10**12),
    "a feed-forward of a trillion": changed(intermediate_size=10**12),
    "layers below nothing": changed(num_hidden_layers=-1),
    "no heads": changed(num_attention_heads=0),
    "layers of infinity": changed(num_hidden_layers=float("inf")),
    "layers of NaN": changed(num_hidden_layers=float("nan")),
    "layers as a list": changed(num_hidden_layers=[12]),
    "layers as words": changed(num_hidden_layers="__import__('os').system('true')"),
    "layers of null": changed(num_hidden_layers=None),
    "a base of infinity": changed(rope_theta=float("inf"), rope_parameters=None),
    "rope as a list": changed(rope_parameters=["default"]),
    "code of its own": changed(
        model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Evil"}, trust_remote_code=True
    ),
    "a list": lambda _: [],
    "a number": lambda _: 7,
    "null": lambda _: None,
}

DOCUMENTS: dict[str, bytes] = {
    "nothing": b"",
    "nested lists": b"[" * 200_000 + b"]" * 200_000,
    "nested objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "bytes that are no text": bytes(range(256)),
    "a pickle": pickle.dumps({"a": 1}),
    "a number of a million digits": b'{"num_hidden_layers": ' + b"9" * 1_000_000 + b"}",
    "half a document": b'{"model_type": "llama", "vocab',
}

TOKENIZERS: dict[str, bytes] = {
    "another kind": b'{"model": {"type": "Unigram", "vocab": []}}',
    "no vocabulary": b'{"model": {"type": "BPE"},'
    b' "added_tokens": [{"content": "<|endoftext|>", "id": 0, "special": true}]}',
    "a vocabulary that is a list": b'{"model": {"type": "BPE", "vocab": [1, 2], "merges": []}, "added_tokens": []}',
    "ids below nothing": b'{"model": {"type": "BPE", "vocab": {"a": -5}, "merges": []},'
    b' "added_tokens": [{"content": "<|endoftext|>", "id": -1, "special": true}]}',
    "merges of what is not there": b'{"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["x y", "x"]},'
    b' "added_tokens": [{"content": "<|endoftext|>", "id": 0, "special": true}]}',
    "added tokens that are words": b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": "evil"}',
    "added tokens without content": b'{"model": {"type": "BPE", "vocab": {}, "merges": []},'
    b' "added_tokens": [{"special": true}]}',
}


def refuse(folder: Path) -> None:
    """Refused with what, why and what to do, and the surroundings are as before."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(HomingError) as caught:
        load_for_use(folder, device="cpu")
    assert caught.value.what
    assert caught.value.fix
    assert sorted(folder.parent.rglob("*")) == before
    assert not (folder.parent / CANARY).exists()


def test_the_folder_itself_opens_so_that_a_refusal_means_something(folder: Path) -> None:
    model, _ = load_for_use(folder, device="cpu")
    assert model.shape.vocab_size == 272


@pytest.mark.parametrize("name", WEIGHTS)
def test_hostile_weights_are_refused(folder: Path, name: str) -> None:
    (folder / file_names.WEIGHTS).write_bytes(WEIGHTS[name](folder.parent))
    refuse(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_shapes_are_refused_before_anything_is_built(folder: Path, name: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name](json.loads(path.read_text()))))
    refuse(folder)


@pytest.mark.parametrize("file", ["config.json", file_names.TOKENIZER, file_names.MANIFEST])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_a_parser_chokes_on_are_refused(folder: Path, file: str, name: str) -> None:
    (folder / file).write_bytes(DOCUMENTS[name])
    refuse(folder)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hostile_tokenizers_are_refused(folder: Path, name: str) -> None:
    (folder / file_names.TOKENIZER).write_bytes(TOKENIZERS[name])
    refuse(folder)


@pytest.mark.parametrize("file", [file_names.WEIGHTS, file_names.TOKENIZER])
def test_a_pipe_in_the_place_of_a_file_does_not_hang_us(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    refuse(folder)
