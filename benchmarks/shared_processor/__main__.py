"""What a processor that others use costs, by how OpenMP's threads wait and how many there are.

    python -m benchmarks shared_processor [--model demo] [--rounds 5] [--patience 600] [--out FILE]

Each setting is an engine in a process of its own. All are loaded first; then they are measured in
turns, `rounds` times: alone (the others sleep), and beside loops that take whole cores. A figure is
the median of its rounds, in milliseconds a token of one answer, and of one prompt. Rounds alone in
which another process computed do not count; for so many that do, the script waits `patience`
seconds. The situations with loops need a machine that is idle otherwise, or say less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.core.sampling import SamplingParams
from tandem.processor import Watch, usable_cores

PROMPT_TOKENS = 512
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Setting:
    """Environment variables and a number of threads; 0: as many as others leave cores."""

    name: str
    environ: dict[str, str]
    threads: int = 0


_SHORT_SPINS = {"GOMP_SPINCOUNT": "200"}
SETTINGS = (
    Setting("torch's own, all cores", {}, usable_cores()),
    Setting("torch's own, 1 thread", {}, 1),
    Setting("passive, all cores", {"OMP_WAIT_POLICY": "PASSIVE"}, usable_cores()),
    Setting("200 spins, all cores", _SHORT_SPINS, usable_cores()),
    Setting("200 spins, 1 thread", _SHORT_SPINS, 1),
    Setting("default", _SHORT_SPINS),
)


Rounds = dict[str, list[tuple[float, float]]]
_QUIET_CORES = 0.1
_WAIT_S = 0.5
_WARM_S = 1.0


class Engine:
    """An engine in a process; answers when it is asked, and sleeps."""

    def __init__(self, setting: Setting, model: str) -> None:
        environ = {name: text for name, text in os.environ.items() if name not in VARIABLES}
        command = [sys.executable, "-m", "benchmarks.shared_processor.__main__", "--worker"]
        self._process = subprocess.Popen(
            [*command, "--model", model, "--threads", str(setting.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ | setting.environ,
        )

    def measure(self, tokens: int) -> tuple[float, float]:
        """Milliseconds a token of an answer, and of a prompt."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(tokens, file=self._process.stdin, flush=True)
        decode, prefill = json.loads(self._process.stdout.readline())
        return decode, prefill

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(model: str, threads: int) -> None:
    """What a worker does: for each number on standard input so many tokens."""
    from tandem.llm import LLM

    # Weights and passes are the same in all settings; nothing is measured while it loads.
    llm = LLM(model, threads=threads, memory_bytes=64 << 20, accustom_s=0.0)
    prompt = tuple(17 + place % 1000 for place in range(PROMPT_TOKENS))
    for line in sys.stdin:
        tokens = int(line)
        times = []
        warm_s = time.perf_counter() + _WARM_S  # it slept, and looks at the processor as it works
        while time.perf_counter() < warm_s:
            llm.generate([prompt[:8]], SamplingParams(max_tokens=4, ignore_eos=True))
        for length, answer in ((8, tokens), (PROMPT_TOKENS, 1)):
            sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            begun_s = time.perf_counter()
            llm.generate([prompt[:length]], sampling)
            times.append(1e3 * (time.perf_counter() - begun_s))
        print(json.dumps([times[0] / tokens, times[1] / PROMPT_TOKENS]), flush=True)


def loop_forever() -> None:
    """Take a whole core."""
    while True:
        pass


def undisturbed(engines: dict[str, Engine], args: argparse.Namespace) -> Rounds:
    """Measures of each engine while no other process took more than a tenth of a core."""
    found: Rounds = {name: [] for name in engines}
    until_s = time.monotonic() + args.patience
    while time.monotonic() < until_s:
        left = [name for name, rounds in found.items() if len(rounds) < args.rounds]
        if not left:
            break
        for name in left:
            watch = Watch()
            time.sleep(_WAIT_S)
            if not _quiet(watch):
                continue
            measured = engines[name].measure(args.tokens)
            if _quiet(watch):
                found[name].append(measured)
    return found


def _quiet(watch: Watch) -> bool:
    share = watch.look()
    return share is not None and share.others + share.stolen < _QUIET_CORES


def beside(count: int, engines: dict[str, Engine], args: argparse.Namespace) -> Rounds:
    """Measures of each engine while so many loops run."""
    loops = [multiprocessing.Process(target=loop_forever, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    found: Rounds = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            found[name].append(engine.measure(args.tokens))
    for loop in loops:
        loop.kill()
        loop.join()
    return found


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Medians: situation -> setting -> milliseconds a token of an answer, and of a prompt."""
    engines = {setting.name: Engine(setting, args.model) for setting in SETTINGS}
    for engine in engines.values():
        engine.measure(4)  # loaded, and warm
    results: dict[str, dict[str, list[float]]] = {}
    for count in args.loops:
        rounds = beside(count, engines, args) if count else undisturbed(engines, args)
        situation = f"beside {count} loops" if count else "alone"
        results[situation] = {
            name: [statistics.median(each[part] for each in rounds[name]) for part in (0, 1)]
            for name in engines
            if rounds[name]
        }
        print(f"\n{situation}: load average {os.getloadavg()[0]:.1f}")
        print(f"{'':24} {'answer':>10} {'prompt':>10}   ms a token")
        for name, (decode, prefill) in results[situation].items():
            print(f"{name:24} {decode:10.3f} {prefill:10.4f}  ({len(rounds[name])})", flush=True)
    for engine in engines.values():
        engine.close()
    return results


def main() -> None:
    """Measure, show, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds, for rounds alone")
    cores = usable_cores()
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 1, cores], help="0: alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.model, args.threads)
        return
    found = measure(args)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
