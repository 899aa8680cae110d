"""What `homing doctor` asks of AWS beside its list: who we are, quotas, network, image, rights. Rents nothing."""

from __future__ import annotations

from collections.abc import Callable

from homing.cloud.checks import Check, fault, ok, warning
from homing.cloud.providers.aws_api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws_create import Creation
from homing.cloud.providers.aws_market import Market, quota_page
from homing.errors import HomingError, ProviderRefused

__all__ = ["check_aws"]

_DOCS = "docs/aws.md"
_SAMPLES = (("g5.xlarge", 4), ("p4d.24xlarge", 96))  # a type that stands for its quota, and its vCPUs


def check_aws(api: AwsApi, market: Market, creation: Creation, regions: list[str]) -> list[Check]:
    found = [_ask("aws.identity", lambda: _identity(api))]
    for region in regions:
        found += [
            _ask(f"aws.network.{region}", lambda region=region: _network(creation, region)),  # type: ignore[misc]
            _ask(f"aws.image.{region}", lambda region=region: _image(creation, region)),  # type: ignore[misc]
            _ask(f"aws.launch.{region}", lambda region=region: _may_launch(api, creation, region)),  # type: ignore[misc]
        ]
        for kind, least in _SAMPLES:
            found += [_quota(market, region, kind, least, is_spot=is_spot) for is_spot in (True, False)]
    return found


def _ask(name: str, question: Callable[[], str]) -> Check:
    try:
        return ok(name, question())
    except HomingError as exc:
        return fault(name, " ".join(f"{exc.what} {exc.why}".split()), exc.fix, _DOCS)


def _identity(api: AwsApi) -> str:
    who = api.call("sts", "get_caller_identity", GLOBAL)
    return f"The credentials are those of {who['Arn']}."


def _network(creation: Creation, region: str) -> str:
    subnets, network = creation.subnets(region)
    return f"{network} has a subnet in {len(subnets)} zones of {region}."


def _image(creation: Creation, region: str) -> str:
    image = creation.image(region)
    return f"{image['ImageId']}, {image.get('Name', '')}"


def _may_launch(api: AwsApi, creation: Creation, region: str) -> str:
    """EC2 answers a call that is only to be tried with what it would have said."""
    image = str(creation.image(region)["ImageId"])
    try:
        api.call("ec2", "run_instances", region, ImageId=image, InstanceType="g5.xlarge", MinCount=1, MaxCount=1,
                 DryRun=True)  # fmt: skip
    except AwsRefused as exc:
        if exc.code == "DryRunOperation":
            return "The credentials may start instances."
        if exc.code != "UnauthorizedOperation":
            raise
        raise ProviderRefused(
            what=f"The credentials may not start instances in {region}.",
            why=exc.text,
            fix="Give them the rights that docs/aws.md lists",
        ) from exc
    return "EC2 did not mind."


def _quota(market: Market, region: str, kind: str, least: int, *, is_spot: bool) -> Check:
    quota = market.quota(region, kind, is_spot=is_spot)
    what = f"{'spot' if is_spot else 'on-demand'} instances like {kind}"
    name = f"aws.quota.{region}.{quota.code}"
    if quota.num_cores is None:
        text, fix = f"How many {what} the account may have could not be asked.", "Allow servicequotas:GetServiceQuota"
        return warning(name, text, fix, quota_page(region, quota.code))
    if quota.num_cores < least:
        text = f"The account may not have {what}: its quota is {quota.num_cores} vCPUs."
        return warning(name, text, "Ask AWS for more there; it takes hours to days", quota_page(region, quota.code))
    return ok(name, f"The account may have {quota.num_cores} vCPUs of {what}.")
