"""A small random Llama on the Hub, LoRA on a machine that takes it from there; home never has the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.cli.control_rig import clear
from tests.cloud.rig import homing, look_more_often
from tests.doubles import hub as hub_double
from tests.doubles import s3_servers
from tests.doubles.hub import READ, Commit, File, Hub
from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

from homing.config.load import load_run

COMMIT = "c" * 40
TEXT = "".join(f"Line {n}: the cat sat on the mat, and the {n % 7} hats were flat.\n" for n in range(200))
RUN_FILE = """
name: cat
data: {{text: [cat.txt], val_fraction: 0.1}}
model: {{from: hf:them/tiny, context: 32}}
phases:
  - {{kind: mid, method: lora, steps: 4, batch_tokens: 64, lora: {{rank: 4}}}}
train: {{device: cpu, compile: "off"}}
store: s3://runs/cat?endpoint={endpoint}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_reference(tmp_path / "upstream", "llama", vocab_size=400, max_shard_size="30KB")
    write_their_tokenizer(tmp_path / "upstream", "llama", TEXT)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_TOKEN", READ)
    with hub_double.running() as running:
        files = {
            p.name: File(p.read_bytes(), is_lfs=p.suffix == ".safetensors") for p in (tmp_path / "upstream").iterdir()
        }
        running.add("them/tiny", is_private=False).commits.append(Commit(COMMIT, "weights", files))
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


@pytest.fixture
def project(tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_servers.SECRET_KEY)
    look_more_often(monkeypatch)
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "cat.txt").write_text(TEXT)
    monkeypatch.chdir(folder)
    with s3_servers.moto() as moto:
        boto3.client("s3", endpoint_url=moto.endpoint, region_name="us-east-1").create_bucket(Bucket="runs")
        (folder / "runs/cat.yaml").write_text(RUN_FILE.format(endpoint=moto.endpoint))
        yield folder
        clear(homing_home)


@pytest.mark.slow
def test_what_is_private_comes_here_and_that_is_said_with_its_size(
    hub: Hub, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/own").commits.append(hub.add("them/tiny").head)
    prepared = homing(capsys, monkeypatch, "prep", "cat", "--set", "model.from=hf:me/own")
    assert prepared.code == 0, prepared.err
    assert "kB. Downloaded locally and pushed through the store: they are not public" in " ".join(prepared.err.split())
    run = load_run("cat", ["model.from=hf:me/own"]).run
    assert run.base is not None
    assert run.base.hub_files == []
    assert list(Path(run.base.dir).glob("*.safetensors"))


@pytest.mark.slow
def test_training_on_this_computer_brings_what_prep_left_to_a_machine(
    hub: Hub, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert homing(capsys, monkeypatch, "prep", "cat").code == 0
    assert list((tmp_path / "hf").rglob("*.safetensors")) == []
    trained = homing(capsys, monkeypatch, "train", "cat")
    assert trained.code == 0, trained.err
    assert list((tmp_path / "hf").rglob("*.safetensors"))


@pytest.mark.acceptance(31)
@pytest.mark.slow
def test_lora_on_weights_that_only_the_machine_took_from_the_hub(
    hub: Hub, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = homing(capsys, monkeypatch, "prep", "cat")
    assert prepared.code == 0, prepared.err
    assert "the instance downloads them from the Hub" in prepared.err
    base = load_run("cat").run.base
    assert base is not None
    assert len(base.hub_files) > 1

    launched = homing(capsys, monkeypatch, "launch", "cat", "--spend-limit", "5", "--yes")
    assert launched.code == 0, launched.err
    assert "from the Hub, verified by sha256" in launched.err
    watched = homing(capsys, monkeypatch, "watch", "cat")
    assert watched.code == 0, watched.err
    fetched = homing(capsys, monkeypatch, "fetch", "cat", "--to", "out")
    assert fetched.code == 0, fetched.err
    manifest = json.loads((project / "out/manifest.json").read_bytes())
    assert manifest["step"] == 4
    adapter = load_file(project / "out/adapter_model.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name), "it learned"

    assert [path.name for path in (tmp_path / "hf").rglob("*.safetensors")] == []
    import boto3

    client = boto3.client("s3", endpoint_url=load_run("cat").run.store.split("endpoint=")[1], region_name="us-east-1")
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="runs")["Contents"]]
    assert [key for key in keys if any(file.sha256 in key for file in base.hub_files)] == []
    taken = [token for method, path, token, _ in hub.seen if method == "GET" and path.startswith("/cdn/")]
    assert taken == [""] * len(base.hub_files)

    # What was made with them is used at home: then, and only then, they come here.
    said = homing(capsys, monkeypatch, "generate", "out", "--prompt", "Line", "--tokens", "4")
    assert said.code == 0, said.err
    assert len(list((tmp_path / "hf").rglob("*.safetensors"))) == len(base.hub_files)
