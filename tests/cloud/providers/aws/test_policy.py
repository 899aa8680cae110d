"""The IAM policy that `homing setup aws --policy` prints is enough for all that we do, and has nothing else."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import botocore
import botocore.session
import pytest
from tests.cli.control_rig import Homing, typing
from tests.cloud.providers.aws.test_provider import Rig, _account
from tests.doubles.aws import Settings

from homing.errors import CreateFailed, ProviderRefused

__all__ = ["_account"]


def printed_policy(homing: Homing) -> dict[str, Any]:
    said = homing("setup", "aws", "--policy")
    assert said.code == 0, said.err
    return dict(json.loads(said.out))


def actions_in(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


@pytest.fixture
def homing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    return typing(capsys, monkeypatch)


@pytest.mark.regression("aws-permissions")
@pytest.mark.slow
def test_a_user_with_the_printed_policy_alone_can_rent_use_and_remove_everything(
    tmp_path: Path, homing: Homing
) -> None:
    allowed = actions_in(printed_policy(homing))
    assert {"iam:TagRole", "iam:TagInstanceProfile", "iam:CreateServiceLinkedRole"} <= allowed
    settings = Settings(allowed=allowed)
    rig = Rig(tmp_path, settings=settings, volume="50GB").offered("us-east-1/g5.xlarge/spot")
    boot = dataclasses.replace(rig.request.order.boot, store="s3://moss-bucket/runs/moss")
    rig.request = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, boot=boot))
    made = rig.create()
    assert rig.double.lives[made.id.rpartition("/")[2]].profile, "the role was made and passed"
    rig.provider.destroy(made.id)
    for resource in rig.provider.list_resources():
        rig.provider.destroy_resource(resource)
    for missing in ("iam:TagRole", "iam:TagInstanceProfile", "iam:CreateServiceLinkedRole", "iam:PassRole"):
        settings.allowed = allowed - {missing}
        with pytest.raises((ProviderRefused, CreateFailed), match=missing):
            rig.create()
        rig.double.lives.clear()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_every_operation_that_we_call_is_in_the_policy(homing: Homing) -> None:
    """Found in the sources by its name, so that none can be forgotten: an operation's name is a constant in a call."""
    from homing.cloud.providers.aws import policy

    allowed, source = actions_in(printed_policy(homing)), Path(policy.__file__).parents[3]
    session = botocore.session.get_session()
    clouds = [path for path in (source / "cloud" / "providers" / "aws").glob("*.py") if path.name != "policy.py"]
    stores = [*(source / "store" / "s3").glob("*.py"), source / "cloud" / "setup.py"]
    for service, operations in policy.OPERATIONS.items():
        known = {botocore.xform_name(name) for name in session.get_service_model(service).operation_names}
        called = known & names_in(stores if service == "s3" else clouds)
        assert called == set(operations), f"{service}: the policy has other operations than the sources call"
        assert all(action in allowed for needed in operations.values() for action in needed)


def names_in(paths: list[Path]) -> set[str]:
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
