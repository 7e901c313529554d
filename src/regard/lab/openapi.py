"""The lab's table of answers as an OpenAPI document, for people and for programs that try it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from regard.lab.endpoints import Endpoint
from regard.version import __version__

__all__ = ["document"]

SCHEMAS = "#/components/schemas/{name}"


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [one.asks for one in endpoints]
    found, components = msgspec.json.schema_components(kinds, ref_template=SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for one, schema in zip(endpoints, found, strict=True):
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema, components)
    about = {"title": "regard lab", "version": __version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": components}}


def _operation(one: Endpoint, schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    said = {"200": "the answer", "400": "what is wrong with what was asked, in a line", "404": "nothing is open there"}
    said |= {"422": "a field that does not fit its schema", "429": "too much at once"}
    told: dict[str, Any] = {
        "summary": one.about,
        "responses": {code: {"description": text} for code, text in said.items()},
    }
    if one.method == "POST":
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return told
    fields = components[schema["$ref"].rsplit("/")[-1]] if "$ref" in schema else schema
    needed = fields.get("required", [])
    told["parameters"] = [
        {"name": name, "in": "query", "required": name in needed, "schema": kind}
        for name, kind in fields.get("properties", {}).items()
    ]
    return told
