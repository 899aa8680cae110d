"""`init_from: hf:OWNER/REPO/path`: a phase that starts from a checkpoint on the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.config.resolve.test_phase_numbers import RUN, texts, trained
from tests.config.weights.test_open_weights import hub
from tests.doubles.hub import Commit, File, Hub

from homing.config.load import Loaded
from homing.errors import Mistake
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = ["hub", "texts"]  # fixtures

Load = Callable[..., Loaded]
WEIGHTS = b"weights of mid"


@pytest.fixture
def on_hub(hub: Hub, load: Load, tmp_path: Path) -> dict[str, File]:
    """The files of a checkpoint in a folder of hf:me/moss, next to another one."""
    folder = trained(tmp_path / "elsewhere", load(RUN), "mid")
    (folder / file_names.WEIGHTS).write_bytes(WEIGHTS)
    manifest = json.loads((folder / file_names.MANIFEST).read_text())
    file = {"name": file_names.WEIGHTS, "num_bytes": len(WEIGHTS), "sha256": hashlib.sha256(WEIGHTS).hexdigest()}
    (folder / file_names.MANIFEST).write_text(json.dumps({**manifest, "files": [file]}))
    codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    files = {path.name: File(path.read_bytes(), path.name == file_names.WEIGHTS) for path in folder.iterdir()}
    stored = {f"mid_checkpoints/{name}": file for name, file in files.items()}
    hub.add("me/moss").commits.append(Commit("a" * 40, "mid", {**stored, "README.md": File(b"hello", False)}))
    return stored


@pytest.mark.regression("init-from-hub")
def test_a_phase_starts_from_a_checkpoint_on_the_hub_which_is_fetched_once(
    hub: Hub, on_hub: dict[str, File], load: Load
) -> None:
    wanted = "phases.2.init_from=hf:me/moss/mid_checkpoints"
    loaded = load(RUN, "train.only=sft", wanted)
    folder = Path(loaded.run.phases[0].init_from)
    assert (folder / file_names.WEIGHTS).read_bytes() == WEIGHTS
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert not (folder / "README.md").exists()
    hub.seen.clear()
    assert load(RUN, "train.only=sft", wanted).run.phases[0].init_from == str(folder)
    assert not any("resolve" in path for _, path, _, _ in hub.seen), "it is here already"


def test_what_is_not_there_or_not_as_its_manifest_says_is_a_mistake_of_that_key(
    hub: Hub, on_hub: dict[str, File], mistakes: Callable[..., list[Mistake]]
) -> None:
    (wrong,) = mistakes(RUN, "train.only=sft", "phases.2.init_from=hf:me/moss/nowhere")
    assert "has no checkpoint in nowhere" in wrong.problem
    (wrong,) = mistakes(RUN, "train.only=sft", "phases.2.init_from=hf:me")
    assert "hf:OWNER/REPO/path" in wrong.problem
    changed = {**on_hub, f"mid_checkpoints/{file_names.WEIGHTS}": File(b"of another owner", True)}
    hub.repos["model", "me/moss"].commits.append(Commit("b" * 40, "changed", changed))
    (wrong,) = mistakes(RUN, "train.only=sft", f"phases.2.init_from=hf:me/moss@{'b' * 40}/mid_checkpoints")
    assert "does not match its manifest" in wrong.problem
