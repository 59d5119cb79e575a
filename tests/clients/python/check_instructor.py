"""instructor: objects of pydantic's classes, by each way in which it asks for them."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field, field_validator

ASKED: Any = [{"role": "user", "content": "Anna is 30 years old."}]
ASKS: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "max_tokens": 80}


class Person(BaseModel):
    """A person."""

    name: str
    age: int = Field(ge=0, le=120)
    kind: Literal["child", "adult"]


class Nobody(Person):
    """Whose name is never right."""

    @field_validator("name")
    @classmethod
    def refuse(cls, name: str) -> str:
        raise ValueError(f"{name} is wrong")


@pytest.fixture
def instructor() -> Any:
    return pytest.importorskip("instructor")


@pytest.fixture
def client(url: str, key: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_answer_is_of_a_class(instructor: Any, client: openai.OpenAI, mode: str) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    person, answer = patched.create_with_completion(
        **ASKS, response_model=Person, max_retries=0, temperature=0
    )
    assert isinstance(person, Person) and person.age == 30
    assert answer.usage.total_tokens > 0


def test_objects_come_in_pieces(instructor: Any, client: openai.OpenAI) -> None:
    patched = instructor.from_openai(client)
    parts = list(patched.create_partial(**ASKS, response_model=Person, temperature=0))
    assert len(parts) > 2 and parts[-1].age == 30 and parts[0].age is None


def test_what_does_not_validate_is_asked_for_again(instructor: Any, client: openai.OpenAI) -> None:
    asked: list[int] = []
    patched = instructor.from_openai(client)
    patched.on("completion:kwargs", lambda **kwargs: asked.append(len(kwargs["messages"])))
    errors = pytest.importorskip("instructor.core")
    with pytest.raises(errors.InstructorError):
        patched.create(**ASKS, response_model=Nobody, max_retries=1, temperature=0)
    assert len(asked) == 2 and asked[1] > asked[0] == 1  # with what was wrong


def test_anthropics_client_too(instructor: Any, url: str, key: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        patched = instructor.from_anthropic(client)
        person = patched.create(**ASKS, response_model=Person, max_retries=0)
    assert isinstance(person, Person)
