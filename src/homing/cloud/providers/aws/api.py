"""Client for the AWS API: boto3 builds requests and parses responses, and World sends the requests.

    call    reads and idempotent writes: retried with backoff if there is no response, or after throttling or a 5xx
    items   all pages of a list; raises if a response has no list, instead of treating the list as empty
    once    run_instances and the like: retried only after throttling; raises Unsure if it may have taken effect

boto3's own HTTP transport and retries are disabled, so that every request and every pause goes through World, where the
simulator can observe it and simulate a crash. The SDK is imported at the first call.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from homing.api_address import check_address
from homing.cloud.providers.rest import Unsure, Unwelcome
from homing.errors import HomingError, MissingExtra, ProviderSilent, UsageError
from homing.units import format_duration
from homing.world import HttpRequest, NetworkError, Retries, World

__all__ = ["GLOBAL", "AwsApi", "AwsRefused"]

GLOBAL = "us-east-1"  # the region whose endpoint serves IAM, Budgets and the price list for all regions
_TIMEOUT_S = 30.0
_MOST_SKEW_S = 240.0  # below the 300 s after which AWS rejects a signature, because the Date header lags a little
_RETRIES = Retries(tries=4, first_s=0.5, longest_s=20.0)
# AWS returns these error codes before it has done anything, so retrying is always safe.
_BUSY = (
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "EC2ThrottledException", "TooManyRequestsException",
    "RequestThrottled", "RequestThrottledException", "PriorRequestNotComplete",
)  # fmt: skip
# A 5xx response whose error code starts with one of these is a definite refusal. AWS reports a lack of capacity as 5xx.
_CLEAR = (*_BUSY, "Insufficient", "Unfulfillable")
_WHO = ("AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "RequestExpired",
        "UnrecognizedClientException", "InvalidSignatureException", "ExpiredTokenException")  # fmt: skip
_RIGHTS = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "OptInRequired", "PendingVerification")


class AwsRefused(Unwelcome):
    """Raised when AWS refuses a request. `code` is the AWS error code."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, code: str = "", text: str = "") -> None:
        super().__init__(what, why, fix, text=text)
        self.code = code


class AwsApi:
    """Client for one AWS account, in all regions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()  # offers are fetched from several providers in parallel
        # Seconds by which the AWS clock is ahead of ours, according to the Date header of the last response; 0 before
        # the first response.
        self.skew_s = 0.0

    @property
    def region(self) -> str:
        """Return the region that the environment or the AWS profile sets, or "" if neither does."""
        named = self._world.environment().get("AWS_REGION", "")  # other SDKs read AWS_REGION, but boto3 does not
        return named or str(self._session.region_name or "")

    @functools.cached_property
    def account(self) -> str:
        """Return the AWS account number. Any key can query it, regardless of its permissions."""
        return str(self.call("sts", "get_caller_identity", GLOBAL)["Account"])

    def call(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        problem = ""
        for _ in _RETRIES.attempts(self._world):
            try:
                return self._send(service, operation, region, params)
            except AwsRefused as exc:
                if exc.code not in _BUSY:
                    raise
                problem = exc.text
            except Unsure as exc:
                problem = str(exc)
        raise ProviderSilent(
            what=f"AWS is not responding: {operation} in {region} failed {_RETRIES.tries} times.",
            why=f"{problem}.",
            doubt="The current state is unknown; instances may still be billing.",
            fix="Check again in a minute: homing runs",
        )

    def items(self, service: str, operation: str, key: str, region: str, **params: Any) -> list[dict[str, Any]]:
        return [item for page in self._pages(service, operation, region, params) for item in _list_in(page, key)]

    def once(self, service: str, operation: str, region: str, **params: Any) -> dict[str, Any]:
        for is_last in _RETRIES.attempts(self._world):
            try:
                return self._send(service, operation, region, params)
            except AwsRefused as exc:
                if exc.code not in _BUSY or is_last:
                    raise
        raise AssertionError("the last try returns or raises")

    def _pages(self, service: str, operation: str, region: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            page = self.call(service, operation, region, **params, **more)
            yield page
            token = page.get("NextToken")
            if page.get("IsTruncated"):  # how IAM paginates
                more = {"Marker": str(page["Marker"])}
            elif token:
                more = {"NextToken": str(token)}
            else:
                return

    def _send(self, service: str, operation: str, region: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send one request.

        Raises AwsRefused if AWS definitely refuses the request, and Unsure if there is no response or if the response
        does not say whether the request took effect.
        """
        from botocore import exceptions as sdk

        method = getattr(self._client(service, region), operation)
        try:
            answer: dict[str, Any] = method(**params)
        except sdk.ClientError as exc:
            self._note_clock(exc.response)
            status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            refusal = _refused(exc, operation, region, self.skew_s)
            if status >= 500 and not refusal.code.startswith(_CLEAR):
                raise Unsure(f"AWS answered {status} {refusal.text}") from exc
            raise refusal from exc
        except (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError, sdk.ProfileNotFound,
                sdk.TokenRetrievalError, sdk.SSOError) as exc:  # fmt: skip
            raise _no_credentials(exc) from exc
        except sdk.ParamValidationError as exc:
            raise AssertionError(f"{operation}: {exc}") from exc
        except (NetworkError, sdk.BotoCoreError) as exc:
            raise Unsure(str(exc)) from exc
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as exc:
            # botocore parses numbers and times while it reads a response, so a single `NaN` makes the whole response
            # unreadable.
            raise Unsure(f"AWS answered {operation} with an unreadable number ({exc})") from exc
        self._note_clock(answer)
        return answer

    def _note_clock(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # missing or invalid
            date = str(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            self.skew_s = email.utils.parsedate_to_datetime(date).timestamp() - self._world.now()

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._open(service, region)
            return self._clients[service, region]

    def _open(self, service: str, region: str) -> Any:
        from botocore.config import Config

        config = Config(retries={"mode": "standard", "total_max_attempts": 1}, user_agent_extra="homing")
        client = self._session.client(service, region_name=region, config=config)
        check_address(str(client.meta.endpoint_url), "AWS_ENDPOINT_URL")
        client.meta.events.register("before-send.*", _through(self._world))
        return client

    @functools.cached_property
    def _session(self) -> Any:
        """Return one session for all regions, because a changed credentials file could otherwise mix two accounts."""
        try:
            import boto3
            import botocore.session
        except ImportError as exc:
            raise MissingExtra("launch", "aws", "boto3") from exc
        inner = botocore.session.get_session()
        inner.register_component("data_loader", _loader())
        try:
            return boto3.session.Session(botocore_session=inner)
        except botocore.exceptions.ProfileNotFound as exc:
            raise _no_credentials(exc) from exc


@functools.cache
def _loader() -> Any:
    """Return one data loader for all regions, because EC2's service description alone is several megabytes of JSON."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def _through(world: World) -> Callable[..., Any]:
    """Return a handler for botocore's before-send event. botocore uses the handler's return value as the response."""

    def send(request: Any, **_: Any) -> Any:
        from botocore.awsrequest import AWSResponse
        from botocore.compat import HTTPHeaders

        headers = {name: _as_text(value) for name, value in request.headers.items()}
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else bytes(body)
        reply = world.http(HttpRequest(request.method, request.url, headers, body, _TIMEOUT_S))
        pairs = HTTPHeaders.from_pairs(list(reply.headers.items()))
        return AWSResponse(request.url, reply.status, pairs, _Body(reply.body))

    return send


class _Body:
    """Response body with the interface that botocore expects."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._data


def _as_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _list_in(page: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = page.get(key)
    if not isinstance(found, list):
        raise ProviderSilent(
            what=f"The AWS response has no {key!r} field.",
            doubt="The list of instances is unknown; instances may still be billing.",
            fix="Check again in a minute: homing runs",
        )
    return found


def _refused(exc: Any, operation: str, region: str, skew_s: float) -> AwsRefused:
    error = exc.response.get("Error", {})
    code, text = str(error.get("Code", "")), str(error.get("Message", ""))[:600]
    why = f"AWS responded with {code}: {text}"
    if code in _WHO and abs(skew_s) > _MOST_SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        what = f"AWS rejects all requests: this computer's clock is {format_duration(abs(skew_s))} {side} AWS time."
        fix = "Set the clock, then try again: timedatectl set-ntp true   (macOS: sntp -sS time.apple.com)"
    elif code in _WHO:
        what, fix = "AWS rejected the credentials.", "aws configure   or set AWS_ACCESS_KEY_ID again"
    elif code in _RIGHTS:
        what = f"The AWS credentials do not permit {operation} in {region}."
        fix = "Grant the permissions listed in docs/clouds/aws.md, or use other credentials: AWS_PROFILE"
    else:
        what, fix = (
            f"AWS refused {operation} in {region}.",
            "See the provider's message above; its web console may show more.",
        )
    return AwsRefused(what, why, fix, code=code, text=text)


def _no_credentials(exc: Exception) -> HomingError:
    return UsageError(
        what="No AWS credentials found.",
        why=str(exc),
        fix="Run: aws configure   or: export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...   or set AWS_PROFILE",
    )
