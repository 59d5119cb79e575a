"""What is missing, twice, wrong or left over, as a server and the directory of its store say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx

from benchmarks.kills.server import Server

NAMES = ("one", "two", "three")
OPEN = ("validating_files", "queued", "running")


def check_answers(server: Server) -> list[str]:
    """Adapters that do not answer with their current version, however long one waits."""
    wrong: dict[str, str] = {}

    def all_right() -> bool:
        wrong.clear()
        for name in NAMES:
            found = httpx.get(f"{server.url}/v1/adapters/{name}/versions", timeout=60)
            versions = found.json()["data"] if found.status_code == 200 else []
            current = max((v["version"] for v in versions if v["current"]), default=0)
            body = {"model": f"demo:{name}", "prompt": "Hi", "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            label = answer.headers.get("x-tandem-adapter", "none")
            if current and label != f"{name}@{current}":
                wrong[name] = f"{name} answers as {label}, and {current} is current"
        return not wrong

    try:
        server.until(all_right, "adapters do not answer with their current versions")
    except TimeoutError as error:
        return [str(error), *wrong.values()]
    return []


def check_store(server: Server, acknowledged: set[str], jobs: list[str]) -> list[str]:
    """What of the `acknowledged` feedback and the `jobs` is missing, twice or unfinished;
    directories that nobody names."""
    wrong: list[str] = []

    def settled() -> bool:
        states = [server.get(f"/v1/adapters/{name}")["learning"]["samples"] for name in NAMES]
        open_jobs = [server.get(f"/v1/fine_tuning/jobs/{job}")["status"] for job in jobs]
        learned = all({*each.get("train", {})} <= {"consumed", "refused"} for each in states)
        return learned and not any(status in OPEN for status in open_jobs)

    server.until(settled, "samples or jobs are left over")
    found: list[dict[str, Any]] = []
    while page := _page(server, found):
        found += page
    counted = Counter(each["id"] for each in found)
    wrong += [f"{key} is there {n} times" for key, n in counted.items() if n != 1]
    wrong += [f"{key} was acknowledged and is gone" for key in acknowledged - {*counted}]
    wrong += [f"{e['id']} has {len(e['samples'])} samples" for e in found if len(e["samples"]) != 1]
    for job in jobs:
        ended = server.get(f"/v1/fine_tuning/jobs/{job}")
        if ended["status"] != "succeeded":
            wrong.append(f"{job} {ended['status']}: {ended['error']}")
    return wrong + check_directories(server)


def check_directories(server: Server) -> list[str]:
    """Directories of versions and checkpoints that no row names."""
    wrong: list[str] = []
    for folder in sorted((server.state / "adapters").glob("*")):
        data = server.get(f"/v1/adapters/{folder.name}/versions")["data"]
        known = {str(version["version"]) for version in data}
        wrong += [f"stray {path}" for path in folder.iterdir() if path.name not in known]
    steps = (server.state / "jobs").glob("*/*")
    return wrong + [f"stray {path}" for path in steps if not path.name.isdigit()]


def _page(server: Server, found: list[dict[str, Any]]) -> Any:
    after = {"after": found[-1]["id"]} if found else {}
    return server.get("/v1/feedback", limit=100, **after)["data"]
