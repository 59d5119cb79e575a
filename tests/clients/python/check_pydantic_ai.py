"""pydantic-ai: agents with a tool and with an output of a class, in both of OpenAI's dialects."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

ASKED = "What is the capital of France?"
SETTINGS: Any = {"temperature": 0, "max_tokens": 80}


class City(BaseModel):
    name: str = Field(description="its name")
    country: str


@pytest.fixture
def ai() -> Any:
    return pytest.importorskip("pydantic_ai")


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(ai: Any, request: pytest.FixtureRequest, url: str, key: str) -> Any:
    return model_of(request.param, url, key)


def model_of(kind: str, url: str, key: str, name: str = "smollm2") -> Any:
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    client = pytest.importorskip("openai").AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0
    )
    return vars(models)[kind](name, provider=providers.OpenAIProvider(openai_client=client))


async def test_an_agent_answers_streamed_or_not(ai: Any, model: Any) -> None:
    agent = ai.Agent(model, model_settings=SETTINGS)
    whole = await agent.run(ASKED)
    assert "Paris" in whole.output
    async with agent.run_stream(ASKED) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 2 and "".join(pieces) == whole.output
        assert stream.usage.output_tokens == whole.usage.output_tokens > 0


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
async def test_an_answer_is_of_a_class(ai: Any, model: Any, output: str) -> None:
    kind = vars(ai)[output]
    agent = ai.Agent(model, model_settings=SETTINGS, output_type=kind(City))
    assert (await agent.run(ASKED)).output.country == "France"


async def test_an_agent_uses_its_tool(ai: Any, model: Any) -> None:
    """So small a model seldom stops: it may ask once."""
    asked = []

    async def once(context: Any, definition: Any) -> Any:
        return None if asked else definition

    def get_weather(city: str) -> str:
        """Tells the weather."""
        asked.append(city)
        return f"Sunny in {city}"

    agent = ai.Agent(
        model,
        model_settings=SETTINGS,
        output_type=City,
        tools=[ai.Tool(get_weather, prepare=once)],
    )
    result = await agent.run("What is the weather in Paris?")
    assert asked == ["Paris"] and isinstance(result.output, City)
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds[:3] == ["user-prompt", "tool-call", "tool-return"]


async def test_errors_tell_the_status(ai: Any, url: str, busy_url: str, key: str) -> None:
    for model, status in (
        (model_of("OpenAIChatModel", url, "wrong"), 401),
        (model_of("OpenAIChatModel", url, key, "other"), 404),
        (model_of("OpenAIChatModel", busy_url, key, "demo"), 429),
    ):
        with pytest.raises(ai.exceptions.ModelHTTPError) as raised:
            await ai.Agent(model).run(ASKED)
        assert raised.value.status_code == status
    with pytest.raises(ai.exceptions.ModelHTTPError) as raised:
        agent = ai.Agent(model_of("OpenAIChatModel", url, key))
        await agent.run(ASKED, model_settings={"temperature": 9})
    assert raised.value.status_code == 400 and raised.value.body["param"] == "temperature"
