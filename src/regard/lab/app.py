"""The lab as an ASGI application: it checks each request against its schema and runs the handler in a thread."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any

import anyio
import msgspec
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from regard._error_report import EXPECTED, is_report, report_error
from regard._files import json_safe
from regard._terminal import printable
from regard.lab import shared_endpoints as shared
from regard.lab.access_control import AccessControl
from regard.lab.attribution import endpoints as attribution
from regard.lab.budget import endpoints as budget
from regard.lab.claims import endpoints as claims
from regard.lab.connections import RequestLimit
from regard.lab.convolution import endpoints as convolution
from regard.lab.endpoint import BinaryResponse, Endpoint, NotFound, TooManyRequests
from regard.lab.evolve import endpoints as evolve
from regard.lab.look import endpoints as look
from regard.lab.look import score_pairs_endpoint
from regard.lab.look import tour_endpoints as tour
from regard.lab.openapi import openapi_document
from regard.lab.worker import LONGEST_ERROR, one_line
from regard.lab.workspace import Workspace

log = logging.getLogger("regard.lab")

ENDPOINTS: tuple[Endpoint, ...] = (
    *shared.ENDPOINTS.all,
    *look.ENDPOINTS.all,
    *score_pairs_endpoint.ENDPOINTS.all,
    *tour.ENDPOINTS.all,
    *attribution.ENDPOINTS.all,
    *evolve.ENDPOINTS.all,
    *budget.ENDPOINTS.all,
    *convolution.ENDPOINTS.all,
    *claims.ENDPOINTS.all,
)
MAX_THREADS = 8  # handlers that run at once; further requests wait
MAX_REQUESTS = 200  # requests that run or wait at once; further ones are refused
# Static files of another package that the lab serves as its own.
SHARED_FILES = {"packed.js": "regard.interp", "shared.js": "regard.interp"}
STATIC_FILE = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)?\.(js|css|html|svg)")
MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
POLL_INTERVAL = 0.03  # seconds between two checks of a job's state while a request waits for a change


def create(workspace: Workspace, *, token: str | None, any_host: bool = False) -> Starlette:
    """Return the application that serves a workspace, and closes it when the server stops.

    ``token`` and ``any_host`` are those of ``AccessControl``.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        app.state.limiter = anyio.CapacityLimiter(MAX_THREADS)
        yield
        await to_thread.run_sync(workspace.close)

    routes = [Route(endpoint.path, _route(workspace, endpoint), methods=[endpoint.method]) for endpoint in ENDPOINTS]
    routes += [
        Route("/api/jobs/{id}", partial(_job, workspace)),
        Route("/openapi.json", _openapi),
        Route("/plotly.js", _plotly),
        Route("/static/{name:path}", _static),
        Route("/", _static),
    ]
    middleware = [
        Middleware(AccessControl, token=token, any_host=any_host),
        Middleware(RequestLimit, most=MAX_REQUESTS),
        Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        ClientDisconnect: _disconnected,
        Exception: _unexpected_error,
    }
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def _route(workspace: Workspace, endpoint: Endpoint) -> Callable[[Request], Any]:
    """Return the coroutine that serves one endpoint."""

    async def respond(http_request: Request) -> Response:
        try:
            request = await _parse(http_request, endpoint)
            limiter = http_request.app.state.limiter
            result = await to_thread.run_sync(endpoint.handler, workspace, request, limiter=limiter)
        except msgspec.DecodeError as error:  # includes ValidationError
            return _error(422, error)
        except NotFound as error:
            return _error(404, error)
        except TooManyRequests as error:
            return _error(429, error)
        except ClientDisconnect:  # nobody waits for a response, and nothing is wrong
            raise
        except MemoryError:
            return JSONResponse({"error": "not enough memory for this request; request less"}, 400)
        except BaseException as error:
            # A panic of a library is an error too. A cancelled request is not.
            if not is_report(error):
                raise
            message = report_error(error, longest=LONGEST_ERROR)
            log.info("%s: %s", endpoint.path, message)
            # What the request can mend is its error. Everything else is a defect of the lab.
            return _json_response({"error": message}, 400 if isinstance(error, EXPECTED) else 500)
        if not isinstance(result, BinaryResponse):
            return _json_response(result)
        return Response(result.data, media_type=result.media_type, headers=dict(result.headers))

    return respond


async def _parse(http_request: Request, endpoint: Endpoint) -> Any:
    """Read the request's fields from the query string (GET) or the JSON body (POST), and check them."""
    if endpoint.method == "GET":
        pairs = http_request.query_params.multi_items()
        fields = dict(pairs)
        if len(pairs) != len(fields):
            raise msgspec.ValidationError("a field is given twice in the query string")
        return msgspec.convert(fields, endpoint.request_type, strict=False)

    # Without a CORS preflight, a page of another site can only send other content types. So JSON is required.
    content_type = http_request.headers.get("content-type", "").split(";")[0].strip()
    if content_type != "application/json":
        raise msgspec.ValidationError(f"content-type must be application/json, got {content_type[:80]!r}")
    return msgspec.json.decode(await http_request.body(), type=endpoint.request_type)


async def _job(workspace: Workspace, http_request: Request) -> Response:
    """Respond with a job's state. With ``after`` and ``wait``, wait up to ``wait`` seconds for a newer state."""
    try:
        job = workspace.jobs.get(str(http_request.path_params["id"]))
        request = msgspec.convert(dict(http_request.query_params), shared.JobState, strict=False)
    except NotFound as error:
        return _error(404, error)
    except msgspec.ValidationError as error:
        return _error(422, error)
    with anyio.move_on_after(request.wait):
        while job.seq <= request.after and not workspace.is_closing:
            await anyio.sleep(POLL_INTERVAL)
    return _json_response(job.to_dict())


def _json_response(data: Any, status: int = 200) -> Response:
    try:
        # msgspec writes null for NaN and infinity, which JSON does not have.
        content = msgspec.json.encode(data)
    except UnicodeEncodeError:
        # A text from a file can have half of a surrogate pair, which UTF-8 does not have. JSON can escape it.
        content = json.dumps(json_safe(msgspec.to_builtins(data))).encode()
    return Response(content, status, media_type="application/json")


def _error(status: int, error: Exception) -> Response:
    body: dict[str, Any] = {"error": one_line(error)}
    if isinstance(error, NotFound) and error.reopen is not None:
        body["reopen"] = error.reopen
    return _json_response(body, status)


async def _http_error(http_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "not found", 405: "method not allowed"}
    return JSONResponse({"error": messages.get(error.status_code, error.detail)}, error.status_code)


async def _disconnected(http_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the request was interrupted or is too large"}, 413)


async def _unexpected_error(http_request: Request, error: Exception) -> Response:
    # The traceback may hold paths or data, so it is written to the log and not sent.
    message = report_error(error, longest=LONGEST_ERROR)
    log.error("%s failed: %s", printable(http_request.url.path), message)
    return _json_response({"error": message}, 500)


async def _static(http_request: Request) -> Response:
    name = str(http_request.path_params.get("name", "index.html"))
    package = SHARED_FILES.get(name, "regard.lab")
    file = resources.files(package).joinpath("static", *name.split("/"))
    if not STATIC_FILE.fullmatch(name) or not file.is_file():
        raise HTTPException(404)
    return Response(file.read_bytes(), media_type=MEDIA_TYPES[name.rsplit(".")[-1]] + "; charset=utf-8")


async def _plotly(http_request: Request) -> Response:
    """Respond with Plotly's script from its Python wheel. Browsers may cache it: it changes only with its version."""
    data = await to_thread.run_sync(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes)
    return Response(data, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})


async def _openapi(http_request: Request) -> Response:
    return _json_response(openapi_document(ENDPOINTS))
