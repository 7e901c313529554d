"""Access control of the lab: only its own pages, with the token, may send requests."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from support.lab_pages import serve_lab, token_of

from regard.lab import access_control, app
from regard.lab.workspace import Workspace


def send_raw(
    address: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Send a request exactly as given: a client library would normalize its path and its headers.

    It carries the token, unless ``authorization`` is another one or empty.
    """
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    fields = {"host": where.netloc, "authorization": f"Bearer {token_of(address)}"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        fields.setdefault("content-length", str(len(body)))
    for name, value in fields.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    if body:
        with suppress(OSError):  # the lab may have answered before it has read everything
            connection.send(body)
    response = connection.getresponse()
    text = response.read().decode("utf-8", "replace")
    connection.close()
    return response.status, text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.7:8421", "", "a b"]
)
def test_other_host_names_are_refused(address, host):
    status, text = send_raw(address, "/api/workspace", host=host)
    assert status in (400, 403) and "bundled" not in text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1", "[::1]:8421", "LOCALHOST"])
def test_loopback_names_with_any_port_are_accepted(address, host):
    assert send_raw(address, "/api/workspace", host=host)[0] == 200


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
def test_requests_from_other_sites_are_refused(address, headers):
    body = json.dumps({"job": "x"}).encode()
    assert send_raw(address, "/api/jobs/cancel", "POST", body, content_type="application/json", **headers)[0] == 403
    assert send_raw(address, "/api/workspace", **headers)[0] == 403


def test_requests_from_the_labs_own_page_are_accepted(address):
    own = f"http://{urlsplit(address).netloc}"
    body = json.dumps({"job": "x"}).encode()
    status, text = send_raw(
        address,
        "/api/jobs/cancel",
        "POST",
        body,
        content_type="application/json",
        origin=own,
        sec_fetch_site="same-origin",
    )
    assert status == 404 and "no such job" in text
    assert send_raw(address, "/", sec_fetch_site="cross-site")[0] == 200  # a link from elsewhere may lead here


def test_a_form_of_another_site_cannot_post(address):
    """Browsers send forms to other sites without a permission check; forms are not JSON."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        assert send_raw(address, "/api/jobs/cancel", "POST", b'{"job": "x"}', content_type=kind)[0] == 422


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
def test_paths_outside_the_static_folder_are_not_found(address, path):
    status, text = send_raw(address, path)
    assert status == 404 and "root:" not in text and "import" not in text


def test_symbolic_links_cannot_be_requested(workspace, address, tmp_path):
    """Ids are not paths: files beside a recording cannot be named, also not through links."""
    os.symlink("/etc", workspace.state / "recordings" / "rdeadbeef")
    for name in ("rdeadbeef", "..", "../recordings", "%2e%2e", "."):
        status, _ = send_raw(address, f"/api/look/recording?recording={name}")
        assert status in (404, 422)


def test_security_headers(address):
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.request("GET", "/", headers={"authorization": f"Bearer {token_of(address)}"})
    headers = connection.getresponse().headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in policy and "server" not in headers


def test_large_bodies_are_refused(address):
    status, text = send_raw(
        address, "/api/look", "POST", b"x", content_type="application/json", content_length="999999999"
    )
    assert status == 413 and "12 MiB" in text
    for wrong in ("-5", "many"):
        try:
            status, _ = send_raw(
                address, "/api/look", "POST", b"x", content_type="application/json", content_length=wrong
            )
            assert status in (400, 413)
        except OSError:
            pass  # no request at all: the line is cut


def test_large_chunked_bodies_are_refused(address, monkeypatch):
    monkeypatch.setattr(access_control, "MAX_REQUEST_BYTES", 10_000)
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    pieces = (b" " * 4096 for _ in range(10))
    headers = {"content-type": "application/json", "authorization": f"Bearer {token_of(address)}"}
    try:
        connection.request("POST", "/api/look", pieces, headers, encode_chunked=True)
        assert connection.getresponse().status in (400, 413)
    except OSError:
        pass  # cut off in the middle
    assert send_raw(address, "/api/workspace")[0] == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(address, method):
    assert send_raw(address, "/api/workspace", method)[0] in (405, 501)


def test_an_unexpected_error_is_one_line(tmp_path, monkeypatch):
    """The traceback may hold paths or data. It is written to a log, which the line names."""

    def broken(workspace, request):
        raise AssertionError("first line\nsecond line")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where the log is
    endpoint = next(x for x in app.ENDPOINTS if x.path == "/api/workspace")
    monkeypatch.setattr(
        app, "ENDPOINTS", (type(endpoint)(endpoint.method, endpoint.path, endpoint.request_type, broken),)
    )
    with serve_lab(Workspace(tmp_path / "lab")) as where:
        status, text = send_raw(where, "/api/workspace")
    assert status == 500 and "errors.log" in text
    assert "second line" not in text and "Traceback" not in text
