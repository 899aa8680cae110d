"""What `homing doctor` asks AWS: whose key it is, whether and where it may start instances, and what the quotas allow.

A new account has quotas of nothing for such machines, and finds out at its first launch; here it finds out before.
"""

from __future__ import annotations

from homing.cloud.checks import Check, fault, ok, warning
from homing.cloud.providers.aws_api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws_create import Creation
from homing.cloud.providers.aws_market import Market, quota_page
from homing.errors import HomingError

__all__ = ["check_aws"]

_KEYS_PAGE = "https://console.aws.amazon.com/iam/home#/security_credentials"
_FAMILIES = {"G": "g5.xlarge", "P": "p4d.24xlarge"}  # one type of each speaks for its family
_WOULD_HAVE = "DryRunOperation"  # EC2's word for: allowed, and not done because it was only asked


def check_aws(api: AwsApi, market: Market, creation: Creation, regions: list[str]) -> list[Check]:
    try:
        who = api.call("sts", "get_caller_identity", GLOBAL)
    except HomingError as exc:
        fix = exc.fix or "aws configure"
        return [fault("aws.identity", _said(exc), fix, _KEYS_PAGE)]
    found = [ok("aws.identity", f"The key belongs to account {who.get('Account', '?')}.")]
    if not regions:
        return [*found, fault("aws.region", "No region is named.", "export AWS_REGION=us-east-1   or: aws configure")]
    found.append(ok("aws.region", f"{', '.join(regions)}."))
    found.append(_check_right(api, creation, regions[0]))
    found += [_check_network(creation, region) for region in regions]
    return [*found, *(_check_quota(market, region, *each) for region in regions for each in _FAMILIES.items())]


def _check_right(api: AwsApi, creation: Creation, region: str) -> Check:
    """Asked with DryRun: EC2 says whether it would, and does nothing."""
    fix = "Give the key ec2:RunInstances; docs/aws.md has the whole list of rights."
    try:
        image = str(creation.image(region)["ImageId"])
        wish = {"ImageId": image, "InstanceType": _FAMILIES["G"], "MinCount": 1, "MaxCount": 1, "DryRun": True}
        api.call("ec2", "run_instances", region, **wish)
    except AwsRefused as exc:
        if exc.code == _WOULD_HAVE:
            return ok("aws.rights", f"It may start instances in {region}.")
        return fault("aws.rights", f"It may not start instances in {region}: {exc.text or exc.why}", fix, _KEYS_PAGE)
    except HomingError as exc:
        return warning("aws.rights", f"Whether it may start instances is not known. {_said(exc)}", exc.fix or fix)
    return warning("aws.rights", "EC2 did not answer the question as it should.", fix, _KEYS_PAGE)


def _check_network(creation: Creation, region: str) -> Check:
    """Where an instance would get its address; an account may have deleted its default network."""
    try:
        subnets, network = creation.subnets(region)
    except HomingError as exc:
        return fault("aws.network", _said(exc), exc.fix or "cloud.aws.subnets", "docs/aws.md")
    return ok("aws.network", f"{network} in {region}, with subnets in {', '.join(sorted(subnets))}.")


def _check_quota(market: Market, region: str, family: str, kind: str) -> Check:
    """Enough if one of both, spot or on demand, allows something."""
    quotas = [market.quota(region, kind, is_spot=is_spot) for is_spot in (True, False)]
    name, known = f"aws.quota-{family.lower()}", [quota for quota in quotas if quota.num_cores is not None]
    if not known:
        return ok(name, f"The quota for {family} instances in {region} cannot be asked with this key.")
    if not any(quota.num_cores for quota in known):
        text = f"The quota for {family} instances in {region} is 0, spot and on demand."
        return warning(name, text, "Ask for some: it takes hours to days.", quota_page(region, known[0].code))
    return ok(name, ", ".join(f"{quota.num_cores} cores ({quota.code})" for quota in known) + f" in {region}.")


def _said(exc: HomingError) -> str:
    return " ".join(f"{exc.what} {exc.why}".split())
