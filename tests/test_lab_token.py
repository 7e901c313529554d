"""The token of the lab: what is refused without it, how a browser gets it, and what people see who do not have it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from support.lab_pages import note_token, page_address, serve_lab, token_of

from regard import RegardError
from regard.lab import server
from regard.lab.access_control import AccessControl, cookie_name
from regard.lab.app import ENDPOINTS
from regard.lab.workspace import Workspace

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a lab in which nothing is open."""
    workspace = Workspace(tmp_path_factory.mktemp("lab"))
    with serve_lab(workspace) as address:
        yield address


class Reply(NamedTuple):
    """What a lab responded."""

    status: int
    headers: http.client.HTTPMessage
    text: str


def get(address: str, path: str, method: str = "GET", **headers: str) -> Reply:
    """Send a request with these headers, and without the token unless they contain it."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=fields)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return Reply(response.status, response.headers, text)


def cookie(address: str, token: str | None = None, port: int | None = None) -> str:
    value = token_of(address) if token is None else token
    return f"{cookie_name(port or urlsplit(address).port or 0)}={value}"


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    ["/", "/static/app.js", "/static/icon.svg", "/plotly.js", "/openapi.json", "/api/nothing", "/nothing", "/%00"],
)
def test_nothing_is_served_without_the_token(lab: str, path: str, method: str) -> None:
    response = get(lab, path, method)
    assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_no_endpoint_responds_without_the_token(lab: str) -> None:
    statuses = set()
    for endpoint in ENDPOINTS:
        statuses.add(get(lab, endpoint.path, endpoint.method).status)
    statuses.add(get(lab, "/api/jobs/1").status)
    assert statuses == {401}


@pytest.mark.parametrize("wrong", ["", "x", "Bearer", "é", "A" * 9999])
def test_wrong_tokens_are_refused(lab: str, wrong: str) -> None:
    sent = wrong.encode("utf-8").decode("latin-1")
    assert get(lab, "/api/jobs", authorization=f"Bearer {sent}").status == 401
    assert get(lab, "/api/jobs", authorization=sent).status == 401
    assert get(lab, "/api/jobs", cookie=cookie(lab, sent)).status == 401
    assert get(lab, f"/?token={wrong.encode().hex()}").status == 401
    assert get(lab, f"/api/jobs?token={token_of(lab)}").status == 401  # only the start page takes it from the address


def test_a_token_is_long_and_new_at_each_start(lab: str, tmp_path: Any) -> None:
    assert len(token_of(lab)) >= 32
    with serve_lab(Workspace(tmp_path)) as other:
        assert token_of(other) != token_of(lab)
        assert get(other, "/api/jobs", authorization=f"Bearer {token_of(lab)}").status == 401


def test_the_address_moves_the_token_into_a_cookie(lab: str) -> None:
    response = get(lab, f"/?page=look&token={token_of(lab)}&row=1%262&key=")
    assert response.status == 303 and response.headers["location"] == "/?page=look&row=1%262&key="
    name, _, attributes = response.headers["set-cookie"].partition("=")
    assert name == f"regard-lab-{urlsplit(lab).port}"
    assert "HttpOnly" in attributes and "SameSite=strict" in attributes and "Path=/" in attributes
    given = response.headers["set-cookie"].split(";")[0]
    assert get(lab, "/?page=look", cookie=given).status == 200
    assert get(lab, "/api/jobs", cookie=given).status == 200


def test_an_old_address_works_in_a_browser_with_the_cookie(lab: str) -> None:
    response = get(lab, "/?token=old&page=budget", cookie=cookie(lab))
    assert response.status == 303 and response.headers["location"] == "/?page=budget"


def test_labs_at_other_ports_have_other_cookies(lab: str) -> None:
    assert get(lab, "/api/jobs", cookie=cookie(lab, port=1)).status == 401
    both = f"{cookie(lab, 'other', port=1)}; {cookie(lab)}"
    assert get(lab, "/api/jobs", cookie=both).status == 200
    # Through a tunnel the browser sees another port. Its cookie has the name of that port.
    tunnel = get(lab, f"/?token={token_of(lab)}", host="localhost:9000")
    assert tunnel.headers["set-cookie"].startswith("regard-lab-9000=")
    assert get(lab, "/api/jobs", host="localhost:9000", cookie=cookie(lab, port=9000)).status == 200


def test_cookies_of_other_programs_do_not_matter(lab: str) -> None:
    odd = 'a[x]=1; json={"a": [1, 2]}; =; ;; b'
    assert get(lab, "/api/jobs", cookie=f"{odd}; {cookie(lab)}; {odd}").status == 200


def test_the_token_does_not_help_other_sites(lab: str) -> None:
    """A page at another port of this machine is of the same site, so the browser sends the cookie with its requests."""
    assert get(lab, "/api/jobs", cookie=cookie(lab), origin="http://evil.example").status == 403
    assert get(lab, "/api/jobs", cookie=cookie(lab), sec_fetch_site="same-site").status == 403
    assert get(lab, "/api/jobs", cookie=cookie(lab), host="evil.example").status == 403


def test_scripts_get_json_and_people_a_page(lab: str) -> None:
    script = get(lab, "/api/jobs")
    assert script.headers["content-type"] == "application/json" and "terminal" in script.text
    person = get(lab, "/?page=look", accept=BROWSER)
    assert person.status == 401 and person.headers["content-type"].startswith("text/html")
    assert "regard lab" in person.text and "terminal" in person.text
    assert "refresh" not in person.text


def test_a_link_of_another_site_is_followed_from_the_labs_own_page(lab: str) -> None:
    """A browser keeps a strict cookie back at first; it sends the cookie if the lab's own page leads on."""
    query = "page=look&token=x&a=%22%3E&b='c"
    first = get(lab, f"/?{query}", accept=BROWSER, sec_fetch_site="cross-site")
    target = re.search(r'http-equiv="refresh" content="0; url=([^"]*)"', first.text)
    assert first.status == 401 and target is not None
    assert target[1] == "/?page=look&amp;a=%22%3E&amp;b=&#x27;c"
    again = get(lab, "/?page=look", accept=BROWSER, sec_fetch_site="same-origin")
    assert again.status == 401 and "refresh" not in again.text


def test_a_lab_for_other_machines_accepts_their_names(tmp_path: Any) -> None:
    with server.running_server(Workspace(tmp_path), host="0.0.0.0", port=0) as running:
        note_token(running.address)
        port = urlsplit(running.url).port
        local = f"http://127.0.0.1:{port}/"
        bearer = f"Bearer {running.token}"
        assert get(local, "/api/jobs", host="lab.example:80").status == 401
        assert get(local, "/api/jobs", host="lab.example:80", authorization=bearer).status == 200
        assert get(local, "/api/jobs", host="lab.example", cookie=f"{cookie_name(80)}={running.token}").status == 200
        evil = get(local, "/api/jobs", host="lab.example", authorization=bearer, origin="http://evil.example")
        assert evil.status == 403


def test_a_lab_without_a_token_is_for_this_machine_only(tmp_path: Any) -> None:
    with server.running_server(Workspace(tmp_path), port=0, needs_token=False) as running:
        assert running.token is None and "token" not in running.address
        assert get(running.url, "/api/jobs").status == 200
        assert get(running.url, "/api/jobs", host="evil.example").status == 403
        assert get(running.url, "/?token=old", accept=BROWSER).status == 200
    with pytest.raises(RegardError, match="--no-token"):
        server.check_token_option("0.0.0.0", needs_token=False)
    with pytest.raises(ValueError, match="token"):
        AccessControl(None, None, any_host=True)  # type: ignore[arg-type]


# In a browser


def test_a_browser_started_with_the_file_opens_the_lab(browser: Any, lab: str, tmp_path: Any, monkeypatch: Any) -> None:
    """The whole way: the file, the address with the token, the redirect, and the page with the cookie."""
    opened: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    running = server.RunningLab(lab, token_of(lab), None)  # type: ignore[arg-type]
    context = browser.new_context()
    with server._address_file(running, tmp_path) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        server._open_browser(file)
        assert opened == [file.as_uri()] and token_of(lab) not in opened[0]
        tab = context.new_page()
        tab.goto(opened[0])
        tab.wait_for_url(lab, timeout=60_000)
        tab.locator("#pages a").first.wait_for(timeout=60_000)
    assert not file.exists()
    cookies = context.cookies()
    assert [found["httpOnly"] and found["sameSite"] == "Strict" for found in cookies] == [True]

    # The fragment and the query of a link survive.
    tab.goto(page_address(lab, "?page=budget") + "#here")
    assert tab.url == f"{lab}?page=budget#here"
    context.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_people_without_the_token_see_how_to_come_back(browser: Any, lab: str, width: int, dark: bool) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme="dark" if dark else "light")
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    response = tab.goto(f"{lab}?page=look&recording=r00000000")
    assert response.status == 401 and tab.get_by_role("heading", name="token").is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    # The browser reports the status itself; the page causes nothing else.
    assert [text for text in problems if "401" not in text] == []

    # Once the token is there, a reload shows what the address names.
    other = context.new_page()
    other.goto(page_address(lab))
    assert tab.reload().status == 200 and "recording=r00000000" in tab.url
    context.close()


def test_an_old_tab_says_how_to_come_back(browser: Any, lab: str) -> None:
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(page_address(lab, "?page=claims"))
    tab.locator(".claims .row, .claims li, .claims table").first.wait_for()
    context.clear_cookies()  # as after another start of the lab
    tab.get_by_role("link", name="Budget").click()
    notice = tab.get_by_role("alert").filter(has_text="token")
    notice.wait_for()
    assert "terminal" in notice.inner_text()
    # It goes away when the lab responds again.
    context.add_cookies([{"name": cookie_name(urlsplit(lab).port or 0), "value": token_of(lab), "url": lab}])
    notice.get_by_role("button", name="Try again").click()
    tab.wait_for_selector(".budget[data-counted]")
    assert not notice.is_visible()
    context.close()
