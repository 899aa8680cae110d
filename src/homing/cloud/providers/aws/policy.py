"""Builds the IAM policy that an AWS user needs for homing: every operation we call -> its actions -> one document.

An operation may need more than the action of the same name: setting tags in a create call needs a separate action, and
so does the service-linked role that EC2 creates when an account first uses spot. This module is pure data and works
offline.
"""

from __future__ import annotations

import json

__all__ = ["OPERATIONS", "policy_document"]

# AWS service -> operation (botocore name) -> the IAM actions that the operation needs.
OPERATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "sts": {"get_caller_identity": ("sts:GetCallerIdentity",)},
    "ec2": {
        "attach_volume": ("ec2:AttachVolume",),
        "authorize_security_group_ingress": ("ec2:AuthorizeSecurityGroupIngress",),
        "create_security_group": ("ec2:CreateSecurityGroup", "ec2:CreateTags"),
        "create_volume": ("ec2:CreateVolume", "ec2:CreateTags"),
        "delete_security_group": ("ec2:DeleteSecurityGroup",),
        "delete_volume": ("ec2:DeleteVolume",),
        "describe_images": ("ec2:DescribeImages",),
        "describe_instance_type_offerings": ("ec2:DescribeInstanceTypeOfferings",),
        "describe_instance_types": ("ec2:DescribeInstanceTypes",),
        "describe_instances": ("ec2:DescribeInstances",),
        "describe_regions": ("ec2:DescribeRegions",),
        "describe_security_groups": ("ec2:DescribeSecurityGroups",),
        "describe_spot_price_history": ("ec2:DescribeSpotPriceHistory",),
        "describe_subnets": ("ec2:DescribeSubnets",),
        "describe_volumes": ("ec2:DescribeVolumes",),
        "get_console_output": ("ec2:GetConsoleOutput",),
        "run_instances": ("ec2:RunInstances", "ec2:CreateTags", "iam:PassRole", "iam:CreateServiceLinkedRole"),
        "terminate_instances": ("ec2:TerminateInstances",),
    },
    "iam": {
        "add_role_to_instance_profile": ("iam:AddRoleToInstanceProfile", "iam:PassRole"),
        "create_instance_profile": ("iam:CreateInstanceProfile", "iam:TagInstanceProfile"),
        "create_role": ("iam:CreateRole", "iam:TagRole"),
        "delete_instance_profile": ("iam:DeleteInstanceProfile",),
        "delete_role": ("iam:DeleteRole",),
        "delete_role_policy": ("iam:DeleteRolePolicy",),
        "list_instance_profiles": ("iam:ListInstanceProfiles",),
        "list_roles": ("iam:ListRoles",),
        "put_role_policy": ("iam:PutRolePolicy",),
        "remove_role_from_instance_profile": ("iam:RemoveRoleFromInstanceProfile",),
    },
    "pricing": {"get_products": ("pricing:GetProducts",)},
    "service-quotas": {"get_service_quota": ("servicequotas:GetServiceQuota",)},
    "budgets": {
        "create_budget": ("budgets:ModifyBudget",),
        "delete_budget": ("budgets:ModifyBudget",),
        "describe_budgets": ("budgets:ViewBudget",),
    },
    "s3": {
        "abort_multipart_upload": ("s3:AbortMultipartUpload",),
        "complete_multipart_upload": ("s3:PutObject",),
        "create_bucket": ("s3:CreateBucket",),
        "create_multipart_upload": ("s3:PutObject",),
        "delete_object": ("s3:DeleteObject",),
        "get_object": ("s3:GetObject",),
        "head_bucket": ("s3:ListBucket",),
        "head_object": ("s3:GetObject",),
        "list_multipart_uploads": ("s3:ListBucketMultipartUploads",),
        "list_objects_v2": ("s3:ListBucket",),
        "list_parts": ("s3:ListMultipartUploadParts",),
        "put_object": ("s3:PutObject",),
        "upload_part": ("s3:PutObject",),
    },
}
_SPOT_ROLE = "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"
_OURS = ["arn:aws:iam::*:role/homing/*", "arn:aws:iam::*:instance-profile/homing/*"]
_LISTS = ("iam:ListRoles", "iam:ListInstanceProfiles")  # IAM actions that cannot be restricted to a path


def policy_document(bucket: str = "") -> str:
    """Return the policy as JSON, for one bucket or for all. The console and `aws iam put-user-policy` accept it."""
    actions = {action for operations in OPERATIONS.values() for needed in operations.values() for action in needed}
    roles = {action for action in actions if action.startswith("iam:")} - set(_LISTS)
    storage = {action for action in actions if action.startswith("s3:")}
    passed = {"iam:PassRole", "iam:CreateServiceLinkedRole"}
    arn = f"arn:aws:s3:::{bucket or '*'}"
    statements = [
        _statement("Machines", actions - roles - storage, "*"),
        _statement("Roles", roles - passed, _OURS),
        {
            **_statement("PassRole", {"iam:PassRole"}, _OURS[0]),
            "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
        },
        {
            **_statement("FirstSpotInstance", {"iam:CreateServiceLinkedRole"}, _SPOT_ROLE),
            "Condition": {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
        },
        _statement("Store", storage, [arn, f"{arn}/*"]),
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def _statement(sid: str, actions: set[str], resource: str | list[str]) -> dict[str, object]:
    return {"Sid": sid, "Effect": "Allow", "Action": sorted(actions), "Resource": resource}
