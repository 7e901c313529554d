"""Access control of the lab: a request must carry the token, and must not come from a page of another site.

The lab listens on a port, and every user of this machine can connect to it. The token is what only the person has who
started the lab: it is part of the printed address, and a cookie keeps it in the browser.

A page of another site can send requests to this machine too. If its host name is made to resolve to this machine (DNS
rebinding), the page can also read the responses. Therefore a lab that only this machine can reach accepts only names of
this machine in ``Host``, and requests that a browser marks as coming from another site (``Origin``, ``Sec-Fetch-Site``)
are refused, even if they carry the cookie.
"""

from __future__ import annotations

import hmac
from html import escape
from importlib import resources
from urllib.parse import unquote_plus, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.lab.connections import ADMITTED

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_REQUEST_BYTES = 12 * 2**20
TOKEN_NEEDED = "this lab needs its token; open the address that it printed in its terminal"
# The values of Sec-Fetch-Site of requests that the user or a page of the lab made.
OWN_SITES = ("none", "same-origin")

# These headers are sent with every response. Pages may load only what the lab itself serves.
SECURITY_HEADERS = {
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


class AccessControl:
    """ASGI middleware that refuses requests without the token or from other sites, and adds the security headers.

    - ``token``: what every request must carry; if None, requests need no token.
    - ``any_host``: whether any name is accepted in ``Host``, for a lab that other machines can reach. If false, only
      the loopback names are.
    """

    def __init__(self, app: ASGIApp, token: str | None, any_host: bool = False) -> None:
        if token is None and any_host:
            raise ValueError("token must be given if other machines can reach the lab, got None")
        self.app = app
        self.token = token
        self.any_host = any_host
        self._token_page = resources.files("regard.lab").joinpath("static", "token_needed.html").read_bytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        bytes_read = 0

        async def bounded_receive() -> Message:
            # A body that is sent in pieces has no content-length. If it grows too large, report a disconnect.
            nonlocal bytes_read
            message = await receive()
            bytes_read += len(message.get("body", b""))
            if bytes_read > MAX_REQUEST_BYTES:
                return {"type": "http.disconnect"}
            return message

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        # The limits on connections tell by this who may stay.
        scope[ADMITTED] = True
        await self.app(scope, bounded_receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request, or None if the request is allowed."""
        headers = Headers(scope=scope)

        # DNS rebinding: the browser believes that another site's name is this machine.
        hosts = headers.getlist("host")
        host = _parse_host(hosts[0]) if len(hosts) == 1 else None
        if host is None or (not self.any_host and host[0] not in LOOPBACK):
            return _error(403, "this lab is served at 127.0.0.1 and localhost only; open it at one of these")

        # Requests of another site's page. Links from other sites to the start page are allowed.
        origin = headers.get("origin")
        other_origin = origin is not None and _netloc(origin) != hosts[0].lower()
        is_start_page = scope["path"] == "/" and scope["method"] == "GET"
        other_site = headers.get("sec-fetch-site", "none") not in OWN_SITES
        if other_origin or (other_site and not is_start_page):
            return _error(403, "requests from pages of other sites are refused")

        # Before all other checks: without the token, responses say nothing about the lab.
        if self.token is not None:
            refusal = self._check_token(self.token, scope, headers, cookie_name(host[1]))
            if refusal is not None:
                return refusal

        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _error(405, f"method {scope['method']} is not allowed; use GET or POST")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            return _error(413, f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB")
        return None

    def _check_token(self, token: str, scope: Scope, headers: Headers, cookie: str) -> Response | None:
        """Return None if the request carries the token in the cookie or as a bearer, else the response to send."""
        bearer_token = headers.get("authorization", "").removeprefix("Bearer ")
        cookie_token = cookie_parser(headers.get("cookie", "")).get(cookie, "")
        has_token = _equal(bearer_token, token) or _equal(cookie_token, token)

        # Move the token of the address into the cookie, so that it does not stay in the address bar and the history.
        # The rest of the query is the view to show. Browsers keep the fragment.
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            query = scope["query_string"].decode("latin-1")
            query_tokens, other_fields = _take_tokens(query)
            if query_tokens and (has_token or _equal(query_tokens[0], token)):
                redirect = RedirectResponse(f"/?{other_fields}" if other_fields else "/", status_code=303)
                redirect.set_cookie(cookie, token, httponly=True, samesite="strict")
                return redirect
        if has_token:
            return None
        return self._token_needed(scope, headers)

    def _token_needed(self, scope: Scope, headers: Headers) -> Response:
        """Return the response to a request without the token: a page for people, JSON for scripts."""
        challenge = {"www-authenticate": "Bearer"}
        if "text/html" not in headers.get("accept", ""):
            return JSONResponse({"error": TOKEN_NEEDED}, 401, challenge)

        # A browser does not send the cookie if a link of another site leads here, or a file, as at the lab's start. It
        # does if the lab's own page leads to the same address. That request is not from another site, so this ends.
        if scope["path"] == "/" and headers.get("sec-fetch-site", "none") not in OWN_SITES:
            _, other_fields = _take_tokens(scope["query_string"].decode("latin-1"))
            target = escape(f"/?{other_fields}" if other_fields else "/")
            return HTMLResponse(forwarding_page(target), 401, challenge)
        return HTMLResponse(self._token_page, 401, challenge)


def cookie_name(port: int) -> str:
    """Return the name of the cookie with the token, for the port in the browser's address.

    Browsers send cookies to all ports of a host. With one name for all, two labs would overwrite each other's token.
    """
    return f"regard-lab-{port}"


def forwarding_page(target: str) -> str:
    """Return a page that leads to another address at once. ``target`` is escaped for an attribute."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>regard lab</title>'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        '<link rel="icon" href="data:,">'
        f'<meta http-equiv="refresh" content="0; url={target}"></head>'
        f'<body><p>Opening the lab … <a href="{target}">Continue</a></p></body></html>\n'
    )


def _take_tokens(query: str) -> tuple[list[str], str]:
    """Split a query string into the values of its fields ``token`` and the rest, as it was written."""
    tokens = []
    others = []
    for field in query.split("&"):
        name, _, value = field.partition("=")
        if unquote_plus(name) == "token":
            tokens.append(unquote_plus(value))
        elif field:
            others.append(field)
    return tokens, "&".join(others)


def _parse_host(host: str) -> tuple[str, int] | None:
    """Return the name and the port in a Host header; None if the header is not a valid host."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port  # raises ValueError if the port is not a number
    except ValueError:
        return None
    if parts.username or parts.path or parts.query or not parts.hostname:
        return None
    return parts.hostname, 80 if port is None else port


def _netloc(origin: str) -> str:
    """Return the name and port in an Origin header; an empty string if it is not a URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _equal(a: str, b: str) -> bool:
    # A comparison in constant time, so that response times do not reveal the token.
    return hmac.compare_digest(a.encode(), b.encode())


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)
