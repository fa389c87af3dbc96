"""What the page's server refuses: other names, other sites, uploads, guessed passwords. Without a browser."""

from __future__ import annotations

import http.client
import importlib.util
import json
from urllib.parse import urlencode, urlsplit

import pytest
from typer.testing import CliRunner

import noiser
from app_for_tests import served
from noiser.app import check_hosts
from noiser.cli import app
from noiser.errors import ParameterError

if importlib.util.find_spec("gradio") is None:
    pytest.skip("gradio is not installed: pip install 'noiser[app]'", allow_module_level=True)
from noiser.app.guard import Throttle

JOIN = "/gradio_api/queue/join"
QUESTION = json.dumps({"data": [], "fn_index": 0, "session_hash": "s"})


@pytest.fixture(scope="module")
def address():
    with served("--auth", "me:secret", "--allowed-host", "Page.example") as address:
        yield urlsplit(address)


@pytest.fixture
def send(address):
    def send(method, path, body=None, **headers):
        """Status and headers of the reply; `own` stands for the server's own address."""
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        named = {name.replace("_", "-"): value.replace("own", address.netloc) for name, value in headers.items()}
        connection.request(method, path, body, named)
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        connection.close()
        return reply.status, reply.headers, text

    return send


@pytest.mark.parametrize(
    "host", ["own", "localhost", "localhost:1", "[::1]", "[::1]:7860", "10.1.2.3", "page.example", "PAGE.example.:8443"]
)
def test_names_that_are_the_page_s(send, host):
    status, headers, _ = send("GET", "/", Host=host)
    assert status == 200
    assert "'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "host", ["evil.example", "page.example.evil", "x.page.example", "localhost.evil", "2130706433"]
)
def test_any_other_name_is_refused_and_says_what_to_do(send, host):
    status, _, text = send("GET", "/", Host=host)
    assert status == 403
    assert f"noiser serve --allowed-host {host}" in text


@pytest.mark.parametrize("host", ["", "a@localhost", "localhost/x", "[::1", "localhost:port"])
def test_a_host_that_is_none_is_refused(send, host):
    assert send("GET", "/", Host=host)[0] == 400


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost",
        "http://localhost:1",
        "http://own.evil",
        "http://127.0.0.1",
        "own",
    ],
)
@pytest.mark.parametrize("path", ["/login", JOIN, "/gradio_api/run/predict"])
def test_a_post_from_another_origin_is_refused(send, path, origin):
    status, headers, _ = send("POST", path, QUESTION, Origin=origin)
    assert status == 403
    assert "access-control-allow-origin" not in headers


def test_the_page_s_own_origin_is_answered_and_never_shared(send):
    for host in ("own", "[::1]:7860", "page.example"):
        status, headers, _ = send("POST", JOIN, QUESTION, Host=host, Origin=f"http://{host}")
        assert status == 401  # not refused: nobody is logged in
        assert [name for name in headers if name.lower().startswith("access-control")] == []


@pytest.mark.parametrize(
    ("method", "path", "site", "destination", "status"),
    [
        ("GET", "/?prompt=a", "cross-site", "document", 200),  # a link
        ("GET", "/?prompt=a", "cross-site", "iframe", 403),
        ("GET", "/logout", "cross-site", "document", 403),
        ("GET", "/logout", "same-site", "image", 403),
        ("GET", "/theme.css", "cross-site", "style", 403),
        ("GET", "/theme.css", "same-origin", "style", 200),
        ("POST", JOIN, "same-site", "empty", 403),
        ("POST", JOIN, "none", "empty", 401),
    ],
)
def test_what_a_browser_says_about_the_sender_counts(send, method, path, site, destination, status):
    body = QUESTION if method == "POST" else None
    assert send(method, path, body, Sec_Fetch_Site=site, Sec_Fetch_Dest=destination)[0] == status


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH"])
def test_other_methods_have_no_use(send, method):
    assert send(method, JOIN, "", Origin="http://own", Access_Control_Request_Method="POST")[0] == 405


@pytest.mark.parametrize(
    "path", ["/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/cancel", "/gradio_api/component_server", "/x"]
)
def test_uploads_and_all_other_posts_are_off(send, path):
    assert send("POST", path, "--b\r\n\r\nx", Content_Type="multipart/form-data; boundary=b")[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=http://evil.example/x",
        "/gradio_api/proxy=http://evil.example/x",
        "/gradio_api/custom_component/%1b]0;owned%07/client/y/z",
        "/gradio_api/deep_link?session_hash=s",
        "/gradio_api/info",
        "/gradio_api/queue/status",
        "/openapi.json",
        "/monitoring",
        "//assets/x",
    ],
)
def test_all_that_the_page_does_not_get_is_off(send, path):
    for method in ("GET", "HEAD"):
        status, _, text = send(method, path)
        assert (status, text) == (404, "The page has nothing here.\n" if method == "GET" else "")


def test_strangers_make_no_sessions(send):
    """A hundred of them would make the page forget what it answered."""
    assert send("GET", "/gradio_api/heartbeat/x")[0] == 401


def test_a_request_has_a_size(send):
    assert send("POST", JOIN, iter([b"x"]), Transfer_Encoding="chunked")[0] == 411
    assert send("POST", JOIN, iter([b"x"]), Transfer_Encoding="chunked", Content_Length="3")[0] == 411
    assert send("POST", JOIN, "", Content_Length=str(10**9))[0] == 413


def test_cookies_stay_on_the_site_and_passwords_are_not_guessed_fast(send):
    def login(password):
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        return send("POST", "/login", urlencode({"username": "me", "password": password}), **form)

    status, headers, _ = login("secret")
    assert status == 200
    cookies = headers.get_all("set-cookie")
    assert len(cookies) == 2
    assert all("samesite=lax" in cookie.lower() and "none" not in cookie.lower() for cookie in cookies)
    statuses = [login(f"wrong {index}")[0] for index in range(100)]
    assert statuses[:5] == [400] * 5
    assert statuses.count(400) < 10
    status, headers, text = login("secret")
    assert (status, "Too many wrong passwords" in text) == (429, True)
    assert 0 < int(headers["retry-after"]) <= 301


def test_pauses_grow_and_end():
    now = [0.0]
    throttle = Throttle(free=2, longest=60.0, clock=lambda: now[0])
    waits = []
    for _ in range(12):
        while wait := throttle.begin("1.2.3.4"):
            waits.append(wait)
            assert throttle.begin("1.2.3.4") == wait  # a try in a pause does not count
            now[0] += wait
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert throttle.begin("1.2.3.5") == 0
    throttle.succeed("1.2.3.4")
    assert [throttle.begin("1.2.3.4") for _ in range(3)] == [0, 0, 1]
    now[0] += 3600
    assert throttle.begin("1.2.3.4") == 0


def test_a_network_of_ipv6_is_one_visitor():
    throttle = Throttle(free=1, clock=lambda: 0.0)
    assert [throttle.begin(address) > 0 for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")] == [
        False, True, False,
    ]  # fmt: skip


def test_the_addresses_that_are_remembered_have_a_limit():
    throttle = Throttle(clock=lambda: 0.0)
    for index in range(10_100):
        throttle.begin(f"host {index}")
    assert len(throttle._tries) == 10_000


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a/b", "*", "a b"])
def test_an_allowed_host_is_a_name(name, monkeypatch):
    with pytest.raises(ParameterError, match="expected a name without scheme"):
        check_hosts([name])
    monkeypatch.setattr(noiser.model, "load_model", lambda *_, **__: pytest.fail("loaded a model first"))
    result = CliRunner().invoke(app, ["serve", "--allowed-host", name])
    assert (result.exit_code, "--allowed-host" in result.stderr) == (2, True)
