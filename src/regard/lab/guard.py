"""Who may ask: this machine's own pages alone, or those who have the token; and what pages may do.

A page of another site can send requests to this machine, and by a name that it lets point here (DNS rebinding) read the
answers too. So the name in ``Host`` must be one of this machine, and requests that a browser marks as another site's
(``Origin``, ``Sec-Fetch-Site``) are refused. Where the lab listens to other machines a token is asked for as well.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK", "Guard"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "regard-lab"
LARGEST = 12 * 2**20  # bytes of a request

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware. ``token`` None: loopback names only; else any name, with the token."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, answered)
            return
        await self.app(scope, _Bounded(receive).receive, answered)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        name = _name(hosts[0]) if len(hosts) == 1 else None
        if name is None or (self.token is None and name not in LOOPBACK):
            return _no(403, "this lab answers on 127.0.0.1 and localhost only; open it under that name")
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != hosts[0].lower():
            return _no(403, "this request comes from a page of another site, and is refused")
        from_where = headers.get("sec-fetch-site", "none")
        page = scope["path"] == "/" and scope["method"] == "GET"
        if from_where not in ("none", "same-origin") and not page:
            return _no(403, "this request comes from a page of another site, and is refused")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _no(405, f"{scope['method']} is not answered here; GET and POST are")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST:
            return _no(413, f"the request is larger than {LARGEST // 2**20} MiB")
        return None if self.token is None else self._asks_for_token(scope, headers)

    def _asks_for_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self.token is not None
        if scope["path"] == "/":
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if _same(given, self.token):  # into a cookie, and out of the address
                answer = RedirectResponse("/", status_code=303)
                answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
                return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(_cookie(headers.get("cookie", "")), self.token) or _same(bearer, self.token):
            return None
        return _no(401, "this lab asks for the token that it printed when it started: open the address with ?token=…")


class _Bounded:
    """A body sent in pieces is counted too: its end is given out when it grows too large."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._read = receive, 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            if self._read > LARGEST:
                return {"type": "http.disconnect"}
        return message


def _name(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is no host."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname if parts.hostname and not (parts.username or parts.path or parts.query) else None


def _netloc(origin: str) -> str:
    """Name and port in an Origin header; nothing where it is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _cookie(text: str) -> str:
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


def _no(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)
