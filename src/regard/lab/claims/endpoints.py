"""Endpoints of the Claims page: the list of claims, and their checks run with other parameters."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from regard.claims._claim import Claim, check_source
from regard.claims._documents import DOCUMENTS, PAPERS, Document, citation_dict
from regard.claims._parameters import Parameter, check_parameters, parameters, rules
from regard.claims._registry import IDS, TOPICS, get_claim, list_claims
from regard.claims._typeset import typeset_formula, typeset_text
from regard.lab.endpoint import Endpoints, NotFound, Request
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()

ClaimId = Annotated[str, Meta(pattern=r"^[a-z0-9-]+$", max_length=80)]
ParameterName = Annotated[str, Meta(pattern=r"^[a-z_0-9]+$", max_length=40)]
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)] | float


class CodeRequest(Request, frozen=True):
    claim: ClaimId


class RunRequest(Request, frozen=True):
    """Name a claim and the parameters to change. Other parameters keep their recorded values."""

    claim: ClaimId
    parameters: Annotated[dict[ParameterName, Number], Meta(max_length=20)] = msgspec.field(default_factory=dict)


@ENDPOINTS.get("/api/claims/ledger")
def ledger(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List every claim of the theory: statement and formula (HTML, MathML), sources, verdict and parameters."""
    return {
        "claims": _claim_list(),
        "parts": {topic: list(ids) for topic, ids in TOPICS.items()},
        "documents": [_document_entry(document) for document in DOCUMENTS.values()],
    }


def _document_entry(document: Document) -> dict[str, Any]:
    return {
        "key": document.key,
        "label": document.label,
        "title": document.title,
        "kind": document.kind,
        "about": typeset_text(document.about),
    }


def _parameter_entry(parameter: Parameter) -> dict[str, Any]:
    return parameter.to_dict() | {"typeset": typeset_text(parameter.label)}


@ENDPOINTS.get("/api/claims/code", CodeRequest)
def code(workspace: Workspace, request: CodeRequest) -> dict[str, Any]:
    """Return the source code of a claim's check."""
    return {"code": check_source(_claim(request.claim))}


@ENDPOINTS.post("/api/claims/run", RunRequest)
def run(workspace: Workspace, request: RunRequest) -> dict[str, Any]:
    """Run a claim's check. The job's result has findings, numbers and series."""
    claim = _claim(request.claim)
    values = check_parameters(claim, request.parameters)
    changes = {name: value for name, value in values.items() if value != claim.parameters[name]}

    # With the recorded parameters, a claim always gives the same result, so the result is cached.
    results: dict[str, dict[str, Any]] = workspace.cache.get(("claims",), lambda _: 1, dict)
    if not changes and claim.id in results:
        return {"result": results[claim.id], "job": None}

    def remember(result: dict[str, Any]) -> None:
        if not changes:
            results[claim.id] = result

    job = workspace.jobs.start("claim", {"id": claim.id, "parameters": changes}, on_success=remember)
    return {"result": None, "job": job.to_dict()}


def _claim(claim_id: str) -> Claim:
    if claim_id not in IDS:
        raise NotFound(f"no claim {claim_id!r}")
    return get_claim(claim_id)


@lru_cache(maxsize=1)
def _claim_list() -> list[dict[str, Any]]:
    """Return all claims as plain data for the page."""
    topic_of = {}
    for topic, ids in TOPICS.items():
        for claim_id in ids:
            topic_of[claim_id] = topic
    claims = []
    for claim in list_claims():
        papers = []
        for key in claim.papers:
            paper = PAPERS[key]
            papers.append({"short": paper.short, "text": paper.text, "address": paper.address})
        claims.append(
            {
                "id": claim.id,
                "title": claim.heading,
                "what_holds": claim.what_holds,
                "part": topic_of[claim.id],
                "sources": list(claim.sources),
                "citations": [citation_dict(document, section) for document, section in claim.citations],
                "papers": papers,
                "statement": claim.statement,
                "latex": claim.formula,
                "verdict": claim.verdict,
                "correction": claim.correction,
                "typeset": {
                    "title": typeset_text(claim.heading),
                    "what_holds": typeset_text(claim.what_holds),
                    "statement": typeset_text(claim.statement),
                    "correction": typeset_text(claim.correction),
                    "refuted": typeset_text(claim.refuted_by),
                    "control": typeset_text(claim.control),
                    "formula": typeset_formula(claim.formula),
                },
                "parameters": [_parameter_entry(parameter) for parameter in parameters(claim)],
                "rules": [vars(rule) for rule in rules(claim)],
            }
        )
    return claims
