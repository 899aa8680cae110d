"""AWS checks for `homing doctor`: the key's account, the permission to start instances, and the quotas.

New accounts have a quota of zero for GPU instances. Without this check, users would find out only at their first
launch.
"""

from __future__ import annotations

from homing.cloud.providers.aws.api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws.create import Creation
from homing.cloud.providers.aws.offers import Market, quota_page
from homing.doctor.check import Check, fault, ok, warning
from homing.errors import HomingError

__all__ = ["check_aws"]

_KEYS_PAGE = "https://console.aws.amazon.com/iam/home#/security_credentials"
_FAMILIES = {"G": "g5.xlarge", "P": "p4d.24xlarge"}  # quota family -> the instance type that represents it
_WOULD_HAVE = "DryRunOperation"  # EC2's error code for a DryRun call that would have been permitted


def check_aws(api: AwsApi, market: Market, creation: Creation, regions: list[str]) -> list[Check]:
    try:
        who = api.call("sts", "get_caller_identity", GLOBAL)
    except HomingError as exc:
        fix = exc.fix or "aws configure"
        return [fault("aws.identity", _said(exc), fix, _KEYS_PAGE)]
    found = [ok("aws.identity", f"The key belongs to account {who.get('Account', '?')}.")]
    if not regions:
        return [
            *found,
            fault("aws.region", "No region is configured.", "export AWS_REGION=us-east-1   or: aws configure"),
        ]
    found.append(ok("aws.region", f"{', '.join(regions)}."))
    found.append(_check_right(api, creation, regions[0]))
    found += [_check_network(creation, region) for region in regions]
    return [*found, *(_check_quota(market, region, *each) for region in regions for each in _FAMILIES.items())]


def _check_right(api: AwsApi, creation: Creation, region: str) -> Check:
    """Use DryRun to check whether the key can start instances, without starting any."""
    fix = "Grant the key ec2:RunInstances; docs/clouds/aws.md lists all permissions."
    try:
        image = str(creation.image(region)["ImageId"])
        arguments = {"ImageId": image, "InstanceType": _FAMILIES["G"], "MinCount": 1, "MaxCount": 1, "DryRun": True}
        api.call("ec2", "run_instances", region, **arguments)
    except AwsRefused as exc:
        if exc.code == _WOULD_HAVE:
            return ok("aws.rights", f"The key can start instances in {region}.")
        return fault(
            "aws.rights", f"The key cannot start instances in {region}: {exc.text or exc.why}", fix, _KEYS_PAGE
        )
    except HomingError as exc:
        return warning(
            "aws.rights", f"Could not check whether the key can start instances. {_said(exc)}", exc.fix or fix
        )
    return warning("aws.rights", "EC2 gave an unexpected answer.", fix, _KEYS_PAGE)


def _check_network(creation: Creation, region: str) -> Check:
    """Check that there is a network to start instances in, because the account's default VPC may have been deleted."""
    try:
        subnets, network = creation.subnets(region)
    except HomingError as exc:
        return fault("aws.network", _said(exc), exc.fix or "cloud.aws.subnets", "docs/clouds/aws.md")
    return ok("aws.network", f"{network} in {region}, with subnets in {', '.join(sorted(subnets))}.")


def _check_quota(market: Market, region: str, family: str, kind: str) -> Check:
    """Check the quotas of an instance family. It is enough if either the spot or the on-demand quota is above zero."""
    quotas = [market.quota(region, kind, is_spot=is_spot) for is_spot in (True, False)]
    name, known = f"aws.quota-{family.lower()}", [quota for quota in quotas if quota.num_cores is not None]
    if not known:
        text = f"Not checked: this key is not allowed to read the quota for {family} instances in {region}."
        return warning(name, text, "Grant it servicequotas:GetServiceQuota; docs/clouds/aws.md lists all permissions.")
    if not any(quota.num_cores for quota in known):
        text = f"The quota for {family} instances in {region} is 0, spot and on demand."
        return warning(name, text, "Request an increase; it takes hours to days.", quota_page(region, known[0].code))
    return ok(name, ", ".join(f"{quota.num_cores} cores ({quota.code})" for quota in known) + f" in {region}.")


def _said(exc: HomingError) -> str:
    return " ".join(f"{exc.what} {exc.why}".split())
