"""The served OpenAPI document tells of every route, and no request that it describes fails."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.api.entrance import UPLOADS
from tandem.api.specification import BODIES, WITHOUT_BODY, specification
from tandem.config import ServerConfig

EXAMPLES = 2000 if os.environ.get("TANDEM_TEST_FULL") else 100


def test_every_route_is_told_with_its_body() -> None:
    app = make_app(FakeEngine())
    told = specification(app)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posts == BODIES.keys() | WITHOUT_BODY | UPLOADS
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in route.methods or ():
            operation = told["paths"][path][method.lower()]
            assert operation["summary"] and operation["responses"]
            assert ("requestBody" in operation) is (
                method == "POST" and route.path not in WITHOUT_BODY
            )
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
    assert references <= told["components"]["schemas"].keys()
    identifiers = [each["operationId"] for path in told["paths"].values() for each in path.values()]
    assert len(identifiers) == len(set(identifiers))


def test_it_is_served_to_those_with_a_key() -> None:
    with live(make_app(FakeEngine(), ServerConfig(api_keys=("sk-a",)))) as url:
        assert httpx.get(f"{url}/openapi.json").status_code == 401
        served = httpx.get(f"{url}/openapi.json", headers={"x-api-key": "sk-a"}).json()
        assert served["openapi"].startswith("3.") and "/v1/feedback" in served["paths"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["formal", "base", "demo:formal", "\x00", "edit", "\ud800"])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ABOUT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "completion": "Hello",
    "adapter": "formal",
    "rating": True,
}


@pytest.fixture(scope="module")
def url() -> Any:
    with live(make_app(FakeEngine())) as url:
        yield url


def test_no_feedback_makes_the_server_fail(url: str) -> None:
    fields = BODIES["/v1/feedback"].model_fields
    special = {"chosen": JSON, "rejected": JSON, "type": JSON, "text": JSON, "seconds": JSON}
    changes = st.dictionaries(
        st.sampled_from([*sorted(fields), "prompt_cache_key"]),
        JSON | st.fixed_dictionaries({}, optional=special),
        min_size=1,
        max_size=3,
    )

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(changes)
    def try_it(change: dict[str, Any]) -> None:
        content = json.dumps({**ABOUT, **change}).encode()
        answer = http.post("/v1/feedback", content=content, headers=headers)
        assert answer.status_code in (202, 400, 404, 409), answer.text
        if answer.status_code != 202:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]

    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url) as http:
        try_it()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused_wherever_they_stand(
    url: str, number: str
) -> None:
    headers = {"content-type": "application/json"}
    chat = '{"model": "demo", "messages": [{"role": "user", "content": "x"}], "%s": %s}'
    feedback = '{"prompt": "p", "completion": "x", "adapter": "a", "rating": 1, "%s": %s}'
    for route, body in (("/v1/chat/completions", chat), ("/v1/feedback", feedback)):
        for value, param in ((number, ""), (f"[1, {number}]", "[1]"), (f'{{"a": {number}}}', ".a")):
            content = body % ("prompt_cache_key", value)
            answer = httpx.post(f"{url}{route}", content=content, headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == f"prompt_cache_key{param}"
    settings_body = f'{{"settings": {{"learning_rate": {number}}}}}'
    answer = httpx.post(f"{url}/v1/adapters/a", content=settings_body, headers=headers)
    assert answer.json()["error"]["param"] == "settings.learning_rate"


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
@pytest.mark.parametrize("key", ["", "sk-a", "sk-limited"])
def test_schemathesis_finds_no_failure(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nkey = "sk-limited"\nserve = ["formal*"]\ntrain = ["poems"]\n')
    limited = key == "sk-limited"
    server = ServerConfig(
        api_keys=(key,) if key and not limited else (), api_key_file=str(file) if limited else ""
    )
    with live(make_app(FakeEngine(), server)) as url:
        header = ["--header", f"Authorization: Bearer {key}"] if key else []
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{url}/openapi.json",
            *header,
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance",
            "--max-examples",
            "250",
            "--request-timeout",
            "30",
            "--generation-database",
            "none",
        ]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-8000:]
