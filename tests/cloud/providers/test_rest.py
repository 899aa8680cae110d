"""How an adapter speaks to any REST API: what each answer means, in the words of the provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homing.cloud.providers.rest import RETRIES, Api, Unsure, Unwelcome
from homing.errors import ProviderRefused, ProviderSilent
from homing.world import HttpRequest, HttpResponse, NetworkError, World


class Line(World):
    """Answers in turn; the last answer again and again."""

    def __init__(self, *answers: HttpResponse | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[HttpRequest] = []
        self.slept: list[float] = []

    def http(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def says(status: int, body: Any = None, **headers: str) -> HttpResponse:
    return HttpResponse(status, headers, b"" if body is None else json.dumps(body).encode())


def api(*answers: HttpResponse | Exception) -> tuple[Api, Line]:
    line = Line(*answers)
    return Api("cloud", "http://cloud.test", {"authorization": "Bearer secret-key"}, line, "export CLOUD_KEY=..."), line


def test_an_empty_204_is_a_yes() -> None:
    opened, line = api(says(204))
    opened.delete("/pods/1")
    assert opened.post("/pods/1/action", {"action": "terminate"}) == {}
    assert [request.method for request in line.requests] == ["DELETE", "POST"]


def test_what_is_gone_already_is_deleted_and_anything_else_is_not() -> None:
    api(says(404, {"title": "Not Found", "status": 404, "detail": "resource not found"}))[0].delete("/pods/1")
    with pytest.raises(Unwelcome, match="belongs to a cluster") as caught:
        api(says(409, {"title": "Conflict", "status": 409, "detail": "Pod belongs to a cluster"}))[0].delete("/pods/1")
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": "no such offer"}, "no such offer"),
        ({"title": "Bad Request", "status": 400, "detail": "no instances available"}, "no instances available"),
        ({"title": "T", "detail": "Request validation failed.", "errors": ["spot: unknown"]}, "failed. spot: unknown"),
        ({"message": "INSUFFICIENT_FUNDS"}, "INSUFFICIENT_FUNDS"),
        ({"code": 7}, '{"code": 7}'),
        ("plain", "plain"),
    ],
)
def test_the_providers_own_words_are_found_in_whatever_form_it_has_them(body: Any, words: str) -> None:
    with pytest.raises(Unwelcome) as caught:
        api(says(422, body))[0].post("/pods", {})
    assert words in caught.value.text
    assert words in str(caught.value)
    assert caught.value.status == 422


def test_a_wrong_key_is_distinguished_from_one_without_permission() -> None:
    with pytest.raises(ProviderRefused, match=r"cloud rejected the API key\.\n") as caught:
        api(says(401, {"detail": "missing bearer token"}))[0].get("/pods")
    assert caught.value.fix == "export CLOUD_KEY=..."
    with pytest.raises(ProviderRefused, match="cloud rejected the API key for POST /pods") as caught:
        api(says(403, {"detail": "access denied"}))[0].post("/pods", {})
    assert "access denied" in caught.value.why
    assert "secret-key" not in str(caught.value)


def test_a_refusal_is_not_repeated_and_silence_is() -> None:
    opened, line = api(says(422, {"detail": "no"}))
    with pytest.raises(Unwelcome):
        opened.get("/pods")
    assert len(line.requests) == 1
    opened, line = api(says(503), NetworkError("cut"), says(429, None, **{"retry-after": "9"}), says(200, {"pods": []}))
    assert opened.items("/pods", "pods") == []
    assert api(says(408), says(200, {"pods": []}))[0].items("/pods", "pods") == []
    assert line.slept[-1] == 9.0
    opened, line = api(says(500))
    with pytest.raises(ProviderSilent, match="may still be billing"):
        opened.get("/pods")
    assert len(line.requests) == RETRIES.tries


def test_a_post_is_repeated_only_if_the_answer_says_that_it_had_no_effect() -> None:
    for answer in (NetworkError("cut"), says(502, {"detail": "bad gateway"}), says(408), says(200, "no object")):
        opened, line = api(answer)
        with pytest.raises(Unsure):
            opened.post("/pods", {})
        assert len(line.requests) == 1
    opened, line = api(says(429), says(201, {"id": "p1"}))
    assert opened.post("/pods", {}) == {"id": "p1"}
    assert len(line.requests) == 2
