"""The page in a real browser: chat, teach, see the version that comes of it, roll back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine_serving import live_engine
from fake_engine import FakeEngine
from page_browser import MISSING, Tab, browser
from serving import live, make_app
from tandem.config import ServerConfig, resolve

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LEARNING = {
    "model": {"model": "demo"},
    "cache": {"memory_bytes": 64 << 20},
    # At this rate, few samples change every answer; the gate is not what is looked at.
    "learning": {"version_wait_s": 8.0, "gate": "always", "held_out": 0.0, "learning_rate": 5e-3},
}
TOPICS = ("tea", "bread", "the moon", "whales", "rain", "bees", "gold", "chess", "cats", "apples")
FORMS = ("Tell me about {}.", "What is {}?", "Describe {}.", "Say something about {}.")
KEYS = """
[[keys]]
key = "sk-guest"
name = "guest"
serve = ["base"]
[[keys]]
key = "sk-boss"
train = ["*"]
admin = true
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browser() as launched:
        yield launched


def test_forty_thumbs_make_a_version_that_is_shown_beside_the_old_one(chromium, tmp_path) -> None:
    with live_engine(resolve(LEARNING, environ={})) as url:
        tab = Tab(chromium, url, viewport={"width": 1280, "height": 900})
        rate_forty(tab)
        compare(tab)
        prefer_and_correct(tab)
        roll_back_and_erase(tab)
        trace = look_at_the_rest(tab, tmp_path)
        assert tab.problems == []
        tab.close()
    kinds = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"decode", "prefill", "forward", "backward"} <= kinds


def rate_forty(tab: Tab) -> None:
    """A taste that an adapter can learn: short answers are good."""
    questions = [form.format(topic) for form in FORMS for topic in TOPICS]
    lengths: list[int] = []
    for place, question in enumerate(questions):
        answer = tab.ask(question)
        lengths.append(len(answer.locator(".text").inner_text()))
        short = lengths[-1] <= median(lengths)
        answer.get_by_label("Good answer" if short else "Bad answer").click()
        if place == 0:  # the model itself does not learn
            tab.page.get_by_label("Adapter", exact=True).fill("mine")
            tab.page.get_by_role("button", name="Use it").click()
        answer.locator(".outcome").wait_for()


def compare(tab: Tab) -> None:
    """The newest rated answer is asked again by itself, others when a button is pressed."""
    tab.page.locator(".outcome", has_text="learned from this").first.wait_for()
    again = tab.page.get_by_role("button", name="Answer it again with mine@")
    again.first.wait_for()
    for _ in range(min(6, again.count())):
        again.first.click()
    compared = tab.page.locator(".comparison")
    compared.first.wait_for()
    for each in compared.locator(".caret").all():
        each.wait_for(state="detached")
    halves = [each.locator(".half .text").all_inner_texts() for each in compared.all()]
    assert all(before and after for before, after in halves)
    assert any(before != after for before, after in halves)
    labels = compared.first.locator(".badge").all_inner_texts()
    assert labels[0] == "base" and labels[1].startswith("mine@")


def prefer_and_correct(tab: Tab) -> None:
    two = tab.page.get_by_title("Get two answers and choose")
    two.click()
    for topic in TOPICS:
        answer = tab.ask(f"What do you think of {topic}?")
        assert answer.locator(".choice").count() == 2
        better = answer.get_by_role("button", name="This one is better")
        if better.count():  # of two equal answers, none is better
            better.first.click()
            break
    answer.locator(".preferred").get_by_text("better", exact=True).wait_for()
    two.click()
    answer = tab.ask("What is glass?")
    answer.get_by_label("This is how it should be").click()
    answer.get_by_label("How the answer should be").fill("Glass is molten sand.")
    answer.get_by_role("button", name="Teach it").click()
    answer.locator(".outcome").wait_for()


def roll_back_and_erase(tab: Tab) -> None:
    page = tab.page
    tab.view("Learning")
    page.locator(".versions tbody tr").first.wait_for()
    assert page.locator(".chart canvas").count() == 4
    page.get_by_role("button", name="Roll back …").click()
    page.get_by_label("Answer again with").select_option("0")
    page.get_by_role("button", name="Roll back", exact=True).click()
    page.locator(".answers").get_by_text("base", exact=True).wait_for()
    page.locator(".history").get_by_text("rolled back").first.wait_for()
    page.get_by_role("button", name="Erase feedback …").click()
    page.get_by_role("button", name="Erase", exact=True).click()
    page.get_by_text("are erased").wait_for()


def look_at_the_rest(tab: Tab, folder: Path) -> dict[str, Any]:
    """The other views have something to show; the trace that one of them gives away."""
    page = tab.page
    tab.view("Now")
    page.locator(".tile", has_text="Running").wait_for()
    page.locator(".parts-legend", has_text="weights").wait_for()
    tab.view("Iterations")
    page.locator("tbody tr").first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download trace").click()
    download.value.save_as(folder / "trace.json")
    tab.view("Batches & jobs")
    page.get_by_text("No batches").wait_for()
    found: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return found


def test_a_key_is_asked_for_and_sees_only_what_it_may(chromium, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    engine = FakeEngine()
    with live(make_app(engine, ServerConfig(api_key_file=str(file)))) as url:
        tab = Tab(chromium, url)
        page = tab.page
        page.get_by_label("API key").fill("sk-guest")
        page.get_by_role("button", name="Continue").click()
        answer = tab.ask("Hello")
        answer.get_by_label("Copy").wait_for()
        assert page.get_by_text("guest", exact=True).is_visible()
        assert not page.get_by_label("Good answer").count()
        assert page.get_by_label("Model").locator("option").all_inner_texts() == ["demo"]
        page.reload()
        page.get_by_label("Message").wait_for()  # the tab knows the key
        page.get_by_label("Sign out").click()
        page.get_by_label("API key").fill("sk-boss")
        page.keyboard.press("Enter")
        tab.ask("Hello").get_by_label("Good answer").wait_for()
        assert tab.problems == []
        page.get_by_label("Sign out").click()
        page.get_by_label("API key").fill("sk-wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("incorrect API key").wait_for()
        tab.close()


def test_what_goes_wrong_is_said_in_the_servers_words(chromium) -> None:
    engine = FakeEngine()
    with live(make_app(engine)) as url:
        tab = Tab(chromium, url, viewport={"width": 390, "height": 780})
        tab.page.get_by_label("Message").wait_for()
        engine.die()
        tab.ask("Hello").get_by_role("alert").wait_for()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        tab.close()
