"""Many streaming clients for a long time, some of which leave early: is everything released?

Needs a Tandem server (its metrics' names are in docs/metrics.md). Knows nothing of its internals.
Invariant: a run is reproducible from its seed, except for the machine's timing. Only the clients'
own disconnects do not count as errors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import psutil

from tandem.bench.events import StreamReader
from tandem.bench.http1 import Exchange, Origin, ProtocolError, connect, fetch
from tandem.bench.slope import Slope, fit_slope
from tandem.bench.workload import WORDS

GIVEN_BACK = (
    "tandem_num_requests_running",
    "tandem_num_requests_waiting",
    "tandem_kv_blocks_used",
    "tandem_check_failures_total",
)


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What a run does."""

    origin: Origin
    model: str
    clients: int = 64
    seconds: float = 60.0
    seed: int = 0
    disconnect_share: float = 0.2  # share of the requests that are dropped after a few events
    max_output_tokens: int = 48
    api_key: str | None = None
    pids: tuple[int, ...] = ()  # server processes whose memory is watched, with children
    warmup_s: float = 15.0  # before memory is watched
    timeout_s: float = 120.0
    settle_s: float = 10.0  # longest wait for the last aborted requests at the end


@dataclass(slots=True)
class SoakReport:
    """Results of a run."""

    requests: int = 0
    completed: int = 0
    disconnected: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    held: dict[str, float] = field(default_factory=dict)  # gauges that did not return to zero
    # bytes per second over all watched processes; None: not watched, or too briefly
    memory: Slope | None = None
    memory_bytes: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """True if no client saw an error and the server holds nothing."""
        return not self.errors and not self.held and self.completed > 0


async def soak(options: SoakOptions) -> SoakReport:
    """Run the clients for `options.seconds`, let the server settle, and check for leaks."""
    report = SoakReport()
    end_s = asyncio.get_running_loop().time() + options.seconds
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch_memory(options, end_s, report))
        for client in range(options.clients):
            rng = Random(f"{options.seed}/{client}")
            group.create_task(_client(options, rng, end_s, report))
    times_s, sizes = watch.result()
    report.memory, report.memory_bytes = fit_slope(times_s, sizes), tuple(sizes)
    try:
        report.held = await _settled(options)
    except (OSError, ProtocolError) as error:
        report.errors[f"/metrics: {type(error).__name__}: {error}"[:120]] += 1
    return report


async def _client(options: SoakOptions, rng: Random, end_s: float, report: SoakReport) -> None:
    clock = asyncio.get_running_loop().time
    while clock() < end_s:
        leave_after = rng.randint(0, 6) if rng.random() < options.disconnect_share else None
        path, body = _random_request(options, rng)
        report.requests += 1
        try:
            async with asyncio.timeout(options.timeout_s):
                left = await _one(options, path, body, leave_after, report)
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            report.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            await asyncio.sleep(0.1)
            continue
        report.disconnected += left
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.2)


async def _one(
    options: SoakOptions, path: str, body: bytes, leave_after: int | None, report: SoakReport
) -> bool:
    """One request. True if this client left before the end. Failures go to `report.errors`.

    Leaving after 0 events means right after the request was sent.
    """
    reader, received = StreamReader(), bytearray()
    leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_body(data: bytes) -> None:
        if exchange.status != 200:
            received.extend(data)
            return
        reader.feed(data, 0.0)
        wanted = leave_after is not None and len(reader.output_s) >= leave_after
        if wanted and not leave.done():
            leave.set_result(None)

    exchange = Exchange(options.origin.request("POST", path, _headers(options), body), on_body)
    await connect(options.origin, exchange)
    if leave_after == 0:
        leave.set_result(None)
    try:
        await asyncio.wait({exchange.done, leave}, return_when=asyncio.FIRST_COMPLETED)
        if not exchange.done.done():
            return True
        exchange.done.result()
    finally:
        exchange.close()
    if exchange.status != 200:
        report.errors[f"http {exchange.status}: {bytes(received[:100])!r}"] += 1
    elif reader.error is not None:
        report.errors[f"stream: {reader.error}"[:120]] += 1
    elif not reader.ended:
        report.errors["the stream ended without [DONE]"] += 1
    else:
        report.completed += 1
    return False


def _random_request(options: SoakOptions, rng: Random) -> tuple[str, bytes]:
    """A chat or completion with random words, length, sampling, stop strings and choices."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    fields: dict[str, Any] = {
        "model": options.model,
        "stream": True,
        "max_tokens": rng.randint(1, options.max_output_tokens),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "seed": rng.randrange(1 << 30),
    }
    if rng.random() < 0.2:
        fields["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        fields["stop"] = rng.sample(WORDS, 2)
    if rng.random() < 0.2:
        fields["presence_penalty"] = 0.5
    if rng.random() < 0.7:
        fields["messages"] = [{"role": "user", "content": words}]
        return "/v1/chat/completions", msgspec.json.encode(fields)
    fields["prompt"] = words
    return "/v1/completions", msgspec.json.encode(fields)


async def _watch_memory(
    options: SoakOptions, end_s: float, report: SoakReport
) -> tuple[list[float], list[int]]:
    """Resident bytes of the watched processes, once per second after the warm-up. Ends with an
    error in the report once one of them is gone."""
    clock = asyncio.get_running_loop().time
    times_s: list[float] = []
    sizes: list[int] = []
    if not options.pids:
        return times_s, sizes
    await asyncio.sleep(min(options.warmup_s, max(0.0, end_s - clock())))
    while clock() < end_s:
        try:
            size = resident_bytes(options.pids)
        except psutil.NoSuchProcess as error:
            report.errors[f"process {error.pid} is gone: its memory is not watched"] += 1
            break
        times_s.append(clock())
        sizes.append(size)
        await asyncio.sleep(1.0)
    return times_s, sizes


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident bytes of the processes and all their live children. Raises `psutil.NoSuchProcess` if
    one of `pids` is gone."""
    family: dict[int, psutil.Process] = {}
    for pid in pids:
        process = psutil.Process(pid)
        family |= {each.pid: each for each in (process, *process.children(recursive=True))}
    total = 0
    for each in family.values():
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def _settled(options: SoakOptions) -> dict[str, float]:
    """What the server still holds after the last request. Waits up to `settle_s` for zero. Raises
    `OSError` or `ProtocolError` if the server is away."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + options.settle_s
    while True:
        held = await _held(options)
        if not held or clock() > deadline_s:
            return held
        await asyncio.sleep(0.2)


async def _held(options: SoakOptions) -> dict[str, float]:
    status, body = await fetch(options.origin, "GET", "/metrics", _headers(options))
    if status != 200:
        return {f"/metrics answered HTTP {status}": 1.0}
    values = parse_metrics(body.decode())
    found = {name: values.get(name) for name in GIVEN_BACK}
    missing = {f"{name} is not reported": 1.0 for name, value in found.items() if value is None}
    return missing | {name: value for name, value in found.items() if value}


def as_lines(report: SoakReport) -> list[str]:
    """The report for people."""
    lines = [
        f"{report.requests} requests: {report.completed} complete,"
        f" {report.disconnected} dropped by their clients, {report.errors.total()} failed"
    ]
    for error, count in report.errors.most_common(10):
        lines.append(f"{count} x {error}")
    for name, value in report.held.items():
        lines.append(f"not given back: {name} = {value:g}")
    if report.memory is not None:
        hourly = [rate * 3600 / 2**20 for rate in report.memory.interval]
        lines.append(
            f"resident memory: {hourly[0]:+.2f} MiB/h (95% between {hourly[1]:+.2f} and"
            f" {hourly[2]:+.2f}), {report.memory_bytes[-1] / 2**20:.0f} MiB at the end"
        )
    return lines


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format: the sum over labels of every sample name."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def _headers(options: SoakOptions) -> dict[str, str]:
    key = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    return {"Content-Type": "application/json", **key}
