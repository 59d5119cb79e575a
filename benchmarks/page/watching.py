"""The page as its server sees it: the requests of its views, or a browser that shows them.

Routes and intervals are those of the modules in `tandem/api/web`; a test compares them. Invariant:
nothing is asked any more once the context is left.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HAS_BROWSER = CHROMIUM is not None and find_spec("playwright") is not None
ITERATIONS = "v1/stats/iterations?limit=2000"
SHOWN = ("now", "iterations")
"""The views that the browser shows, each in a tab."""


@dataclass(frozen=True, slots=True)
class View:
    """A view asks for its `routes`, then waits for `every_s`."""

    name: str
    every_s: float
    routes: tuple[str, ...]


VIEWS = (
    View("now", 2.0, ("metrics",)),
    View("iterations", 1.0, (ITERATIONS,)),
    View("learning", 3.0, ("v1/adapters",)),
    View("work", 3.0, ("v1/batches?limit=30", "v1/fine_tuning/jobs?limit=30")),
)


@asynccontextmanager
async def unwatched(url: str) -> AsyncIterator[None]:
    """Nobody looks."""
    yield


@asynccontextmanager
async def asked(url: str) -> AsyncIterator[None]:
    """All views are asked for, as if each were open in a tab of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
        watching = [asyncio.create_task(_watch(http, view)) for view in VIEWS]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            ended = await asyncio.gather(*watching, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a view of the page could not be asked for") from error


@asynccontextmanager
async def shown(url: str) -> AsyncIterator[None]:
    """A headless Chromium on this machine shows the page."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        for view in SHOWN:
            page = await browser.new_page()
            await page.goto(f"{url}/#{view}")
        try:
            yield
        finally:
            await browser.close()


async def _watch(http: httpx.AsyncClient, view: View) -> None:
    last = 0
    while True:
        for route in view.routes:
            known = f"&after={last}" if last else ""
            answer = await http.get(route + known if route == ITERATIONS else route)
            answer.raise_for_status()
            if route == ITERATIONS and (data := answer.json()["data"]):
                last = data[-1]["number"]
        await asyncio.sleep(view.every_s)
