"""Nobody gets in from a web page, whatever the route: hosts, origins and types of bodies."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute

from fake_engine import FakeEngine
from patience import PATIENCE_S
from serving import live, make_app
from tandem.api.entrance import UPLOADS
from tandem.api.errors import MESSAGES
from tandem.api.fields import NOT_SERVED
from tandem.config import ServerConfig

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://page.example"
OPEN = ("/health", "/ready", "/", "/page/1")
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
PLAIN = ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "")
FORM = "multipart/form-data; boundary=x"


def routes() -> list[tuple[str, str]]:
    """Every method and path that is served, with something for each variable."""
    return [
        (method, re.sub(r"{[^}]+}", "1", route.path))
        for route in make_app(FakeEngine()).routes
        if isinstance(route, APIRoute)
        for method in route.methods
    ]


ROUTES = routes()
CHANGES = [(method, path) for method, path in ROUTES if method in CHANGING]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        yield http


@pytest.fixture(scope="module")
def closed() -> Iterator[httpx.Client]:
    server = ServerConfig(api_keys=("sk-one",), cors_origins=(PAGE,))
    with live(make_app(FakeEngine(), server)) as url, httpx.Client(base_url=url) as http:
        yield http


def code(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    if answer.request.url.path.startswith(MESSAGES):  # Anthropic's errors have no code
        kind, told = {415: ("invalid_request_error", "unsupported_media_type"),
                      403: ("permission_error", "forbidden")}[status]  # fmt: skip
        assert answer.json()["type"] == "error" and set(error) == {"message", "type"}
        assert error["message"] and error["type"] == kind
        return told
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@pytest.mark.parametrize(("method", "path"), CHANGES, ids=str)
def test_no_route_takes_what_a_page_may_send_unasked(
    http: httpx.Client, method: str, path: str
) -> None:
    wrong = [*PLAIN, "application/json; charset=latin-1", "application/jsonp", "application"]
    wrong += ["application/json"] if path in UPLOADS else [FORM]
    for kind in wrong:
        headers = {"content-type": kind} if kind else {}
        answer = http.request(method, path, content=b"{}", headers=headers)
        assert code(answer, 415) == "unsupported_media_type", kind
    right = FORM if path in UPLOADS else "application/json"
    for encoding in ("gzip", "br", "identity, gzip"):
        headers = {"content-type": right, "content-encoding": encoding}
        answer = http.request(method, path, content=b"{}", headers=headers)
        assert code(answer, 415) == "unsupported_media_type"
    for origin in (PAGE, "null", "http://127.0.0.1:1", "https://127.0.0.1"):
        headers = {"content-type": right, "origin": origin}
        assert code(http.request(method, path, content=b"{}", headers=headers), 403) == "forbidden"
        headers = {"origin": origin}
        assert code(http.request(method, path, headers=headers), 403) == "forbidden"


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=str)
def test_every_route_asks_for_the_host_and_the_key(
    http: httpx.Client, closed: httpx.Client, method: str, path: str
) -> None:
    for host in ("rebound.example", "rebound.example:8000", "127.0.0.1.example", "", "[::2]"):
        answer = http.request(method, path, headers={"host": host})
        if method == "HEAD":
            assert answer.status_code == 403
        else:
            assert code(answer, 403) == "forbidden"
    if path not in OPEN:
        assert closed.request(method, path).status_code == 401
        assert closed.request(method, path, headers={"x-api-key": "sk-two"}).status_code == 401


def test_what_json_clients_send_is_taken(http: httpx.Client) -> None:
    port = urlsplit(str(http.base_url)).port
    for kind in (
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json; charset="utf-8"',
    ):
        answer = http.post(CHAT, json=BODY, headers={"content-type": kind})
        assert answer.status_code == 200, kind
    for host in (
        "localhost",
        f"localhost:{port}",
        "LOCALHOST",
        "[::1]:1",
        "127.0.0.1",
        "localhost.",
    ):
        assert http.post(CHAT, json=BODY, headers={"host": host}).status_code == 200
    same = {"origin": f"http://127.0.0.1:{port}"}  # a page that this server serves itself
    assert http.post(CHAT, json=BODY, headers=same).status_code == 200
    assert http.post(CHAT, json=BODY, headers={"content-encoding": "identity"}).status_code == 200


def test_a_page_teaches_nothing(http: httpx.Client, engine: FakeEngine) -> None:
    said = b'{"messages": [{"role": "user", "content": "Hi"}], "completion": "x", "rating": true, '
    said += b'"adapter": "taught"}'
    before = len(engine.requests)
    for headers in ({"content-type": "text/plain"}, {}, {"content-type": FORM}):
        answer = http.post("/v1/feedback", content=said, headers={"origin": PAGE, **headers})
        assert answer.status_code == 403
        assert http.post("/v1/feedback", content=said, headers=headers).status_code == 415
    assert http.get("/v1/feedback").json()["data"] == []
    assert len(engine.requests) == before


def test_pages_read_nothing_unless_they_are_allowed(
    http: httpx.Client, closed: httpx.Client
) -> None:
    answer = http.get("/v1/models", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers and "vary" not in answer.headers
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    assert code(http.options(CHAT, headers=asks), 405) == "method_not_allowed"
    # Allowed by setting: the preflight needs no key, the request does, and errors can be read.
    asks["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    preflight = closed.options(CHAT, headers=asks)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert (
        preflight.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
    )
    key = {"authorization": "Bearer sk-one"}
    for headers, status in ((key, 200), ({}, 401)):
        answer = closed.post(CHAT, json=BODY, headers={"origin": PAGE, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for origin in ("https://other.example", "null", "https://page.example.evil"):
        assert closed.options(CHAT, headers={**asks, "origin": origin}).status_code == 401
        answer = closed.post(CHAT, json=BODY, headers={"origin": origin, **key})
        assert answer.status_code == 200  # a page cannot know the key, and may not read this
        assert "access-control-allow-origin" not in answer.headers


def test_any_page_may_be_allowed_and_then_change_things_without_a_key() -> None:
    with live(make_app(FakeEngine(), ServerConfig(cors_origins=("*",)))) as url:
        answer = httpx.post(f"{url}{CHAT}", json=BODY, headers={"origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_hosts_are_checked_on_a_loopback_address_or_where_some_are_given() -> None:
    stranger, ours = {"host": "stranger.example"}, {"host": "llm.example:80"}
    for server, strangers_status in (
        (ServerConfig(host="0.0.0.0"), 200),
        (ServerConfig(host="0.0.0.0", allowed_hosts=("llm.example",)), 403),
        (ServerConfig(host="::1", allowed_hosts=("LLM.example",)), 403),
        (ServerConfig(host="localhost", allowed_hosts=("llm.example",)), 403),
    ):
        with live(make_app(FakeEngine(), server)) as url:
            assert httpx.get(f"{url}/health", headers=stranger).status_code == strangers_status
            assert httpx.get(f"{url}/health", headers=ours).status_code == 200


def test_a_name_that_was_pointed_here_is_no_page_of_ours() -> None:
    """The browser takes it for the same origin; on any address of this machine."""
    for allowed, host, status in (
        ((), "evil.example", 403),
        ((), "evil.example:8000", 403),
        ((), "127.0.0.1.evil.example", 403),
        ((), "192.0.2.7:8000", 200),
        ((), "[2001:db8::1]:8000", 200),
        ((), "localhost:8000", 200),
        (("llm.example",), "llm.example:8000", 200),
        (("llm.example",), "evil.example", 403),
    ):
        server = ServerConfig(host="0.0.0.0", allowed_hosts=allowed)
        with live(make_app(FakeEngine(), server)) as url:
            headers = {"host": host, "origin": f"http://{host}"}
            answer = httpx.post(f"{url}{CHAT}", json=BODY, headers=headers)
            assert answer.status_code == status, host


def exchange(url: str, request: str) -> str:
    """The answer to bytes that no client library would send."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request.encode())
        received = b""
        while part := connection.recv(65536):
            received += part
    return received.decode()


def test_targets_in_absolute_form_are_served_and_their_host_counts(http: httpx.Client) -> None:
    url, rest = str(http.base_url), "Connection: close\r\n\r\n"
    for target, host, status in (
        ("http://localhost/health", "localhost", 200),
        ("http://127.0.0.1:80/v1/models?x=1", "rebound.example", 200),
        ("http://rebound.example/health", "localhost", 403),
        ("ftp://localhost/health", "localhost", 404),
        ("http://[", "localhost", 404),
        ("/health", "localhost", 200),
    ):
        answer = exchange(url, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{rest}")
        assert answer.startswith(f"HTTP/1.1 {status} "), (target, answer)
    assert exchange(url, "GET /health HTTP/1.0\r\n\r\n").startswith("HTTP/1.1 200 ")


def test_head_works_wherever_get_does(http: httpx.Client) -> None:
    for path in (
        "/v1/models",
        "/v1/models/demo",
        "/v1/files",
        "/metrics",
        "/health/",
        "/v1/models/",
    ):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == get.headers["content-type"]


def test_allow_names_every_method(http: httpx.Client) -> None:
    for path, allowed in (
        (CHAT, "POST"),
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/feedback", "DELETE, GET, HEAD, POST"),
        ("/v1/adapters/x", "DELETE, GET, HEAD, POST"),
        ("/v1/files/x", "DELETE, GET, HEAD"),
    ):
        answer = http.request("PATCH", path)
        assert code(answer, 405) == "method_not_allowed"
        assert answer.headers["allow"] == allowed and allowed in answer.json()["error"]["message"]


def test_every_answer_has_an_id_and_echoes_the_clients(http: httpx.Client) -> None:
    made = {http.get(path).headers["x-request-id"] for path in ("/health", "/v1/models", "/no")}
    assert len(made) == 3 and all(each.startswith("req_") for each in made)
    for given in ("abc-123", "x" * 128):
        answer = http.post(CHAT, json=BODY, headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given
    for strange in ("x" * 129, "a b", "é"):
        answer = http.get("/health", headers={"x-request-id": strange.encode("latin-1")})
        assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "path",
    [
        *(path for path in NOT_SERVED if path not in ("/v1/responses", "/v1/messages/batches")),
        "/v1/responses/r-1/cancel",
        "/v1/embeddings",
    ],
)
def test_what_others_serve_is_refused_by_name(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={})
    assert code(answer, 404) == "not_supported"
    told = answer.json()["error"]["message"]
    assert "is not supported by this server" in told
    assert next(hint for start, hint in NOT_SERVED.items() if path.startswith(start)) in told


def test_null_characters_are_refused_before_a_database_sees_them(http: httpx.Client) -> None:
    for path in ("/v1/files/%00", "/v1/files?after=%00", "/v1/feedback?user=a%00b"):
        assert code(http.get(path), 400) == "invalid_url"


def test_a_bug_leaves_the_connection_in_a_known_state() -> None:
    engine = FakeEngine(refuse=RuntimeError("secret detail"))
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        answer = http.post(CHAT, json=BODY)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.headers["connection"] == "close" and answer.headers["x-request-id"]
        assert http.get("/health").status_code == 200
