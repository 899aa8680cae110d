"""`model.from`: what open weights are is known before anything is rented, from a folder, the Hub or its cache."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doubles import hub as hub_double
from tests.doubles.hub import READ, STRANGER, WRITE, Commit, File, Hub
from tests.doubles.s3_servers import free_port

from homing.config.weights.fetch_from_hub import list_repository
from homing.config.weights.open_weights import bring, read_source
from homing.errors import DataError, HomingError, StoreError, UsageError
from homing.hf_config import config_of
from homing.wire.run_json import Model, RopeScaling

SHAPE = Model("stock", "qwen2", 2, 32, 4, 2, 8, 48, 64, 100, True, 1e6, 1e-6)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def documents(**config: Any) -> dict[str, bytes]:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {chr(33 + n): n for n in range(60)}, "merges": []},
        "added_tokens": [{"id": 60, "content": "<|endoftext|>", "special": True}],
    }
    return {
        "config.json": json.dumps({**config_of(SHAPE), "torch_dtype": "bfloat16", **config}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [60, 12], "bos_token_id": 60}).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        "model.safetensors": b"\0" * 200_000,
        "README.md": b"hello",
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def publish(hub: Hub, repo_id: str, files: dict[str, bytes], **what: Any) -> None:
    stored = {name: File(data, is_lfs=len(data) > hub_double.LFS_FROM) for name, data in files.items()}
    hub.add(repo_id, **what).commits.append(Commit("c" * 40, "weights", stored))


class NoWaiting:
    """The SDK's clock, without its pauses between tries."""

    def __getattr__(self, name: str) -> object:
        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.utils._http.time", NoWaiting())
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    with hub_double.running() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def test_a_folder_tells_its_shape_tokenizer_template_and_files(tmp_path: Path) -> None:
    source = read_source("upstream", base=write(tmp_path / "upstream", documents()).parent)
    assert source.shape == SHAPE
    assert source.dtype == "bfloat16"
    assert (source.tokenizer_size, source.eos_ids, source.bos_id) == (61, (60, 12), 60)
    assert source.chat_template == TEMPLATE
    assert source.num_weight_bytes == 200_000
    assert "README.md" not in [file.name for file in source.files]
    assert bring(source) == tmp_path / "upstream"


def test_a_template_in_a_file_of_its_own_wins_and_one_of_several_is_the_default(tmp_path: Path) -> None:
    files = documents()
    files["tokenizer_config.json"] = json.dumps(
        {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    ).encode()
    assert read_source(str(write(tmp_path / "a", files))).chat_template == "d"
    files["chat_template.jinja"] = b"own"
    assert read_source(str(write(tmp_path / "b", files))).chat_template == "own"


def test_llama_3s_rope_scaling_is_read_in_both_spellings_and_others_are_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "rope_parameters": LLAMA3}
    scaling = read_source(str(write(tmp_path / "new", documents(**config)))).shape.rope_scaling
    assert scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    older = {"model_type": "llama", "rope_parameters": None, "rope_scaling": LLAMA3, "rope_theta": 5e5}
    assert read_source(str(write(tmp_path / "old", documents(**older)))).shape.rope_scaling == scaling
    yarn = documents(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6})
    with pytest.raises(DataError, match="cannot build") as caught:
        read_source(str(write(tmp_path / "yarn", yarn)))
    assert "'yarn'" in caught.value.why


def test_a_family_that_does_not_work_is_named_with_those_that_do(tmp_path: Path) -> None:
    odd = documents(model_type="gemma3", hidden_act="gelu", quantization_config={"quant_method": "gptq"})
    with pytest.raises(DataError) as caught:
        read_source(str(write(tmp_path / "odd", odd)))
    assert "gemma3" in caught.value.why
    assert "gelu" not in caught.value.why, "of another architecture nothing else matters"
    odd = documents(hidden_act="gelu", quantization_config={"quant_method": "gptq"})
    with pytest.raises(DataError) as caught_again:
        read_source(str(write(tmp_path / "odd too", odd)))
    assert all(word in caught_again.value.why for word in ("gelu", "gptq"))
    assert all(word in caught.value.fix for word in ("Llama", "Qwen2", "Qwen3"))


def test_every_missing_file_is_named_at_once(tmp_path: Path) -> None:
    files = documents()
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        del files[name]
    files["pytorch_model.bin"] = b"pickle"
    with pytest.raises(DataError) as caught:
        read_source(str(write(tmp_path / "bare", files)))
    assert all(name in caught.value.why for name in ("tokenizer.json", "model.safetensors", "config.json", "pickles"))
    sharded = documents()
    del sharded["model.safetensors"]
    shards = {f"t{n}": f"model-{n}.safetensors" for n in range(4)}
    sharded["model.safetensors.index.json"] = json.dumps({"weight_map": shards}).encode()
    sharded["model-2.safetensors"] = b"x"
    with pytest.raises(DataError, match="are incomplete") as caught:
        read_source(str(write(tmp_path / "shards", sharded)))
    assert all(f"model-{n}.safetensors" in caught.value.why for n in (0, 1, 3))
    for n in range(4):
        sharded[f"model-{n}.safetensors"] = b"x" * n
    assert read_source(str(write(tmp_path / "shards", sharded))).num_weight_bytes == 6


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ({"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}, "SentencePiece"),
        ({"type": "Unigram", "vocab": []}, "Unigram"),
        ({"type": "BPE", "vocab": {"a": 100}, "merges": []}, "101"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, model: dict[str, Any], word: str) -> None:
    files = documents() | {"tokenizer.json": json.dumps({"model": model, "added_tokens": []}).encode()}
    with pytest.raises(DataError, match=r"tokenizer\.json") as caught:
        read_source(str(write(tmp_path / "t", files)))
    assert word in caught.value.why


def test_nonsense_is_answered_with_a_fix_and_no_traceback(tmp_path: Path) -> None:
    for text in ("hf:someone", "hf:a/b/c", "nowhere/at/all"):
        with pytest.raises((DataError, UsageError)) as caught:
            read_source(text, base=tmp_path)
        assert caught.value.fix
    for name, data in (("config.json", b"[]"), ("config.json", b"{"), ("tokenizer.json", b"3"), ("config.json", b"{}")):
        with pytest.raises(HomingError):
            read_source(str(write(tmp_path / "bad", documents() | {name: data})))


@pytest.mark.acceptance(31)
def test_a_model_on_the_hub_is_read_without_its_weights_and_brought_whole_later(hub: Hub, tmp_path: Path) -> None:
    files = documents()
    publish(hub, "them/model", files, is_private=False)
    source = read_source("hf:them/model")
    assert source.address == f"hf:them/model@{'c' * 40}"
    assert source.shape == SHAPE
    weights = next(file for file in source.files if file.name == "model.safetensors")
    assert (weights.num_bytes, len(weights.sha256)) == (200_000, 64)
    assert not (source.metadata_dir / "model.safetensors").exists()
    folder = bring(source)
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.leaks == []


@pytest.mark.acceptance(31)
def test_what_was_brought_once_is_there_offline_and_the_cache_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, "them/model", documents(), is_private=False)
    bring(read_source("hf:them/model"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = read_source("hf:them/model")
    assert "HF_HUB_OFFLINE" in offline.note
    assert (bring(offline) / "model.safetensors").is_file()
    with pytest.raises(DataError, match="not in the Hugging Face cache"):
        read_source("hf:them/other")


def test_where_the_hub_does_not_answer_the_cache_serves_and_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "them/model", documents(), is_private=False)
    bring(read_source("hf:them/model"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "did not respond" in read_source("hf:them/model").note


@pytest.mark.acceptance(31, 94)
def test_a_gated_or_missing_model_says_which_token_was_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "them/gated", documents(), is_private=False, is_gated=True)
    publish(hub, "them/open", documents(), is_private=False)
    cases = [("hf:them/gated", "gated"), ("hf:them/nothing", "not found"), ("hf:them/open@v9", "no revision v9")]
    for token in (READ, STRANGER):
        monkeypatch.setenv("HF_TOKEN", token)
        for address, word in cases:
            with pytest.raises(DataError) as caught:
                read_source(address)
            assert word in caught.value.what
            assert "HF_TOKEN" in caught.value.why
            assert token not in str(caught.value.to_dict())
            assert f"{token[:3]}...{token[-2:]}" in caught.value.why
    monkeypatch.setenv("HUGGINGFACEHUB_API_TOKEN", READ)
    with pytest.raises(DataError) as caught:
        read_source("hf:them/gated")
    assert f"token of HUGGINGFACEHUB_API_TOKEN ({READ[:3]}...{READ[-2:]})" in caught.value.why, "of two, this one"
    monkeypatch.delenv("HUGGINGFACEHUB_API_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(DataError) as caught:
        read_source("hf:them/nothing")
    assert "no token" in caught.value.why


def test_a_name_that_the_hub_could_not_have_is_refused_without_a_traceback(hub: Hub) -> None:
    for address in ("hf:../..", "hf:them/open-", "hf:them/a..b"):
        with pytest.raises(DataError, match="is not a model on the Hub"):
            read_source(address)


def test_a_line_that_breaks_in_the_middle_is_an_error_with_a_fix(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "them/model", documents(), is_private=False)
    source = read_source("hf:them/model")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match="could not be fetched"):
        bring(source)


def test_one_command_asks_the_hub_once_and_a_commit_is_asked_about_once_for_all(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, homing_home: Path
) -> None:
    publish(hub, "them/model", documents(), is_private=False)
    asked: list[str] = []
    real = hub.answer
    monkeypatch.setattr(hub, "answer", lambda ask: (asked.append(ask.path.split("?")[0]), real(ask)))
    first = read_source("hf:them/model")
    assert sum("/api/models/" in path for path in asked) >= 2, "which commit, and what it contains"
    asked.clear()
    assert read_source("hf:them/model") == first
    assert asked == []

    another_command(monkeypatch)
    assert read_source("hf:them/model") == first
    assert len(asked) == 1, "main may have moved on; the content of the commit cannot"
    asked.clear()
    another_command(monkeypatch)
    assert read_source(first.address) == first
    assert asked == [], "with its commit named, no request is needed"

    changed = {name: File(data, is_lfs=False) for name, data in documents(rope_theta=5.0).items()}
    hub.add("them/model").commits.append(Commit("d" * 40, "newer", changed))
    another_command(monkeypatch)
    assert read_source("hf:them/model").revision == "d" * 40

    for memory in (homing_home / "cache/hub/them--model").iterdir():
        memory.write_text('{"endpoint": "' + hub.endpoint + '", "listing": {"sizes": []}}')
    another_command(monkeypatch)
    assert read_source(first.address) == first, "a memory that cannot be read is none"


def test_only_public_weights_with_a_hash_may_be_left_to_a_rented_machine(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, homing_home: Path
) -> None:
    publish(hub, "them/open", documents(), is_private=False)
    publish(hub, "me/gated", documents(), is_private=False, is_gated=True)
    publish(hub, "me/private", documents())
    hub.add("them/small", is_private=False).commits.append(
        Commit("d" * 40, "no LFS", {name: File(data, is_lfs=False) for name, data in documents().items()})
    )
    (file,) = read_source("hf:them/open").hub_files
    assert (file.name, file.num_bytes) == ("model.safetensors", 200_000)
    for address in ("hf:me/gated", "hf:me/private", "hf:them/small"):
        assert read_source(address).hub_files == (), address

    (memory,) = (homing_home / "cache/hub/them--open").iterdir()
    older = json.loads(memory.read_text())
    del older["listing"]["is_public"]
    memory.write_text(json.dumps(older))
    another_command(monkeypatch)
    assert read_source(f"hf:them/open@{'c' * 40}").hub_files == (file,), "an older homing's memory is asked about anew"
    bring(read_source("hf:them/open"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_source("hf:them/open").hub_files == (), "unknown from the cache alone"


def test_a_hub_behind_a_password_is_not_for_everybody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, "them/open", documents(), is_private=False)
    monkeypatch.setattr(
        "homing.config.weights.fetch_from_hub._api", lambda sdk: sdk.HfApi(endpoint=hub.endpoint, token=False)
    )
    monkeypatch.setattr(
        "homing.config.weights.fetch_from_hub._endpoint", lambda: hub.endpoint.replace("//", "//me:pw@")
    )
    assert not list_repository("them/open").is_public
    monkeypatch.setattr("homing.config.weights.fetch_from_hub._endpoint", lambda: hub.endpoint)
    assert list_repository("them/open").is_public


def another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.config.weights.fetch_from_hub._answers", {})
