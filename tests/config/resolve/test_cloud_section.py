"""The section `cloud`: the ssh host and the volume."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.config.conftest import BASE

from homing.config.load import Loaded
from homing.errors import Mistake
from homing.wire.run_json import Ssh

Load = Callable[..., Loaded]
Mistakes = Callable[..., list[Mistake]]


def test_an_ssh_host_with_its_rate_in_dollars_and_the_rest_by_default(load: Load) -> None:
    run = load(BASE + "cloud: {providers: [ssh], ssh: {host: gpu.example.org, rate: $0.80/h, port: 2222}}\n").run
    assert run.cloud.ssh == Ssh(host="gpu.example.org", port=2222, rate_usd_per_hour="0.80")
    assert run.origin["cloud.ssh.rate_usd_per_hour"].startswith("run file, line")


def test_ssh_needs_a_host_and_a_rate_above_nothing(mistakes: Mistakes) -> None:
    assert "cloud.ssh.host" in mistakes(BASE + "cloud: {providers: [ssh]}\n")[0].suggestion
    (found,) = mistakes(BASE + "cloud: {providers: [ssh], ssh: {host: a, rate: 0}}\n")
    assert found.key == "cloud.ssh.rate"


def test_a_section_that_is_not_used_is_said(load: Load) -> None:
    loaded = load(BASE + "cloud: {ssh: {host: a}, volume: /workspace}\n")
    assert loaded.run.cloud.ssh is None
    assert any("cloud.ssh is set but not used" in text for text in loaded.warnings)
    assert any("cloud.volume is set but not used" in text for text in loaded.warnings)
    assert not any("not used" in text for text in load(BASE).warnings)


def test_a_volume_is_an_absolute_path(load: Load, mistakes: Mistakes) -> None:
    there = "cloud: {providers: [ssh], ssh: {host: a}, volume: "
    assert load(BASE + there + "/workspace/}\n").run.cloud.volume == "/workspace"
    assert mistakes(BASE + there + "work}\n")[0].key == "cloud.volume"


def test_one_image_serves_every_provider_that_starts_containers_and_their_own_wins(load: Load) -> None:
    run = load(BASE + "cloud: {providers: [runpod, modal, aws], image: me/train:1, modal: {image: me/other:2}}\n").run
    assert run.cloud.settings["runpod"]["image"] == "me/train:1"
    assert run.cloud.settings["modal"]["image"] == "me/other:2"
    assert run.cloud.settings["aws"]["image"] == ""  # a machine image of its own kind
    assert run.origin["cloud.runpod.image"].startswith("run file, line")


@pytest.mark.acceptance(78)
def test_an_unused_image_causes_a_warning_and_a_placeholder_is_refused(load: Load, mistakes: Mistakes) -> None:
    assert any("cloud.image is set but not used" in text for text in load(BASE + "cloud: {image: me/a}\n").warnings)
    (found,) = mistakes(BASE + "cloud: {providers: [runpod], image: yourusername/llm-finetuning:latest}\n")
    assert (found.key, found.line) == ("cloud.image", 10)
    assert "placeholder" in found.problem


def test_modal_settings_are_in_base_units_and_mistakes_have_a_line(load: Load, mistakes: Mistakes) -> None:
    there = "cloud: {providers: [modal], modal: {cores: 4, memory: 32GiB, queue: 5m}}\nstore: modal:runs/here\n"
    run = load(BASE + there).run
    settings = run.cloud.settings["modal"]
    assert (settings["cores"], settings["memory"], settings["queue"]) == (4.0, 32 * 2**30, 300.0)
    assert run.store == "modal:runs/here"
    (found,) = mistakes(BASE + "cloud: {providers: [modal], modal: {queue: 2d}}\n")
    assert (found.key, found.line) == ("cloud.modal.queue", 10)
    (found,) = mistakes(BASE + "store: modal:a b\n")
    assert found.key == "store"
