"""The checks of `homing doctor` for AWS, against an account with configured answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from homing.cloud.providers.aws.api import AwsRefused
from homing.cloud.providers.aws.doctor_checks import check_aws
from homing.cloud.providers.aws.offers import Quota
from homing.doctor.check import Check
from homing.errors import ProviderRefused, ProviderSilent


@dataclass
class Account:
    """The API, the market and the creation of an account, as far as doctor asks."""

    refuses: dict[str, Exception] = field(default_factory=dict)  # operation -> what it raises
    num_cores: dict[str, int | None] = field(default_factory=dict)  # type -> quota
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def call(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        self.asked.append((operation, params))
        if operation in self.refuses:
            raise self.refuses[operation]
        if operation == "run_instances":
            raise AwsRefused("EC2 would have.", code="DryRunOperation")
        return {"Account": "123456789012"}

    def image(self, region: str) -> dict[str, Any]:
        return {"ImageId": "ami-1"}

    def subnets(self, region: str) -> tuple[dict[str, str], str]:
        if "describe_subnets" in self.refuses:
            raise self.refuses["describe_subnets"]
        return {f"{region}a": "subnet-1"}, "vpc-1"

    def quota(self, region: str, kind: str, *, is_spot: bool) -> Quota:
        cores = self.num_cores.get(kind, 8)
        return Quota("L-1", None if cores is None else Decimal(cores))


def ask(account: Account, *regions: str) -> dict[str, Check]:
    found = check_aws(account, account, account, list(regions))  # type: ignore[arg-type]
    return {check.name: check for check in found}


def test_an_account_that_may_and_has_quota_is_well_and_nothing_was_started() -> None:
    account = Account()
    assert {check.state for check in ask(account, "us-east-1").values()} == {"ok"}
    started = [params for operation, params in account.asked if operation == "run_instances"]
    assert [params["DryRun"] for params in started] == [True]


@pytest.mark.parametrize(
    ("account", "name", "state"),
    [
        (
            Account({"get_caller_identity": AwsRefused("No such key.", fix="aws configure")}),
            "identity",
            "fault",
        ),
        (Account({"run_instances": AwsRefused("No.", code="UnauthorizedOperation")}), "rights", "fault"),
        (Account({"run_instances": ProviderSilent("AWS cannot be asked.")}), "rights", "warning"),
        (Account({"describe_subnets": ProviderRefused("No default network.", fix="subnets")}), "network", "fault"),
        (Account(num_cores={"g5.xlarge": 0}), "quota-g", "warning"),
        (Account(num_cores={"p4d.24xlarge": 0}), "quota-p", "warning"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(account: Account, name: str, state: str) -> None:
    check = ask(account, "us-east-1")[f"aws.{name}"]
    assert check.state == state
    assert check.fix


def test_no_region_is_a_fault_and_an_unreadable_quota_is_a_warning() -> None:
    assert ask(Account())["aws.region"].state == "fault"
    found = ask(Account(num_cores={"g5.xlarge": None, "p4d.24xlarge": None}), "eu-west-1")
    assert found["aws.quota-g"].state == "warning"
    assert "GetServiceQuota" in found["aws.quota-g"].fix
