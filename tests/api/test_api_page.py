"""The page's files: open, complete, from this host alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import tandem
from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import ServerConfig

FOLDER = Path(tandem.__file__).parent / "api" / "web"
OWN = sorted(path for path in FOLDER.iterdir() if not re.search(r"uplot", path.name))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = make_app(FakeEngine(), ServerConfig(api_keys=("sk-one",)))
    with live(app) as url, httpx.Client(base_url=url) as http:
        yield http


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200 and "Tandem" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"
    named = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
    assert named and all(name.startswith("page/") for name in named)
    for name in named:
        assert http.get(f"/{name}").status_code == 200, name


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_file_is_served_as_what_it_is(http: httpx.Client, path: Path) -> None:
    answer = http.get(f"/page/{path.name}")
    # this server needs a key, which the page is told
    wanted = path.read_bytes().replace(b'data-key="none"', b'data-key="required"')
    assert answer.content == wanted
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html",
             ".svg": "image/svg+xml", ".txt": "text/plain"}  # fmt: skip
    assert answer.headers["content-type"].split(";")[0] == kinds[path.suffix]
    again = http.get(f"/page/{path.name}", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_no_other_file_and_no_other_route_is_open(http: httpx.Client) -> None:
    assert http.get("/page/nothing.js").status_code == 404
    for path in ("/page/..%2fpage.py", "/page/../page.py", "/page"):
        assert http.get(path).status_code in (401, 404)
    for path in ("/v1/key", "/v1/stats/iterations", "/metrics", "/v1/adapters"):
        assert http.get(path).status_code == 401
    assert http.post("/", json={}).status_code == 405


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_our_files_name_no_other_host_and_run_no_text_as_code(path: Path) -> None:
    text = path.read_text()
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
    assert not hosts
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text)
    assert not re.search(r"\son\w+=\"|style=\"", text), "what the page's own policy forbids"


def test_modules_import_what_exists() -> None:
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (FOLDER / name).exists(), f"{path.name} imports {name}"
