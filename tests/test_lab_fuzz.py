"""Whatever the lab is asked, it answers, and never with a fault of its own: every endpoint by its own schema."""

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

from regard.lab.app import ENDPOINTS
from regard.lab.endpoints import Endpoint
from regard.lab.openapi import document

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
STARTS_WORK = {"/api/look", "/api/look/kinds", "/api/look/ablate", "/api/budget/measure"}  # tried in rooms of their own


def test_the_document_names_every_endpoint_and_bounds_every_field():
    told = document(ENDPOINTS)
    json.dumps(told)
    assert {(one.method.lower(), one.path) for one in ENDPOINTS} == {
        (method, path) for path, methods in told["paths"].items() for method in methods
    }
    for one in ENDPOINTS:
        assert one.about.endswith((".", ":")) or " " in one.about, f"{one.path} says nothing of itself"
    for name, schema in told["components"]["schemas"].items():
        assert schema.get("additionalProperties") is False, f"{name} takes fields that it does not know"
        for field, kind in schema.get("properties", {}).items():
            assert _bounded(kind, told["components"]["schemas"]), f"{name}.{field} has no bound: {kind}"


def _bounded(kind: dict[str, Any], known: dict[str, Any]) -> bool:
    if "$ref" in kind or "enum" in kind or "const" in kind:
        return True  # another schema, which is looked at by itself
    if "anyOf" in kind:
        return all(_bounded(x, known) for x in kind["anyOf"])
    match kind.get("type"):
        case "boolean" | "null":
            return True
        case "integer" | "number":
            return "maximum" in kind and not {"minimum", "exclusiveMinimum"}.isdisjoint(kind)
        case "string":
            return "maxLength" in kind
        case "array":
            inside = [kind["items"]] if isinstance(kind.get("items"), dict) else kind.get("prefixItems", [])
            return "maxItems" in kind and all(_bounded(x, known) for x in inside)
        case "object":
            return "maxProperties" in kind or "properties" in kind
    return False


def answered(address: str, one: Endpoint, fields: dict[str, Any]) -> tuple[int, bytes]:
    if one.method == "GET":
        pairs = "&".join(f"{quote(k)}={quote(str(v))}" for k, v in fields.items())
        request = urllib.request.Request(f"{address}{one.path[1:]}?{pairs}")
    else:
        data = json.dumps(fields).encode()
        request = urllib.request.Request(address + one.path[1:], data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def drawn(data: Any, one: Endpoint, own: str) -> dict[str, Any]:
    """Most fields as their types say, some odd, some left out."""
    fields: dict[str, Any] = {}
    for field in msgspec.inspect.type_info(one.asks).fields:  # type: ignore[attr-defined]
        how = data.draw(st.sampled_from(["right"] * (6 if field.required else 2) + ["odd", "none"]), label=field.name)
        if how == "odd":
            fields[field.encode_name] = data.draw(ODD)
        elif how == "right":
            names = {"recording": own, "model": "bundled-model", "run": "bundled-model-run", "claim": "soft-limit"}
            known = field.name in names and isinstance(field.type, msgspec.inspect.StrType)
            fields[field.encode_name] = names[field.name] if known else data.draw(_of(field.type), label=field.name)
    if data.draw(st.integers(0, 9)) == 0:
        fields["unknown"] = 1
    return fields


def _of(kind: Any) -> st.SearchStrategy[Any]:
    """What a type allows, and a little beyond."""
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


READING = [one for one in ENDPOINTS if one.path not in STARTS_WORK and "/close" not in one.path]


@pytest.mark.parametrize("one", READING, ids=lambda one: f"{one.method} {one.path}")
def test_no_request_brings_a_fault(lab, address, one):
    own = lab.all("recording")[0].id

    @settings(max_examples=25)
    @given(st.data())
    def tried(data):
        fields = drawn(data, one, own)
        status, body = answered(address, one, fields)
        assert status in (200, 400, 404, 422, 429), (fields, status, body[:300])
        if status != 200:
            said = json.loads(body)["error"]
            assert said and "\n" not in said and "Traceback" not in said

    tried()
    for job in lab.jobs.all():
        lab.jobs.cancel(job.id)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"a":' * 200, b'{"model": "\\ud800"}', b"1" * 9999]
)
def test_bodies_that_are_no_requests(address, body):
    request = urllib.request.Request(address + "api/look", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 422 and json.loads(refused.value.read())["error"]
