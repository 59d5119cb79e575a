"""litellm, as a library and with the names of its providers that lead to this server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "a city"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str
    country: str


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
        yield pytest.importorskip("litellm")


@pytest.fixture(params=["openai/", "hosted_vllm/", "anthropic/"])
def asks(request: pytest.FixtureRequest, url: str, key: str) -> dict[str, Any]:
    base = url if request.param == "anthropic/" else f"{url}/v1"
    model = f"{request.param}smollm2"
    return {"model": model, "api_base": base, "api_key": key, "temperature": 0, "num_retries": 0}


def test_a_chat_is_the_same_streamed_or_not(litellm: Any, asks: dict[str, Any]) -> None:
    whole = litellm.completion(messages=ASKED, max_tokens=40, **asks)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    asks["stream_options"] = {"include_usage": True}
    chunks = list(litellm.completion(messages=ASKED, max_tokens=40, stream=True, **asks))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    told = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert told[-1].completion_tokens == whole.usage.completion_tokens > 1
    assert told[-1].prompt_tokens == whole.usage.prompt_tokens


def test_a_tool_is_called_and_its_result_read(litellm: Any, asks: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=WEATHER, tools=[TOOL], tool_choice="required", max_tokens=60, **asks
    )
    message = answer.choices[0].message
    [call, *_] = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}
    turns = [*WEATHER, {**message.model_dump(), "tool_calls": [call.model_dump()]}, result]
    after = litellm.completion(messages=turns, tools=[TOOL], max_tokens=40, **asks)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens
    free = litellm.completion(messages=WEATHER, tools=[TOOL], max_tokens=60, **asks)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls


@pytest.mark.parametrize("asks", ["openai/", "hosted_vllm/"], indirect=True)
def test_an_answer_is_of_a_class(litellm: Any, asks: dict[str, Any]) -> None:
    answer = litellm.completion(messages=ASKED, response_format=City, max_tokens=60, **asks)
    assert City.model_validate_json(answer.choices[0].message.content).country == "France"


def test_completions_and_responses(litellm: Any, url: str, key: str) -> None:
    rest = {"api_base": f"{url}/v1", "api_key": key, "temperature": 0}
    text = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="The capital of France is", max_tokens=5,
        **rest,
    )  # fmt: skip
    assert text.choices[0].text.startswith(" Paris")
    response = litellm.responses(
        model="openai/smollm2", input=ASKED[0]["content"], max_output_tokens=40, **rest
    )
    assert "Paris" in response.output[0].content[0].text and response.status == "completed"


def test_errors_are_its_own_classes(litellm: Any, url: str, busy_url: str, key: str) -> None:
    asks = {"model": "openai/smollm2", "api_base": f"{url}/v1", "api_key": key, "messages": ASKED}
    long = [{"role": "user", "content": "word " * 9000}]
    for change, kind in (
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
        ({"temperature": 9}, litellm.BadRequestError),
        ({"messages": long}, litellm.ContextWindowExceededError),
        ({"api_base": f"{busy_url}/v1", "model": "openai/demo"}, litellm.RateLimitError),
    ):
        with pytest.raises(kind):
            litellm.completion(**asks | change, num_retries=0, max_retries=0)
