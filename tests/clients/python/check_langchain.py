"""LangChain's chat models for OpenAI (both dialects) and Anthropic."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

ASKED = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(description="its name")
    country: str


def get_weather(city: str) -> str:
    """Tells the weather."""
    return f"Sunny in {city}"


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, url: str, key: str) -> Any:
    rest: dict[str, Any] = {"model": "smollm2", "api_key": key, "max_tokens": 60, "max_retries": 0}
    if request.param == "messages":
        anthropic = pytest.importorskip("langchain_anthropic")
        # Its clients drop a temperature for models that they do not know.
        return anthropic.ChatAnthropic(base_url=url, model_kwargs={"top_k": 1}, **rest)
    return pytest.importorskip("langchain_openai").ChatOpenAI(
        base_url=f"{url}/v1",
        temperature=0,
        stream_usage=True,  # its default, but not for another base_url
        use_responses_api=request.param == "responses",
        **rest,
    )


def test_a_chat_is_the_same_streamed_or_not(model: Any) -> None:
    whole = model.invoke(ASKED)
    assert "Paris" in whole.text
    added = None
    for chunk in model.stream(ASKED):
        added = chunk if added is None else added + chunk
    assert added.text == whole.text
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert added.usage_metadata[name] == whole.usage_metadata[name] > 0
    assert [answer.text for answer in model.batch([ASKED, ASKED])] == [whole.text] * 2


def test_a_tool_is_called_and_its_result_read(model: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    tool = pytest.importorskip("langchain_core.tools").tool(get_weather)
    asked = messages.HumanMessage("What is the weather in Paris?")
    called = model.bind_tools([tool], tool_choice="any").invoke([asked])
    [call, *_] = called.tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    results = [tool.invoke(each) for each in called.tool_calls]
    after = model.bind_tools([tool]).invoke([asked, called, *results])
    assert after.text or after.tool_calls
    assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_of_a_class(model: Any, method: str) -> None:
    city = model.with_structured_output(City, method=method).invoke(ASKED)
    assert isinstance(city, City) and city.country == "France"


def test_errors_are_the_clients_own_classes(url: str, busy_url: str, key: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    rest = {"model": "smollm2", "base_url": f"{url}/v1", "api_key": key, "max_retries": 0}
    for change, kind in (
        ({"api_key": "wrong"}, openai.AuthenticationError),
        ({"model": "other"}, openai.NotFoundError),
        ({"frequency_penalty": 9}, openai.BadRequestError),
        ({"base_url": f"{busy_url}/v1", "model": "demo"}, openai.RateLimitError),
    ):
        with pytest.raises(kind):
            langchain.ChatOpenAI(**rest | change).invoke(ASKED)
    errors = pytest.importorskip("langchain_core.exceptions")
    with pytest.raises(errors.ContextOverflowError):
        langchain.ChatOpenAI(**rest).invoke("word " * 9000)
