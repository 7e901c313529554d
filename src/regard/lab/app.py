"""The lab as an ASGI application: what is asked is checked against its schema, and answered in a thread."""

from __future__ import annotations

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

from regard.lab import budget, claims, convolution, evolve, look, work
from regard.lab.endpoints import Bytes, Endpoint, Gone, TooMany
from regard.lab.guard import Guard
from regard.lab.lab import Lab
from regard.lab.openapi import document
from regard.lab.worker import one_line

__all__ = ["ENDPOINTS", "create"]

log = logging.getLogger("regard.lab")

TABLES = (work.ENDPOINTS, look.ENDPOINTS, evolve.ENDPOINTS, budget.ENDPOINTS, convolution.ENDPOINTS, claims.ENDPOINTS)
ENDPOINTS: tuple[Endpoint, ...] = tuple(one for table in TABLES for one in table.all)
THREADS = 8  # answers under way at once; more wait
STATIC = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)?\.(js|css|html|svg)")
MEDIA = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}


def create(lab: Lab, *, token: str | None = None) -> Starlette:
    """The application around an open lab; it closes the lab when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        app.state.limiter = anyio.CapacityLimiter(THREADS)
        yield
        await to_thread.run_sync(lab.close)

    routes = [Route(one.path, _answering(lab, one), methods=[one.method]) for one in ENDPOINTS]
    routes += [
        Route("/api/jobs/{id}", partial(_job, lab)),
        Route("/openapi.json", _openapi),
        Route("/plotly.js", _plotly),
        Route("/static/{name:path}", _static),
        Route("/", _page),
    ]
    middleware = [Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)]
    handlers: dict[Any, Any] = {HTTPException: _http_error, ClientDisconnect: _cut_off, Exception: _unforeseen}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def _answering(lab: Lab, one: Endpoint) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        try:
            asked = await _asked(request, one)
            result = await to_thread.run_sync(one.call, lab, asked, limiter=request.app.state.limiter)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return _error(422, error)
        except Gone as error:
            return _error(404, error)
        except TooMany as error:
            return _error(429, error)
        except (ValueError, TypeError, LookupError, OSError, ArithmeticError, RuntimeError) as error:
            log.info("%s: %s", one.path, error)
            return _error(400, error)
        except MemoryError:
            return JSONResponse({"error": "there is not enough memory for this; ask for less"}, 400)
        if isinstance(result, Bytes):
            headers = dict(result.headers)
            if result.name:
                headers["content-disposition"] = f'attachment; filename="{result.name}"'
            return Response(result.data, media_type=result.media, headers=headers)
        return Response(_json(result), media_type="application/json")

    return answer


async def _asked(request: Request, one: Endpoint) -> Any:
    if one.method == "GET":
        pairs = request.query_params.multi_items()
        fields = dict(pairs)
        if len(pairs) != len(fields):
            raise msgspec.ValidationError("a field is given twice")
        return msgspec.convert(fields, one.asks, strict=False)
    kind = request.headers.get("content-type", "").split(";")[0].strip()
    if kind != "application/json":
        raise msgspec.ValidationError(f"the content-type is {kind[:80]!r}; it must be application/json")
    return msgspec.json.decode(await request.body(), type=one.asks)


async def _job(lab: Lab, request: Request) -> Response:
    """A job's state; with ``after`` and ``wait`` (seconds) once that has changed."""
    try:
        job = lab.jobs.get(str(request.path_params["id"]))
        asked = msgspec.convert(dict(request.query_params), work.JobState, strict=False)
    except Gone as error:
        return _error(404, error)
    except msgspec.ValidationError as error:
        return _error(422, error)
    with anyio.move_on_after(asked.wait):
        while job.seq <= asked.after:
            await anyio.sleep(0.03)
    return Response(_json(job.to_dict()), media_type="application/json")


def _json(data: Any) -> bytes:
    return msgspec.json.encode(data)  # which writes null for what is no number


def _error(status: int, error: Exception) -> Response:
    return JSONResponse({"error": one_line(error)}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing at this address", 405: "this address is asked in another way"}
    return JSONResponse({"error": said.get(error.status_code, error.detail)}, error.status_code)


async def _cut_off(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the request was cut off, or grew too large"}, 413)


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.exception("%s failed", request.url.path, exc_info=error)
    return JSONResponse({"error": "something went wrong in the lab; its terminal says what"}, 500)


async def _page(request: Request) -> Response:
    return _file("index.html")


async def _static(request: Request) -> Response:
    name = str(request.path_params["name"])
    if not STATIC.fullmatch(name):
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    file = resources.files("regard.lab").joinpath("static", *name.split("/"))
    if not file.is_file():
        raise HTTPException(404)
    return Response(file.read_bytes(), media_type=MEDIA[name.rsplit(".")[-1]] + "; charset=utf-8")


async def _plotly(request: Request) -> Response:
    """Plotly's script, from its wheel; browsers keep it, for it changes with its version alone."""
    data = await to_thread.run_sync(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes)
    return Response(data, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})


async def _openapi(request: Request) -> Response:
    return Response(_json(document(ENDPOINTS)), media_type="application/json")
