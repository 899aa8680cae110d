"""Client for an S3 service, with timeouts, and the mapping of the service's errors to ours.

    connect(address)            returns a boto3 client with a deadline on every call and a few retries
    connection.error(exc, ...)  maps an SDK exception to a StoreError with what, why and the command that fixes it

boto3 opens its own connections instead of using World, so the simulator uses the folder store. Keys and tokens are
never shown: an error names only where the credentials come from.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from homing.api_address import check_address
from homing.errors import MissingExtra, StoreError, StoreRefused
from homing.store.address import S3Address

__all__ = ["Connection", "code_of", "connect", "is_absent", "region_of", "s3_failures"]

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
ATTEMPTS = 5
_DEFAULT_REGION = "us-east-1"  # signing a request requires a region, but self-hosted services rarely check which one
_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the credentials file (~/.aws/credentials)",
    "config-file": "the config file (~/.aws/config)",
    "sso": "single sign-on",
    "iam-role": "the instance's role",
    "container-role": "the container's role",
    "assume-role": "an assumed role",
}
# Error code -> (why, fix), with placeholders for bucket, region and source.
_MEANINGS = {
    "NoSuchBucket": ("{where} has no bucket {bucket}.", "Create it: aws s3 mb s3://{bucket}   or fix `store:`"),
    "AccessDenied": (
        "The credentials from {source} are not allowed to do this in {bucket}: {operation}.",
        "Allow s3:ListBucket, GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListBucketMultipartUploads"
        " and ListMultipartUploadParts on the bucket, then check: homing store ls --store {store}",
    ),
    "InvalidAccessKeyId": ("{where} does not know the access key from {source}.", "Set a valid AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (
        "The secret key from {source} does not match its access key.",
        "Set AWS_SECRET_ACCESS_KEY again; it may have been copied incompletely",
    ),
    "ExpiredToken": ("The token from {source} has expired.", "Log in again: aws sso login   or create new keys"),
    "InvalidToken": (
        "The token from {source} is not valid.",
        "Log in again: aws sso login   or unset AWS_SESSION_TOKEN",
    ),
    "RequestTimeTooSkewed": (
        "This computer's clock is wrong, so {where} rejects all requests.",
        "Sync the clock (NTP)",
    ),
    "SlowDown": ("{where} is limiting requests.", "Try again in a minute"),
    "QuotaExceeded": ("The quota of {bucket} is exhausted.", "Free some space: homing store ls"),
}
_MEANINGS["403"] = _MEANINGS["Forbidden"] = _MEANINGS["AllAccessDisabled"] = _MEANINGS["AccessDenied"]
_MEANINGS["404"] = _MEANINGS["NoSuchBucket"]
_MEANINGS["ExpiredTokenException"] = _MEANINGS["TokenRefreshRequired"] = _MEANINGS["ExpiredToken"]
_MEANINGS["ServiceUnavailable"] = _MEANINGS["503"] = _MEANINGS["SlowDown"]
# The codes in `_MEANINGS` that the user must act on. Its other codes mean transient failures.
_REFUSALS = frozenset(_MEANINGS) - {"SlowDown", "ServiceUnavailable", "503"}
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301")


@dataclass(frozen=True)
class Connection:
    """A boto3 client, the address that it accesses, and the source of its credentials."""

    address: S3Address
    client: Any
    source: str
    credentials: Any = field(default=None, repr=False)

    @property
    def is_temporary(self) -> bool:
        """Return True if the keys include a session token, so that they expire after a few hours."""
        return bool(getattr(self.credentials, "token", None))

    @property
    def where(self) -> str:
        return str(self.client.meta.endpoint_url)

    @property
    def is_amazon(self) -> bool:
        return _is_amazon(self.client)

    def error(self, exc: BaseException, done: str, key: str = "") -> StoreError:
        return s3_error(exc, self.address, done, key, self)


def connect(address: S3Address) -> Connection:
    try:
        import boto3
    except ImportError as exc:
        missing = MissingExtra("store", "aws", "boto3")
        missing.what = f"A store at {address.url} needs the extra `aws`."
        raise missing from exc
    try:
        session = boto3.session.Session(region_name=address.region or None)
        client = _client(session, address, "auto")
        if not _is_amazon(client):
            # Virtual-hosted bucket names need DNS entries that self-hosted services seldom have.
            client = _client(session, address, "path")
        check_address(
            str(client.meta.endpoint_url), "The S3 endpoint (AWS_ENDPOINT_URL_S3, or ?endpoint= of the store)"
        )
        credentials = session.get_credentials()
        method = str(getattr(credentials, "method", "") or "nowhere")
    except s3_failures() as exc:
        raise s3_error(exc, address, "opened") from exc
    except ValueError as exc:  # the SDK's exception for an invalid endpoint URL
        raise s3_error(exc, address, "opened") from exc
    return Connection(address, client, _SOURCES.get(method, method), credentials)


def _client(session: Any, address: S3Address, style: str) -> Any:
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        signature_version="s3v4",
        s3={"addressing_style": style},
        # We send our own checksums. The SDK's default checksums break services that do not support them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="homing",
    )
    region = session.region_name or _DEFAULT_REGION
    return session.client("s3", region_name=region, endpoint_url=address.endpoint or None, config=config)


def _is_amazon(client: Any) -> bool:
    host = urlsplit(str(client.meta.endpoint_url)).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def region_of(address: S3Address) -> str:
    """Return the region that the user set in the address or the environment, or "" if there is none."""
    import boto3

    return address.region or str(boto3.session.Session().region_name or "")


def s3_failures() -> tuple[type[Exception], ...]:
    """Return the base classes of all SDK errors, or () if the SDK is missing."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    # Without the SDK, none of its errors can occur. The caller reports the missing SDK.
    except ImportError:
        return ()
    return (BotoCoreError, ClientError)


def code_of(exc: BaseException) -> str:
    response: Any = getattr(exc, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def is_absent(exc: BaseException) -> bool:
    return code_of(exc) in ("NoSuchKey", "404", "NotFound")


def s3_error(
    exc: BaseException, address: S3Address, done: str, key: str = "", connection: Connection | None = None
) -> StoreError:
    """Map an SDK exception to a StoreError. `done` is the participle after "could not be", such as "written"."""
    code = code_of(exc)
    region = str(connection.client.meta.region_name) if connection else address.region
    facts = {
        "bucket": address.bucket,
        "region": region,
        "where": connection.where if connection else address.endpoint or "S3",
        "source": connection.source if connection else "nowhere",
        "operation": getattr(exc, "operation_name", "") or done,
        "store": shlex.quote(address.url),
    }
    if code in _WRONG_REGION:
        right = _right_region(exc)
        there = f"in {right}" if right else "in another region"
        why = f"The bucket {address.bucket} is {there}, but the request went to {region}."
        fix = f"Add ?region={right or 'REGION'} to the store's address, or set AWS_REGION={right or 'REGION'}"
    elif code in _MEANINGS:
        why, fix = (text.format(**facts) for text in _MEANINGS[code])
    else:
        why, fix = _by_kind(exc, facts)
    what = f"{key or 'The store'} could not be {done} ({address.url})."
    kind = StoreRefused if code in _WRONG_REGION or code in _REFUSALS else StoreError
    return kind(what=what, why=f"{why} ({code})" if code else why, fix=fix)


def _by_kind(exc: BaseException, facts: dict[str, str]) -> tuple[str, str]:
    from botocore import exceptions as sdk

    if isinstance(exc, (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError)):
        return (
            "No complete credentials were found in the environment, in ~/.aws or in this computer's role.",
            "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...   or: aws configure",
        )
    if isinstance(exc, sdk.ProfileNotFound):
        return str(exc), "Set AWS_PROFILE to a profile that exists. List them: aws configure list-profiles"
    if isinstance(exc, sdk.HTTPClientError):
        return (
            f"{facts['where']} gave no complete response in {ATTEMPTS} tries: {type(exc).__name__}.",
            "Check the network and the endpoint (AWS_ENDPOINT_URL_S3, or ?endpoint= in the address), then try again",
        )
    return f"{type(exc).__name__}: {exc}", f"Check the address, {facts['bucket']} and {facts['region']}, then try again"


def _right_region(exc: BaseException) -> str:
    response: Any = getattr(exc, "response", None) or {}
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")
