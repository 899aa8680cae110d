"""The section `cloud.runpod`: every setting is checked, with its line, before RunPod gets a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.config.conftest import BASE

from homing.config.load import Loaded
from homing.errors import Mistake

Load = Callable[..., Loaded]
Mistakes = Callable[..., list[Mistake]]
CLOUD = BASE + "cloud:\n  providers: [runpod]\n  runpod:\n"


@pytest.mark.acceptance(56)
def test_every_key_reaches_the_adapter_in_base_units(load: Load) -> None:
    messages = load(
        CLOUD + "    image: me/train:1\n    disk: 60GB\n    volume: transformer-shared\n    volume_size: 1TB\n"
        "    data_centers: [EU-RO-1]\n    env: [NCCL_DEBUG=WARN]\n    ports: 6006/tcp\n    start_limit: 20m\n"
    ).run.cloud.settings["runpod"]
    assert (messages["image"], messages["disk"], messages["volume_size"]) == ("me/train:1", 60 * 10**9, 10**12)
    assert (messages["ports"], messages["start_limit"], messages["cloud"]) == (["6006/tcp"], 1200.0, "secure")
    assert messages["must_end_itself"] is True


@pytest.mark.acceptance(56, 78)
@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("volume: YOUR_VOLUME_ID", "volume", "placeholder"),
        ("volume: <volume id>", "volume", "placeholder"),
        ("registry: YOUR-REGISTRY", "registry", "placeholder"),
        ("image: yourusername/llm-finetuning:<tag>", "image", "placeholder"),
        ("env: [A=1, HF_HOME=<path>]", "env", "placeholder"),
        ("data_centers: [eu-ro-1]", "data_centers", "in capitals"),
        ("ports: [22/udp]", "ports", "not a port"),
        ("env: [PUBLIC_KEY=ssh-rsa]", "env", "PUBLIC_KEY"),
        ("env: [WANDB_API_KEY=abc]", "env", "secret"),
        ("env: [nothing]", "env", "NAME=VALUE"),
        ("min_cuda: 'new'", "min_cuda", "CUDA version"),
        ("volume_size: 5GB", "volume_size", "10GB to 4096GB"),
        ("volume_size: 5TB", "volume_size", "10GB to 4096GB"),
        ("volume_path: work", "volume_path", "absolute path"),
        ("cloud: all", "cloud", "not a valid value"),
        ("gpuType: H100", "gpuType", "unknown key"),
        ("dockerArgs: sleep", "dockerArgs", "unknown key"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_a_valid_value(
    mistakes: Mistakes, line: str, key: str, words: str
) -> None:
    (found,) = mistakes(f"{CLOUD}    disk: 40GB\n    {line}\n")
    assert found.key == f"cloud.runpod.{key}"
    assert words in f"{found.problem} {found.suggestion}"
    assert found.line == CLOUD.count("\n") + 2


def test_a_name_that_only_looks_like_a_placeholder_is_a_name(load: Load) -> None:
    messages = load(CLOUD + "    volume: your-shared-volume\n").run.cloud.settings["runpod"]
    assert messages["volume"] == "your-shared-volume"
