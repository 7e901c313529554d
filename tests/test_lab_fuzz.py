"""Random requests to every endpoint, drawn from its schema, never cause an internal error."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lab_pages import lab_request

from regard.lab.app import ENDPOINTS
from regard.lab.endpoint import Endpoint
from regard.lab.openapi import openapi_document

ODD = st.sampled_from(
    [
        *(
            "",
            " ",
            "null",
            "NaN",
            "inf",
            "-1",
            "1e999",
            "0x10",
            "true",
            "../..",
            "%2e%2e/",
            "\x00",
            "é" * 50,
            "A" * 5000,
        ),
        *(
            "A" * 5000,
            "{}",
            "[]",
            "' OR 1=1",
            "<script>",
            "9" * 40,
            "1.5",
            "r00000000",
            "bundled-model",
            "bundled-model-run",
        ),
    ]
)
# Words that requests name: of tasks, kernels, pictures, machines, values.
NAMES = [
    "repeats",
    "digits",
    "pixels",
    "blur",
    "identity",
    "disc",
    "zeros",
    "reflect",
    "A100-80GB",
    "entropy",
    "decoder",
]
# Tested separately.
STARTS_WORK = {"/api/look", "/api/look/kinds", "/api/look/ablate", "/api/look/sources", "/api/look/pairs"}
STARTS_WORK |= {"/api/budget/measure"}


def test_the_document_names_every_endpoint_and_bounds_every_field():
    document = openapi_document(ENDPOINTS)
    json.dumps(document)
    assert {(endpoint.method.lower(), endpoint.path) for endpoint in ENDPOINTS} == {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    for endpoint in ENDPOINTS:
        assert endpoint.summary.endswith((".", ":")) or " " in endpoint.summary, (
            f"{endpoint.path} says nothing of itself"
        )
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("additionalProperties") is False, f"{name} takes fields that it does not know"
        for field, kind in schema.get("properties", {}).items():
            assert _bounded(kind, document["components"]["schemas"]), f"{name}.{field} has no bound: {kind}"


def _bounded(kind: dict[str, Any], named: dict[str, Any]) -> bool:
    if "$ref" in kind or "enum" in kind or "const" in kind:
        return True  # another schema, which is looked at by itself
    if "anyOf" in kind:
        return all(_bounded(x, named) for x in kind["anyOf"])
    match kind.get("type"):
        case "boolean" | "null":
            return True
        case "integer" | "number":
            return "maximum" in kind and not {"minimum", "exclusiveMinimum"}.isdisjoint(kind)
        case "string":
            return "maxLength" in kind
        case "array":
            inside = [kind["items"]] if isinstance(kind.get("items"), dict) else kind.get("prefixItems", [])
            return "maxItems" in kind and all(_bounded(x, named) for x in inside)
        case "object":
            return "maxProperties" in kind or "properties" in kind
    return False


def send(address: str, endpoint: Endpoint, fields: dict[str, Any]) -> tuple[int, bytes]:
    if endpoint.method == "GET":
        pairs = "&".join(f"{quote(k)}={quote(str(v))}" for k, v in fields.items())
        request = lab_request(f"{address}{endpoint.path[1:]}?{pairs}")
    else:
        request = lab_request(address + endpoint.path[1:], json.dumps(fields).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def draw_fields(data: Any, endpoint: Endpoint, own: str) -> dict[str, Any]:
    """Draw the fields of a request: most are valid, some are unusual, some are left out."""
    fields: dict[str, Any] = {}
    for field in msgspec.inspect.type_info(endpoint.request_type).fields:  # type: ignore[attr-defined]
        choice = data.draw(
            st.sampled_from(["right"] * (6 if field.required else 2) + ["odd", "none"]), label=field.name
        )
        if choice == "odd":
            fields[field.encode_name] = data.draw(ODD)
        elif choice == "right":
            names = {"recording": own, "model": "bundled-model", "run": "bundled-model-run", "claim": "soft-limit"}
            named = field.name in names and isinstance(field.type, msgspec.inspect.StrType)
            fields[field.encode_name] = names[field.name] if named else data.draw(_of(field.type), label=field.name)
    if data.draw(st.integers(0, 9)) == 0:
        fields["unknown"] = 1
    return fields


def _of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values that a type allows, and some just outside."""
    match kind:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -5, kind.le if kind.le is not None else 300
            return st.one_of(st.integers(low, min(high, low + 20)), st.sampled_from([low - 1, high, high + 1, 10**30]))
        case msgspec.inspect.FloatType():
            low, high = kind.ge if kind.ge is not None else -5.0, kind.le if kind.le is not None else 300.0
            return st.one_of(st.floats(low, high), st.integers(0, 5), st.sampled_from([low, high, 1e308]))
        case msgspec.inspect.LiteralType():
            return st.sampled_from([*kind.values, "other"])
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.UnionType():
            return st.one_of(*map(_of, kind.types))
        case msgspec.inspect.ListType():
            least = kind.min_length or 0
            return st.lists(_of(kind.item_type), min_size=least, max_size=min(least + 12, kind.max_length or 12))
        case msgspec.inspect.TupleType():
            return st.tuples(*map(_of, kind.item_types)).map(list)
        case msgspec.inspect.DictType():
            return st.dictionaries(st.text(max_size=8), _of(kind.value_type), max_size=3)
        case msgspec.inspect.StructType():
            needed = {x.encode_name: _of(x.type) for x in kind.fields if x.required}
            others = {x.encode_name: _of(x.type) for x in kind.fields if not x.required}
            return st.fixed_dictionaries(needed, optional=others)
    return st.one_of(ODD, st.text(max_size=20), st.sampled_from(NAMES))


READING = [endpoint for endpoint in ENDPOINTS if endpoint.path not in STARTS_WORK and "/close" not in endpoint.path]


@pytest.mark.parametrize("endpoint", READING, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_no_request_causes_an_internal_error(workspace, address, endpoint):
    own = workspace.items("recording")[0].id

    @settings(max_examples=25)
    @given(st.data())
    def try_requests(data):
        fields = draw_fields(data, endpoint, own)
        status, body = send(address, endpoint, fields)
        assert status in (200, 400, 404, 422, 429), (fields, status, body[:300])
        if status != 200:
            message = json.loads(body)["error"]
            assert message and "\n" not in message and "Traceback" not in message

    try_requests()
    for job in workspace.jobs.all():
        workspace.jobs.cancel(job.id)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"a":' * 200, b'{"model": "\\ud800"}', b"1" * 9999]
)
def test_invalid_bodies_are_refused(address, body):
    request = lab_request(address + "api/look", body)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 422 and json.loads(refused.value.read())["error"]


def test_half_a_surrogate_pair_in_a_text_is_sent(workspace, address):
    """A title from a file may hold what UTF-8 cannot encode."""
    item = workspace.items("recording")[0]
    title = item.title
    item.title = "half \ud800 pair"
    try:
        request = lab_request(f"{address}api/workspace")
        with urllib.request.urlopen(request, timeout=60) as response:
            data = json.loads(response.read())
    finally:
        item.title = title
    assert [found["title"] for found in data["recordings"]] == ["half \ud800 pair"]
