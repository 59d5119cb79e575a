"""Hostile grammars sent to a live server while another request decodes.

Knows HTTP only.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from benchmarks.structured.schemas import HOSTILE

LONG_TOKENS = 400


async def hostile(url: str, model: str) -> dict[str, Any]:
    """How each hostile grammar was answered and in how many seconds, the longest pause of an
    ordinary stream beside them, and the longest of the same stream alone."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
        warm = {"model": model, "prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}
        (await http.post("/v1/completions", json=warm)).raise_for_status()
        alone_s = await _longest_pause(http, model)
        ended = asyncio.Event()
        stream = asyncio.create_task(_longest_pause(http, model, ended))
        rows: dict[str, Any] = {}
        for name, asked in HOSTILE.items():
            body = {"model": model, "prompt": "a", "max_tokens": 20, "structured_outputs": asked}
            began_s = time.monotonic()
            answer = await http.post("/v1/completions", json=body)
            error = answer.json().get("error") or {}
            rows[name] = {
                "status": answer.status_code,
                "seconds": time.monotonic() - began_s,
                "param": error.get("param"),
                "message": str(error.get("message", ""))[:160],
                "beside": not stream.done(),
            }
        ended.set()
        return {"rows": rows, "alone_s": alone_s, "beside_s": await stream}


async def _longest_pause(
    http: httpx.AsyncClient, model: str, ended: asyncio.Event | None = None
) -> float:
    """Seconds between two events of an ordinary stream at most, after the first; with `ended`
    streams follow each other until it is set."""
    body = {"model": model, "prompt": "Once", "stream": True, "ignore_eos": True,
            "max_tokens": LONG_TOKENS, "temperature": 0}  # fmt: skip
    longest_s = 0.0
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            last_s = None
            async for line in stream.aiter_lines():
                now_s = time.monotonic()
                if line.startswith("data: {"):
                    if last_s is not None:
                        longest_s = max(longest_s, now_s - last_s)
                    last_s = now_s
                if ended is not None and ended.is_set():
                    return longest_s
        if ended is None:
            return longest_s
