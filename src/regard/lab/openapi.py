"""The OpenAPI document of the lab, made from its endpoint table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from regard._version import __version__
from regard.lab.endpoint import Endpoint

SCHEMA_REFERENCE = "#/components/schemas/{name}"
RESPONSES = {
    "200": "the result",
    "400": "the request is wrong; the error says why in one line",
    "401": "the request does not carry the token of the printed address",
    "404": "the item is not open",
    "422": "a field does not match its schema",
    "429": "too many requests",
}
# Scripts send the token in a header, "authorization: Bearer TOKEN"; pages have it in a cookie.
TOKEN = {"token": {"type": "http", "scheme": "bearer"}}


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    request_types = [endpoint.request_type for endpoint in endpoints]
    schemas, components = msgspec.json.schema_components(request_types, ref_template=SCHEMA_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, schema in zip(endpoints, schemas, strict=True):
        operations = paths.setdefault(endpoint.path, {})
        operations[endpoint.method.lower()] = _operation(endpoint, schema, components)
    info = {"title": "regard lab", "version": __version__}
    return {
        "openapi": "3.1.0",
        "info": info,
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": TOKEN},
    }


def _operation(endpoint: Endpoint, schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    responses = {status: {"description": text} for status, text in RESPONSES.items()}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.method == "POST":
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return operation

    # Query parameters are listed one by one, so a reference to a schema is resolved here.
    if "$ref" in schema:
        schema = components[schema["$ref"].rsplit("/")[-1]]
    required = schema.get("required", [])
    parameters = []
    for name, field in schema.get("properties", {}).items():
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": field})
    operation["parameters"] = parameters
    return operation
