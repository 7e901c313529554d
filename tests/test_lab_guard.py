"""Who may ask the lab: its own pages, and nobody else's."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from regard.lab import app, guard
from regard.lab.lab import Lab
from regard.lab.serve import serving


def asked(address: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """A request as it is on the wire: no client tidies its path or its headers."""
    where = urlsplit(address)
    line = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    sent = {"host": where.netloc, **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body is not None:
        sent.setdefault("content-length", str(len(body)))
    for name, value in sent.items():
        if value:
            line.putheader(name, value)
    line.endheaders()
    if body:
        with suppress(OSError):  # the lab may have answered before it has read everything
            line.send(body)
    answer = line.getresponse()
    text = answer.read().decode("utf-8", "replace")
    line.close()
    return answer.status, text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.7:8421", "", "a b"]
)
def test_another_name_is_refused(address, host):
    status, text = asked(address, "/api/workspace", host=host)
    assert status in (400, 403) and "bundled" not in text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1", "[::1]:8421", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(address, host):
    assert asked(address, "/api/workspace", host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_another_sites_page_is_refused(address, headers):
    body = json.dumps({"job": "x"}).encode()
    assert asked(address, "/api/jobs/cancel", "POST", body, content_type="application/json", **headers)[0] == 403
    assert asked(address, "/api/workspace", **headers)[0] == 403


def test_its_own_page_is_not(address):
    own = f"http://{urlsplit(address).netloc}"
    body = json.dumps({"job": "x"}).encode()
    status, text = asked(
        address,
        "/api/jobs/cancel",
        "POST",
        body,
        content_type="application/json",
        origin=own,
        sec_fetch_site="same-origin",
    )
    assert status == 404 and "no such job" in text
    assert asked(address, "/", sec_fetch_site="cross-site")[0] == 200  # a link from elsewhere may lead here


def test_a_form_of_another_site_cannot_post(address):
    """A page can send forms without asking; they are no JSON."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        assert asked(address, "/api/jobs/cancel", "POST", b'{"job": "x"}', content_type=kind)[0] == 422


@pytest.mark.parametrize(
    "path",
    [
        "/static/../lab.py",
        "/static/%2e%2e/lab.py",
        "/static/..%2flab.py",
        "/static//etc/passwd",
        "/static/look/../../app.py",
        "/static/app.js%00.css",
        "/static/",
        "/../../etc/passwd",
        "/etc/passwd",
    ],
)
def test_no_path_leaves_the_pages(address, path):
    status, text = asked(address, path)
    assert status == 404 and "root:" not in text and "import" not in text


def test_a_link_out_of_a_recording_is_not_followed(lab, address, tmp_path):
    """Ids are not paths: what lies beside a recording cannot be named, through links neither."""
    os.symlink("/etc", lab.state / "recordings" / "rdeadbeef")
    for name in ("rdeadbeef", "..", "../recordings", "%2e%2e", "."):
        status, _ = asked(address, f"/api/look/recording?recording={name}")
        assert status in (404, 422)


def test_pages_may_do_little(address):
    where = urlsplit(address)
    line = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    line.request("GET", "/")
    headers = line.getresponse().headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in policy and "server" not in headers


def test_a_body_is_bounded(address):
    status, text = asked(
        address, "/api/look", "POST", b"x", content_type="application/json", content_length="999999999"
    )
    assert status == 413 and "12 MiB" in text
    for wrong in ("-5", "many"):
        try:
            status, _ = asked(address, "/api/look", "POST", b"x", content_type="application/json", content_length=wrong)
            assert status in (400, 413)
        except OSError:
            pass  # no request at all: the line is cut


def test_a_body_in_pieces_is_bounded_too(address, monkeypatch):
    monkeypatch.setattr(guard, "LARGEST", 10_000)
    where = urlsplit(address)
    line = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    pieces = (b" " * 4096 for _ in range(10))
    try:
        line.request("POST", "/api/look", pieces, {"content-type": "application/json"}, encode_chunked=True)
        assert line.getresponse().status in (400, 413)
    except OSError:
        pass  # cut off in the middle
    assert asked(address, "/api/workspace")[0] == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(address, method):
    assert asked(address, "/api/workspace", method)[0] in (405, 501)


@pytest.fixture
def guarded(tmp_path) -> Iterator[tuple[str, str]]:
    """A lab that listens to other machines: its address, and the token."""
    with serving(Lab(tmp_path), host="0.0.0.0", port=0) as (where, _):
        base, _, token = where.partition("?token=")
        yield f"http://127.0.0.1:{urlsplit(base).port}/", token


def test_other_machines_need_the_token(guarded):
    address, token = guarded
    assert len(token) > 24
    assert asked(address, "/")[0] == 401 and asked(address, "/api/workspace")[0] == 401
    assert asked(address, "/?token=wrong")[0] == 401
    assert asked(address, "/api/workspace", authorization=f"Bearer {token}")[0] == 200
    assert asked(address, "/api/workspace", cookie=f"{guard.COOKIE}={token}", host="lab.example:80")[0] == 200
    assert asked(address, f"/?token={token}")[0] == 303
    assert asked(address, "/api/workspace", cookie=f"{guard.COOKIE}={token}", origin="http://evil.example")[0] == 403


def test_an_unforeseen_error_says_nothing_of_the_inside(tmp_path, monkeypatch, caplog):
    def broken(lab, asked):
        raise AssertionError("secret")

    one = next(x for x in app.ENDPOINTS if x.path == "/api/workspace")
    monkeypatch.setattr(app, "ENDPOINTS", (type(one)(one.method, one.path, one.asks, broken),))
    with serving(Lab(tmp_path), port=0) as (where, _):
        status, text = asked(where, "/api/workspace")
    assert status == 500 and "secret" not in text
