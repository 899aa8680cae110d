"""`homing publish`: one commit, private by default, and no upload before the token is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.doubles.hub import READ, WRITE, Commit, File, Hub

from homing.cli import output
from homing.cli.verbs import publish as verb
from homing.errors import StoreError, UsageError
from homing.store.address import parse_hub
from homing.store.publish_to_hub import look, publish
from homing.world import World

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
ADDRESS = parse_hub("hf:me/tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-hf"
    made.mkdir()
    (made / "export.json").write_text(json.dumps({"schema": "homing.export/1", "kind": "hf"}))
    (made / "README.md").write_text("a card")
    (made / "model.safetensors").write_bytes(b"w" * 150_000)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.acceptance("X16")
def test_publish_is_private_by_default_and_compares_with_the_repository(hub: Hub, folder: Path) -> None:
    output.configure(loudness=-1, is_json=False)
    verb.command("hf:me/tiny", str(folder))
    verb.command("hf:me/open", str(folder), public=True)
    assert hub.repos["model", "me/tiny"].is_private
    assert not hub.repos["model", "me/open"].is_private
    there = hub.repos["model", "me/tiny"].head.files
    assert there.keys() == set(names(folder))
    assert there["model.safetensors"].data == (folder / "model.safetensors").read_bytes()
    assert there["model.safetensors"].is_lfs
    assert len(hub.repos["model", "me/tiny"].commits) == 2
    assert hub.leaks == []


def test_a_token_that_may_only_read_is_noticed_before_anything_is_made(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, word in ((READ, "is read-only"), ("hf_nonsensenonsense", "invalid")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(StoreError, match="Cannot publish to") as caught:
            verb.command("hf:me/tiny", str(folder))
        assert word in caught.value.why
        assert token not in str(caught.value.to_dict())
        assert "write access" in caught.value.fix
    assert not hub.repos


def test_without_a_token_nothing_is_asked(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StoreError, match="Cannot publish to") as caught:
        verb.command("hf:me/tiny", str(folder))
    assert caught.value.why == "No Hugging Face token was found on this computer."


def test_existing_files_are_replaced_only_with_consent_and_old_weights_are_deleted(hub: Hub, folder: Path) -> None:
    old = {
        "model-00001-of-00002.safetensors": File(b"old", is_lfs=False),
        "model.safetensors.index.json": File(b"{}", is_lfs=False),
        "notes.md": File(b"mine", is_lfs=False),
    }
    hub.add("me/tiny").commits.append(Commit("a" * 40, "before", old))
    with pytest.raises(UsageError, match="Confirmation required") as caught:
        verb.command("hf:me/tiny", str(folder))
    assert "3 files" in caught.value.why
    assert hub.repos["model", "me/tiny"].head.files == old
    verb.command("hf:me/tiny", str(folder), yes=True)
    assert hub.repos["model", "me/tiny"].head.files.keys() == {*names(folder), "notes.md"}


def test_a_commit_by_another_in_between_is_not_written_over(hub: Hub, folder: Path) -> None:
    repo = hub.add("me/tiny")
    looked = look(ADDRESS, World())
    repo.commits.append(Commit("b" * 40, "upstream", {"README.md": File(b"upstream", is_lfs=False)}))
    with pytest.raises(StoreError, match="Someone else changed"):
        publish(looked, str(folder), names(folder), is_public=False, title="mine")
    assert repo.head.title == "upstream"


def test_what_the_hub_holds_otherwise_is_said(hub: Hub, folder: Path) -> None:
    hub.add("me/tiny")
    looked = look(ADDRESS, World())
    real = hub.commit

    def losing(repo, repo_id, body):  # type: ignore[no-untyped-def]
        answer = real(repo, repo_id, body)
        repo.head.files["README.md"] = File(b"other bytes", is_lfs=False)
        return answer

    hub.commit = losing  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="does not contain what was pushed") as caught:
        publish(looked, str(folder), names(folder), is_public=False, title="mine")
    assert "README.md" in caught.value.why


def test_a_card_that_the_hub_does_not_take_is_said_with_its_reason(hub: Hub, folder: Path) -> None:
    (folder / "README.md").write_text('---\nlicense: "my own"\n---\na card')
    with pytest.raises(StoreError, match="rejected the model card") as caught:
        verb.command("hf:me/tiny", str(folder))
    assert "license" in caught.value.why


def test_only_a_repository_of_its_own_is_a_model(hub: Hub, folder: Path) -> None:
    for text in ("hf:me/tiny/inside", "hf:datasets/me/tiny", "s3://bucket"):
        with pytest.raises(UsageError, match="is not a model"):
            verb.command(text, str(folder))
    hub.add("me/tiny")
    with pytest.raises(UsageError, match="is private"):
        verb.command("hf:me/tiny", str(folder), public=True)


@pytest.mark.slow
def test_what_is_no_export_yet_is_exported_and_checked_first(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lm.export.folders import make_checkpoint

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "models" / "tiny", "llama")
    verb.command("hf:me/tiny", "tiny", licence="One of my own")
    files = hub.repos["model", "me/tiny"].head.files
    assert {"config.json", "model.safetensors", "tokenizer.json", "export.json"} <= files.keys()
    assert b"trainer's logits" in files["README.md"].data
    assert b'license: other\nlicense_name: "One of my own"' in files["README.md"].data
    assert WRITE.encode() not in b"".join(file.data for file in files.values())
