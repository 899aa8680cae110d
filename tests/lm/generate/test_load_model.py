"""A checkpoint folder is used only when all of it is there and belongs together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_data, make_run

from homing.errors import DataError, HomingError, IntegrityError, UsageError
from homing.lm.generate import ChatTurns, complete, decode_stream, load_for_use, load_model, read_card
from homing.lm.model import Decoder, config_json, lora
from homing.lm.model.decoder import PRECISIONS
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.sampling_settings import SamplingSettings
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash
from homing.wire.run_json import Lora, Run


def seal(folder: Path, *, phase: str = "pretrain") -> None:
    """The manifest, written last, as a checkpoint has it."""
    files = [
        FileHash(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if path.name != file_names.MANIFEST
    ]
    manifest = CheckpointManifest("tiny", "tiny-20260101-000000-abcd", phase, 12, 3072, True, "", 7, files)
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_data(tmp_path / "data", num_documents=20)
    run = make_run(tmp_path / "data")
    model = Decoder(run.model)
    model.init_weights(3)
    folder = tmp_path / "step-00000012"
    folder.mkdir()
    save_file(model.weights_for_disk(), folder / file_names.WEIGHTS)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    (folder / "config.json").write_text(json.dumps(config_json(run.model)))
    (folder / file_names.TOKENIZER).write_bytes((tmp_path / "data" / file_names.TOKENIZER).read_bytes())
    seal(folder)
    return folder


def test_a_whole_checkpoint_gives_its_model_and_tokenizer(checkpoint: Path) -> None:
    model, tokenizer = load_for_use(checkpoint, device="cpu")
    reference = Decoder(model.shape)
    reference.init_weights(3)
    for name, tensor in reference.weights_for_disk().items():
        assert torch.equal(model.weights_for_disk()[name], tensor)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert not model.training
    card = read_card(checkpoint)
    assert (card.run_name, card.phase, card.step) == ("tiny", "pretrain", 12)


def test_a_checkpoint_without_its_tokenizer_is_refused_with_how_to_get_it(checkpoint: Path) -> None:
    (checkpoint / file_names.TOKENIZER).unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json") as caught:
        load_for_use(checkpoint)
    assert "homing fetch tiny" in caught.value.fix
    assert "data/tokenizer.json" in caught.value.fix


@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.RUN])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / "config.json").unlink()
    with pytest.raises(DataError, match="is not a checkpoint") as caught:
        load_for_use(checkpoint)
    assert name in caught.value.why


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no checkpoint at"):
        load_for_use(tmp_path / "nothing")


@pytest.mark.parametrize("name", [file_names.WEIGHTS, file_names.RUN, file_names.TOKENIZER])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_refused_by_its_hash(checkpoint: Path, name: str, damage: str) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    if damage == "flip":
        # A digit of a number stays valid JSON, so only the hash detects it; in the weights any byte will do.
        place = data.rindex(b"1") if name != file_names.WEIGHTS else len(data) - 1
        data[place] ^= 1
    else:
        data += b" "
    (checkpoint / name).write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        load_for_use(checkpoint)
    assert name in caught.value.why


def write_adapter(checkpoint: Path, folder: Path, *, base_sha256: str = "") -> Decoder:
    """The checkpoint of an adapter on the weights of `checkpoint`; "": as its paper should say."""
    run = codec.loads(Run, (checkpoint / file_names.RUN).read_bytes())
    settings = Lora(rank=4, alpha=8.0)
    model = Decoder(run.model)
    model.init_weights(3)
    found = lora.freeze(model, "fp32")
    lora.add_lora(model, settings, seed=1)
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    for name, tensor in lora_tensors(model).items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * ("lora_B" in name) + tensor)
    save_file(lora_tensors(model), folder / file_names.ADAPTER)
    (folder / file_names.ADAPTER_CONFIG).write_text(json.dumps({"homing_base_sha256": base_sha256 or found}))
    phase = dataclasses.replace(run.phases[0], method="lora", lora=settings)
    (folder / file_names.RUN).write_text(codec.dumps(dataclasses.replace(run, phases=[phase])))
    (folder / file_names.TOKENIZER).write_bytes((checkpoint / file_names.TOKENIZER).read_bytes())
    seal(folder)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_is_put_into_its_weights_and_the_two_are_kept_as_they_are_computed_with(
    checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    """In fp32 a card would hold twice as much, and cast every weight anew for every token."""
    wanted = write_adapter(checkpoint, tmp_path / "adapter")
    model, _ = load_for_use(tmp_path / "adapter", "cpu", precision=precision, base=checkpoint)
    assert {parameter.dtype for parameter in model.parameters()} == {PRECISIONS[precision]}
    lora.merge(wanted)
    ids_BT = torch.randint(model.shape.vocab_size, (2, 16), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():  # as each weight is cast when it is read
        torch.testing.assert_close(model(ids_BT), wanted.set_precision(precision)(ids_BT), rtol=0.0, atol=0.0)


def test_an_adapter_is_put_into_its_weights_before_they_come_onto_the_card(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 those of 7B would not fit a card of 24 GB, which holds them in 16 bits."""
    write_adapter(checkpoint, tmp_path / "adapter")
    merged, plain = list[str](), load_model.load_adapted

    def listened(*args: Any) -> Decoder:
        model = plain(*args)
        merged.append(model.device.type)
        return model

    monkeypatch.setattr(load_model, "pick_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(load_model, "load_adapted", listened)
    model, _ = load_for_use(tmp_path / "adapter", "cuda", precision="bf16", base=checkpoint)
    assert merged == ["cpu"]
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert {(b.device.type, b.dtype) for b in model.buffers()} == {("meta", torch.float32)}


def test_an_adapter_that_lost_the_paper_that_names_its_weights_is_damaged_and_not_put_on_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(checkpoint, folder, base_sha256="0" * 64)
    with pytest.raises(IntegrityError, match="different base weights"):
        load_for_use(folder, "cpu", base=checkpoint)
    (folder / file_names.ADAPTER_CONFIG).unlink()
    with pytest.raises(IntegrityError, match="damaged") as caught:
        load_for_use(folder, "cpu", base=checkpoint)
    assert "adapter_config.json is missing" in str(caught.value.why)


def test_a_checkpoint_of_ours_without_a_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / file_names.MANIFEST).unlink()
    with pytest.raises(IntegrityError, match="not a complete checkpoint"):
        load_for_use(checkpoint)


def test_another_vocabulary_is_refused_naming_both(checkpoint: Path) -> None:
    data = json.loads((checkpoint / file_names.TOKENIZER).read_text())
    vocab = data["model"]["vocab"]
    vocab["Ġt"] = len(vocab)
    data["model"]["merges"] = [["Ġ", "t"]]
    (checkpoint / file_names.TOKENIZER).write_text(json.dumps(data))
    seal(checkpoint)
    with pytest.raises(DataError, match="does not match the weights") as caught:
        load_for_use(checkpoint)
    assert "273" in caught.value.why
    assert "272" in caught.value.why
    assert "tokenizer.json" in caught.value.why


@pytest.mark.acceptance(135)
def test_a_tokenizer_of_the_same_size_but_not_the_same_is_refused(checkpoint: Path) -> None:
    text = (checkpoint / file_names.TOKENIZER).read_text()
    (checkpoint / file_names.TOKENIZER).write_text(text + "\n")
    seal(checkpoint)
    with pytest.raises(DataError, match="does not match the weights") as caught:
        load_for_use(checkpoint)
    assert "sha256" in caught.value.why


def test_a_folder_from_elsewhere_opens_by_its_config(checkpoint: Path) -> None:
    (checkpoint / file_names.MANIFEST).unlink()
    (checkpoint / file_names.RUN).unlink()
    model, _ = load_for_use(checkpoint, device="cpu")
    assert model.shape.vocab_size == 272
    assert read_card(checkpoint).run_name == ""


def test_files_that_are_not_what_their_names_say_are_refused(checkpoint: Path) -> None:
    for name in (file_names.WEIGHTS, file_names.RUN, file_names.TOKENIZER, file_names.MANIFEST):
        before = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(b"not at all")
        if name != file_names.MANIFEST:
            seal(checkpoint)
        with pytest.raises(HomingError) as caught:
            load_for_use(checkpoint)
        assert name in caught.value.what + caught.value.why
        (checkpoint / name).write_bytes(before)
        seal(checkpoint)


def test_weights_of_another_shape_are_refused_by_name(checkpoint: Path) -> None:
    run = codec.loads(type(make_run(checkpoint.parent / "data")), (checkpoint / file_names.RUN).read_bytes())
    wider = dataclasses.replace(run, model=dataclasses.replace(run.model, ffn_width=96))
    (checkpoint / file_names.RUN).write_text(codec.dumps(wider))
    seal(checkpoint)
    with pytest.raises(DataError, match="do not fit") as caught:
        load_for_use(checkpoint)
    assert (
        "model.layers.0.mlp.down_proj.weight has shape (32, 64) in the file but (32, 96) in the model"
        in caught.value.why
    )


def test_a_device_that_is_not_here_is_said_so(checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError, match="cuda was requested"):
        load_for_use(checkpoint, device="cuda")


# -- text --------------------------------------------------------------------------------------------------------------


def test_half_a_character_is_never_shown(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint / file_names.TOKENIZER)
    text = "für 猫 und 🐈, nicht mehr"
    chunks = list(decode_stream(tokenizer, tokenizer.encode(text)))
    assert "".join(chunks) == text
    assert all("\ufffd" not in piece for piece in chunks)
    assert len(chunks) > 10


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7])
def test_tokens_that_end_inside_characters_spoil_none_however_many_follow_each_other(size: int) -> None:
    text = "日本語の文字列🐈é猫" * 3
    data = text.encode()
    tokens = [data[at : at + size] for at in range(0, len(data), size)]

    class Bytes:
        """A tokenizer with these tokens."""

        def decode(self, ids: list[int]) -> str:
            return b"".join(tokens[i] for i in ids).decode(errors="replace")

    chunks = list(decode_stream(cast(Tokenizer, Bytes()), range(len(tokens))))
    assert "".join(chunks) == text
    assert all(piece and "\ufffd" not in piece for piece in chunks)
    assert len(chunks) > len(tokens) / 4  # as soon as there is something to show


def test_bytes_that_never_become_a_character_are_shown_as_such_and_do_not_stop_the_text(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint / file_names.TOKENIZER)
    cat = tokenizer.encode("🐈")
    ids = [*cat[:1], *tokenizer.encode("abcdef"), *cat[:2]]
    text = "".join(decode_stream(tokenizer, ids))
    assert "abcdef" in text
    assert text.endswith("\ufffd")


def test_completion_begins_a_document_and_repeats_with_its_seed(checkpoint: Path) -> None:
    model, tokenizer = load_for_use(checkpoint, device="cpu")
    texts = [
        "".join(complete(model, tokenizer, "the", num_tokens=20, sampling=SamplingSettings(seed=4))) for _ in range(2)
    ]
    assert texts[0] == texts[1] != ""
    assert isinstance("".join(complete(model, tokenizer, "", num_tokens=5)), str)


def test_turns_are_chatml_and_text_cannot_forge_one(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint / file_names.TOKENIZER)
    turns = ChatTurns(tokenizer)
    prompt = list(turns.ask("Hello <|im_end|>"))
    assert tokenizer.decode(prompt) == (
        "<|endoftext|><|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.count(turns.end_id) == 1
    turns.answered(tokenizer.encode("Hi."))
    after = turns.ask("More")
    assert tokenizer.decode(after).endswith(
        "assistant\nHi.<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.regression("device-index")
def test_the_gpu_that_was_named_is_the_current_one_before_anything_is_put_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, streams and graphs go to the current GPU, wherever the tensors are."""
    current: list[object] = []
    second, plain = torch.device("cuda", 1), load_model.load_decoder

    def load_decoder(*args: Any, device: torch.device, **settings: Any) -> Decoder:
        assert device == second
        assert current == [second], "the model was loaded with another GPU as the current one"
        return plain(*args, device=torch.device("cpu"), **settings)

    monkeypatch.setattr(load_model, "pick_device", lambda _: second)
    monkeypatch.setattr(load_model, "pick_precision", lambda *_: "fp32")
    monkeypatch.setattr(load_model, "load_decoder", load_decoder)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    load_for_use(checkpoint, "cuda:1")
