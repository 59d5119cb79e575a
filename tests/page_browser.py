"""A browser for the page: Chromium through Playwright, and all that goes wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = (
    "playwright is not installed"
    if find_spec("playwright") is None
    else "" if CHROMIUM else "there is no chromium (apt-get install chromium)"
)  # fmt: skip
"""Why the page cannot be driven here; empty if it can."""
# No traffic of the browser's own, and no sandbox: tests may run as root.
_QUIET = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WAIT_MS = 120_000


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        try:
            yield launched
        finally:
            launched.close()


class Tab:
    """The page in a tab of its own, as its user sees it. `problems` must stay empty: errors of
    scripts, errors and warnings on the console, requests to another host."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.problems: list[str] = []
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda said: self._hear(said.type, said.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("request", lambda sent: self._check(sent.url))
        self.page.goto(url)

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def _check(self, address: str) -> None:
        if not address.startswith((f"{self.url}/", f"blob:{self.url}/")):
            self.problems.append(f"foreign: {address}")

    def view(self, name: str) -> None:
        """Open a view by its tab."""
        self.page.get_by_role("navigation").get_by_role("link", name=name).click()

    def ask(self, question: str) -> Any:
        """Send a question and wait for the end of its answer, which is returned."""
        turns = self.page.locator(".turns > li")
        before = turns.count()
        self.page.get_by_label("Message").fill(question)
        self.page.keyboard.press("Enter")
        answer = turns.nth(before).locator(".answer")
        answer.and_(self.page.locator("[aria-busy=false]")).wait_for()
        return answer

    def close(self) -> None:
        """Close the tab and forget what it kept."""
        self.context.close()
