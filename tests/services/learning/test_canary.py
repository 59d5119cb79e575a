"""The canary set: what can be used, and errors that name the line before anything is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fake_engine import INFO, FakeEngine
from learning_world import world
from serving import DEMO_MODEL, demo_tokenizer, make_app
from tandem.config import LearningConfig
from tandem.core.errors import InvalidRequest
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.learning.answers import Answers
from tandem.services.learning.canary import Canary, CanarySet, read_canary
from tandem.services.learning.encode import Encoder, Limits
from tandem.services.learning.references import References

GOOD = '{"messages": [{"role": "user", "content": "Hi"}], "answer": "Hello."}'


def written(tmp_path: Path, *lines: str, start: bytes = b"") -> str:
    file = tmp_path / "canary.jsonl"
    file.write_bytes(start + "\n".join(lines).encode())
    return str(file)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": [{"content": "Hi"}]}', "a message has no 'role'"),
        ('{"messages": [{"role": "user"}]}', "a message has no 'content'"),
        ('{"messages": [{}]}', "a message has no 'role'"),
        ('{"messages": [{"role": "user", "content": 1}]}', "Expected `str`"),
        ('{"messages": []}', "give either 'messages' or 'prompt'"),
        ('{"prompt": "x", "messages": [{"role": "user", "content": "Hi"}]}', "give either"),
        ('{"prompt": "x", "more": 1}', "unknown field `more`"),
        ('{"prompt": "x", "answer": "y", "compared": false}', "its 'answer' is not 'compared'"),
        ("nonsense", "JSON is malformed"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, GOOD, "", line)
    with pytest.raises(InvalidRequest) as error:
        read_canary(path)
    told = str(error.value)
    assert told.startswith(f"learning.canary_file: cannot use {path}: line 3: ") and problem in told


def test_a_file_that_is_away_or_empty_is_refused(tmp_path: Path) -> None:
    unread = tmp_path / "unread.jsonl"
    unread.write_text('{"prompt": "x", "compared": false}')
    for path in (str(tmp_path / "absent"), written(tmp_path, "", " "), str(unread)):
        with pytest.raises(InvalidRequest, match=r"learning\.canary_file: cannot use"):
            read_canary(path)


def test_a_byte_order_mark_is_nothing(tmp_path: Path) -> None:
    plain = read_canary(written(tmp_path, GOOD))
    assert read_canary(written(tmp_path, GOOD, start=b"\xef\xbb\xbf")) == plain


def test_the_shipped_set_is_plain_for_a_model_without_a_chat_template() -> None:
    chats, plain = read_canary(""), read_canary("", chats=False)
    assert [line.messages[0]["content"] for line in chats.lines] == [
        line.prompt for line in plain.lines
    ]
    assert chats.digest != plain.digest  # the base model's answers are others
    assert not any(line.messages for line in plain.lines)
    assert [line.compared for line in plain.lines] == [line.compared for line in chats.lines]


async def check(
    canary: CanarySet, tmp_path: Path, context: int = 256, tokenizer: Tokenizer | None = None
) -> None:
    engine = FakeEngine(info=replace(INFO, max_model_len=context))
    async with world(tmp_path, engine=engine) as made:
        references = References(engine, made.store)
        checked = Canary(canary, engine, references, Answers(engine), tmp_path)
        checked.check(Encoder(tokenizer or demo_tokenizer(), (2,), Limits(64, context)))


@pytest.mark.parametrize("line", ['{{"prompt": "{0}"}}', GOOD.replace("Hello.", "{0}")])
async def test_what_is_longer_than_the_context_is_named(tmp_path: Path, line: str) -> None:
    long = line.replace("{{", "{").replace("}}", "}").replace("{0}", "word " * 300)
    canary = read_canary(written(tmp_path, GOOD, long))
    with pytest.raises(InvalidRequest, match=r"line 2: a prompt of .* more than the model's") as e:
        await check(canary, tmp_path / "state")
    assert str(e.value).startswith("learning.canary_file: cannot use")
    await check(canary, tmp_path / "long", context=1000)


async def test_the_cache_bounds_a_prompt_too(tmp_path: Path) -> None:
    canary = read_canary(written(tmp_path, '{"prompt": "%s"}' % ("word " * 1000)))
    with pytest.raises(InvalidRequest, match="context, 1024"):
        await check(canary, tmp_path / "state", context=10_000)


async def test_what_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    strict = Tokenizer.load(DEMO_MODEL)
    strict._backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    canary = read_canary(written(tmp_path, '{"prompt": "Once"}', GOOD))
    with pytest.raises(InvalidRequest, match=r"line 2: .*template refuses .*must alternate"):
        await check(canary, tmp_path / "state", tokenizer=strict)


@pytest.mark.parametrize("on", [True, False])
async def test_a_server_starts_only_with_a_file_that_it_can_use(tmp_path: Path, on: bool) -> None:
    path = written(tmp_path, f'{{"prompt": "{"word " * 300}"}}')
    app = make_app(FakeEngine(), learning=LearningConfig(enabled=on, canary_file=path))
    if on:
        with pytest.raises(InvalidRequest, match="line 1: a prompt of 303 tokens"):
            async with app.router.lifespan_context(app):
                pass
    else:
        async with app.router.lifespan_context(app):
            pass


async def test_the_shipped_set_keeps_no_model_from_being_served() -> None:
    engine = FakeEngine(info=replace(INFO, max_model_len=16))
    app = make_app(engine)
    async with app.router.lifespan_context(app):
        pass


async def test_the_base_diverges_from_itself_by_nothing_whatever_answers_were_written(
    tmp_path: Path,
) -> None:
    """They are trusted for what a candidate loses, and say nothing of how likely its own are."""
    unlikely = GOOD.replace("Hello.", "zx qv " * 30)
    canary, engine = read_canary(written(tmp_path, unlikely)), FakeEngine()
    async with world(tmp_path / "state", engine=engine) as made:
        references = References(engine, made.store)
        measured = Canary(canary, engine, references, Answers(engine), tmp_path)
        encoder = Encoder(demo_tokenizer(), (2,), Limits(512, 1024))
        found = (await measured.measure(references.base, encoder)).measures
        assert found.quality_drop == 0.0 and abs(found.divergence) < 1e-9
