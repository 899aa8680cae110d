"""Lists the accounts that a user may need, with the environment variables, web pages and files for their API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from homing.world import World

__all__ = ["ACCOUNTS", "CREDENTIALS", "Account"]


@dataclass(frozen=True)
class Account:
    name: str
    title: str
    keys: tuple[str, ...]  # environment variables that hold the key; all are required
    key_page: str  # the web page where the user can create a key
    usage_page: str  # the provider's own usage and billing page
    url_env: str = ""  # environment variable that overrides the provider's address, for tests and proxies
    url: str = ""  # an address that responds with a Date header, so that the local clock can be checked against it
    extra: str = ""  # the pip extra that this account needs, as in homing[aws]
    login: str = ""  # a command that stores the key in a file instead of an environment variable
    files: tuple[str, ...] = ()  # the files in which `login` stores the key, relative to the user's home folder

    def is_set(self, environment: Mapping[str, str], world: World) -> bool:
        """Return True if a key appears to be set. Only the provider can say whether it is valid."""
        folder = Path(environment.get("HOME", "~")).expanduser()
        is_there = any(world.exists(folder / name) for name in self.files)
        return is_there or all(environment.get(name) for name in self.keys)


ACCOUNTS: dict[str, Account] = {
    "aws": Account(
        "aws",
        "AWS",
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        "https://console.aws.amazon.com/iam/home#/security_credentials",
        "https://console.aws.amazon.com/costmanagement/home",
        "AWS_ENDPOINT_URL",
        "https://sts.amazonaws.com",
        extra="aws",
        login="aws configure",
        files=(".aws/credentials", ".aws/config"),
    ),
    "modal": Account(
        "modal",
        "Modal",
        ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
        "https://modal.com/settings/tokens",
        "https://modal.com/settings/usage",
        "MODAL_SERVER_URL",
        "https://api.modal.com",
        extra="modal",
        login="modal setup",
        files=(".modal.toml",),
    ),
    "runpod": Account(
        "runpod",
        "RunPod",
        ("RUNPOD_API_KEY",),
        "https://console.runpod.io/user/settings",
        "https://console.runpod.io/user/billing",
        "RUNPOD_API_URL",
        "https://api.runpod.io/v2",
        files=(".runpod/config.toml",),
    ),
    "shadeform": Account(
        "shadeform",
        "Shadeform",
        ("SHADEFORM_API_KEY",),
        "https://platform.shadeform.ai/settings/api",
        "https://platform.shadeform.ai/settings/billing",
        "HOMING_SHADEFORM_URL",
        "https://api.shadeform.ai/v1",
    ),
    "hub": Account(
        "hub",
        "the Hugging Face Hub",
        ("HF_TOKEN",),
        "https://huggingface.co/settings/tokens",
        "https://huggingface.co/settings/billing",
        "HF_ENDPOINT",
        "https://huggingface.co",
        extra="hub",
        login="hf auth login",
    ),
    "wandb": Account(
        "wandb",
        "Weights & Biases",
        ("WANDB_API_KEY",),
        "https://wandb.ai/authorize",
        "https://wandb.ai/usage",
        extra="trackers",
        login="wandb login",
    ),
}

# A .env file may set only these variables: API keys and tokens. Addresses, paths, options and the tokens that protect
# homing's own servers are excluded, so that someone else's .env file cannot set them.
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "RUNPOD_API_KEY",
    "SHADEFORM_API_KEY",
    "HF_TOKEN",
    "HUGGINGFACEHUB_API_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
