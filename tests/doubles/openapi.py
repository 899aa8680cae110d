"""A provider's published OpenAPI 3.1 document as a judge of what we send and of what our doubles answer.

    OpenApi.here("runpod-v2.json")      None unless HOMING_OPENAPI_DIR names a folder that has it
    check(request, response)            raises Unlike; unknown fields are refused on both sides

`known` are fields that only our fact sheets know, as "Schema.field"; each test that needs one names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from homing.world import HttpRequest, HttpResponse

__all__ = ["OpenApi", "Unlike"]

FOLDER_ENV = "HOMING_OPENAPI_DIR"
_DOC = "urn:published"


class Unlike(AssertionError):
    """What was sent or answered is not what the document describes."""


class OpenApi:
    def __init__(self, document: dict[str, Any], prefix: str = "", known: Sequence[str] = ()) -> None:
        """`prefix` is what our own base address lacks of the document's paths."""
        import jsonschema
        import referencing
        from referencing.jsonschema import DRAFT202012

        self.document, self.prefix, self.known = document, prefix, set(known)
        resource = referencing.Resource(contents=document, specification=DRAFT202012)
        self._registry = referencing.Registry().with_resource(_DOC, resource)
        self._validator = jsonschema.Draft202012Validator
        self.num_checked = 0

    @classmethod
    def here(cls, name: str, prefix: str = "", known: Sequence[str] = ()) -> OpenApi | None:
        folder = os.environ.get(FOLDER_ENV)
        if not folder:
            return None
        text = (Path(folder) / name).read_text()
        if name.endswith(".json"):
            return cls(json.loads(text), prefix, known)
        from ruamel.yaml import YAML

        return cls(YAML(typ="safe", pure=True).load(text), prefix, known)

    def check(self, request: HttpRequest, response: HttpResponse | None = None) -> None:
        self.num_checked += 1
        where, operation = self._operation(request)
        self._check_query(where, operation, parse_qs(urlsplit(request.url).query))
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            self._judge(f"{where} body", content["schema"], json.loads(request.body or b"null"))
        elif request.body:
            raise Unlike(f"{where}: no body is documented, and one was sent")
        if response is not None:
            self._check_reply(where, operation, response)

    # --- helpers, in the order they are called ---

    def _operation(self, request: HttpRequest) -> tuple[str, dict[str, Any]]:
        path = self.prefix + urlsplit(request.url).path
        for template, operations in self.document["paths"].items():
            if _fits(template, path) and request.method.lower() in operations:
                operation = dict(operations[request.method.lower()])
                operation["parameters"] = [*operations.get("parameters", []), *operation.get("parameters", [])]
                return f"{request.method} {template}", operation
        raise Unlike(f"{request.method} {path} is not in the document")

    def _check_query(self, where: str, operation: dict[str, Any], query: dict[str, list[str]]) -> None:
        parameters = [self._resolve(each) for each in operation["parameters"]]
        named = {each["name"]: each for each in parameters if each["in"] == "query"}
        for name, values in query.items():
            if name not in named:
                raise Unlike(f"{where}: there is no query parameter {name!r}; it would be ignored in silence")
            schema = self._resolve(named[name]["schema"])
            self._judge(f"{where}?{name}", named[name]["schema"], _typed(schema, values[0]))
        missing = [name for name, each in named.items() if each.get("required") and name not in query]
        if missing:
            raise Unlike(f"{where}: {missing} are required")

    def _check_reply(self, where: str, operation: dict[str, Any], response: HttpResponse) -> None:
        documented = operation["responses"].get(str(response.status)) or operation["responses"].get("default")
        if documented is None:
            raise Unlike(f"{where}: status {response.status} is not documented")
        content = self._resolve(documented).get("content", {})
        kind = response.headers.get("content-type", "").split(";")[0]
        if not content:
            if response.body:
                raise Unlike(f"{where} {response.status}: an empty reply is documented")
            return
        if kind not in content:
            raise Unlike(f"{where} {response.status}: {kind!r} is not one of {list(content)}")
        if "json" in kind:
            self._judge(f"{where} {response.status}", content[kind]["schema"], json.loads(response.body))

    def _judge(self, where: str, schema: dict[str, Any], value: Any) -> None:
        validator = self._validator(_absolute(schema), registry=self._registry)
        errors = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(value)]
        errors = [error for error in errors if not self._is_known(error)]
        errors += list(self._unknown(schema, value, "$"))
        if errors:
            raise Unlike(f"{where}: {'; '.join(errors)}")

    def _is_known(self, error: str) -> bool:
        return any(f"'{name.rpartition('.')[2]}'" in error for name in self.known)

    def _unknown(self, schema: dict[str, Any], value: Any, at: str) -> Iterator[str]:
        """Fields that the document does not name, at any depth; free-form objects are left alone."""
        if isinstance(value, list):
            for part in self._parts(schema):
                for number, each in enumerate(value):
                    if "items" in part:
                        yield from self._unknown(part["items"], each, f"{at}[{number}]")
        if not isinstance(value, dict):
            return
        parts = list(self._parts(schema))
        properties: dict[str, Any] = {}
        for part in parts:
            properties.update(part.get("properties", {}))
        if not properties or any(part.get("additionalProperties") not in (None, False) for part in parts):
            return
        for name, inner in value.items():
            if name in properties:
                yield from self._unknown(properties[name], inner, f"{at}.{name}")
            elif name not in {each.rpartition(".")[2] for each in self.known}:
                yield f"{at}.{name} is not in the document"

    def _parts(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        schema = self._resolve(schema)
        yield schema
        for kind in ("allOf", "anyOf", "oneOf"):
            for part in schema.get(kind, []):
                yield from self._parts(part)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return schema
        found: Any = self.document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        more = {name: value for name, value in schema.items() if name != "$ref"}
        return {**self._resolve(found), **more}


def _fits(template: str, path: str) -> bool:
    wanted, given = template.strip("/").split("/"), unquote(path).strip("/").split("/")
    pairs = zip(wanted, given, strict=False)
    return len(wanted) == len(given) and all(a == b or (a.startswith("{") and b) for a, b in pairs)


def _typed(schema: dict[str, Any], text: str) -> Any:
    kind = schema.get("type")
    if kind == "array":
        return text.split(",")
    if kind == "integer":
        return int(text) if text.lstrip("-").isdigit() else text
    if kind == "number":
        return float(text)
    return {"true": True, "false": False}.get(text, text) if kind == "boolean" else text


def _absolute(schema: Any) -> Any:
    """References of a piece of the document, as seen from outside of it."""
    if isinstance(schema, dict):
        return {k: _DOC + v if k == "$ref" and v.startswith("#") else _absolute(v) for k, v in schema.items()}
    return [_absolute(each) for each in schema] if isinstance(schema, list) else schema
