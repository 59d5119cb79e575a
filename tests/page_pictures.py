"""Makes the pictures of docs/page: each view, on a desk and on a phone, in light and in dark.

`python tests/page_pictures.py [FOLDER]`: serves the demo model, teaches it a little, runs a batch
and a job, and takes the pictures with Chromium.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from engine_serving import live_engine
from page_browser import Tab, browser
from tandem.config import resolve

SETTINGS = {
    "model": {"model": "demo"},
    "cache": {"memory_bytes": 64 << 20},
    "learning": {"version_wait_s": 2.0, "held_out": 0.3},
}
SIZES = {"desktop": {"width": 1200, "height": 780}, "phone": {"width": 390, "height": 780}}
TOPICS = ("tea", "bread", "the moon", "whales", "rain", "bees", "gold", "chess", "cats", "apples",
          "snow", "Rome", "salt", "the sun", "horses", "trees")  # fmt: skip
COLOURS = 96


def main() -> None:
    """Teach, then look."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/page")
    folder.mkdir(parents=True, exist_ok=True)
    with live_engine(resolve(SETTINGS, environ={})) as url, browser() as chromium:
        with httpx.Client(base_url=f"{url}/v1", timeout=60.0) as http:
            _teach(http)
            _work(http)
        for size, viewport in SIZES.items():
            for scheme in ("light", "dark"):
                options: dict[str, Any] = {"viewport": viewport, "color_scheme": scheme}
                if size == "phone":
                    options |= {"is_mobile": True, "has_touch": True}
                tab = Tab(chromium, url, **options)
                for name in ("chat", "learning", "now", "iterations", "work"):
                    _take(tab, name, folder / f"{name}-{size}-{scheme}.png")
                if tab.problems:
                    print(f"{size}, {scheme}: {tab.problems}")
                tab.close()


def _teach(http: httpx.Client) -> None:
    """Versions of `formal`: of two answers of the model's own, the longer one is better."""
    for turn, form in enumerate(("Tell me about {}.", "What is {}?", "Describe {}.")):
        for topic in TOPICS:
            messages = [{"role": "user", "content": form.format(topic)}]
            body = {"model": "demo", "messages": messages, "n": 2, "temperature": 1.0}
            answer = http.post("/chat/completions", json=body).json()
            texts = [choice["message"]["content"].strip() for choice in answer["choices"]]
            if texts[0] == texts[1]:
                continue
            better = int(len(texts[1]) > len(texts[0]))
            said = {"completion_id": answer["id"], "adapter": "formal", "conversation": topic,
                    "preference": {"chosen": better, "rejected": 1 - better}}  # fmt: skip
            http.post("/feedback", json=said).raise_for_status()
        _wait(lambda wanted=turn + 1: len(_versions(http)) >= wanted)


def _versions(http: httpx.Client) -> list[Any]:
    return list(http.get("/adapters/formal/versions").json()["data"])


def _work(http: httpx.Client) -> None:
    """A batch that is done, and a job that has begun."""
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {**line, "custom_id": str(place), "body": {
            "model": "demo", "messages": [{"role": "user", "content": f"Tell me about {topic}."}]}}
        for place, topic in enumerate(TOPICS)
    ]  # fmt: skip
    batch = http.post("/batches", json={"input_file_id": _upload(http, lines, "batch"),
        "endpoint": "/v1/chat/completions", "completion_window": "24h"}).json()  # fmt: skip
    _wait(lambda: http.get(f"/batches/{batch['id']}").json()["status"] == "completed")
    examples = [
        {"messages": [{"role": "user", "content": f"What is {topic}?"},
                      {"role": "assistant", "content": f"{topic} is a fine thing."}]}
        for topic in TOPICS
    ]  # fmt: skip
    job = {"model": "demo", "training_file": _upload(http, examples, "fine-tune"),
           "suffix": "brief", "method": {"type": "supervised", "supervised":
           {"hyperparameters": {"n_epochs": 50}}}}  # fmt: skip
    made = http.post("/fine_tuning/jobs", json=job).json()
    _wait(lambda: http.get(f"/fine_tuning/jobs/{made['id']}").json()["step"] > 20)
    http.post(f"/fine_tuning/jobs/{made['id']}/pause").raise_for_status()


def _upload(http: httpx.Client, rows: list[dict[str, Any]], purpose: str) -> str:
    content = "\n".join(json.dumps(row) for row in rows).encode()
    answer = http.post("/files", files={"file": ("x.jsonl", content)}, data={"purpose": purpose})
    return str(answer.json()["id"])


def _wait(condition: Any, limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)


def _take(tab: Tab, name: str, path: Path) -> None:
    page = tab.page
    if name == "chat":
        _talk(tab)
    else:
        page.goto(f"{tab.url}/#{name}")
        time.sleep(5.0)
    page.screenshot(path=path)
    image = Image.open(path).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _talk(tab: Tab) -> None:
    """Ask the base, rate, and let the answer of the newest version stand beside it."""
    page = tab.page
    page.get_by_label("Model").select_option("")
    answer = tab.ask("Tell me about tea.")
    answer.get_by_label("Good answer").click()
    page.get_by_label("Adapter", exact=True).fill("formal")
    page.get_by_role("button", name="Use it").click()
    answer.locator(".outcome").wait_for()
    page.get_by_title("Get two answers and choose").click()
    for topic in TOPICS:
        answer = tab.ask(f"What do you think of {topic}?")
        better = answer.get_by_role("button", name="This one is better")
        if better.count():
            better.first.click()
            answer.locator(".outcome").wait_for()
            break
    time.sleep(1.0)


if __name__ == "__main__":
    main()
