"""Runs one system once: wakes its workers, shares the machine as it says, and takes the figures.

Serving always runs a while before the window begins, and to its end. Knows workers, not engines.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.coexecution.figures import Sample, sample, training_window
from benchmarks.coexecution.systems import Sharing, System
from benchmarks.coexecution.workload import Serving, Training
from benchmarks.peers.driver import Worker

# How often memory is looked at.
_LOOK_S = 0.25


@dataclass(frozen=True)
class Times:
    """Seconds of a window, before it, and of a time slice."""

    seconds: float
    settle_s: float
    slice_s: float


def run(
    system: System, workers: dict[str, Worker], times: Times, vocabulary: int, seed: int
) -> Sample:
    """The figures of one round."""
    serve = train = None
    if system.serving is not None:
        alone = times.settle_s + times.seconds if system.training is None else 0.0
        serve = asdict(Serving(vocabulary, seed, alone))
    if system.training is not None:
        training = Training(system.loss, vocabulary, seed, times.seconds, system.training_cores)
        train = asdict(training)
    if system.serving is None or system.training is None or system.serving == system.training:
        name = system.training or system.serving
        assert name is not None
        job = {
            "serve": serve,
            "train": train,
            "settle_s": times.settle_s,
            "scheduling": system.scheduling,
        }
        return _single(workers[name], job, times)
    server, trainer = workers[system.serving], workers[system.training]
    server.begin({"serve": serve})
    time.sleep(times.settle_s)
    trainer.begin({"train": train})
    if system.sharing is Sharing.SLICES:
        rss_bytes = _alternate(server, trainer, times.slice_s)
    else:
        rss_bytes = _wait(trainer, [server, trainer])
    trained = trainer.end()["train"]
    server.interrupt()
    served = server.end()["serve"]
    return sample(training_window(trained), served, trained, rss_bytes)


def _single(worker: Worker, job: dict[str, Any], times: Times) -> Sample:
    worker.begin(job)
    rss_bytes = _wait(worker, [worker])
    answer = worker.end()
    served, trained = answer.get("serve"), answer.get("train")
    if trained:
        window = training_window(trained)
    else:
        began_s = served["began_s"] + times.settle_s
        window = (began_s, began_s + times.seconds)
    return sample(window, served, trained, rss_bytes)


def _wait(worker: Worker, taking_part: list[Worker]) -> int:
    """Until `worker` has an answer; the most resident bytes that were seen meanwhile."""
    most = 0
    while not worker.answers_within(_LOOK_S):
        most = max(most, sum(each.rss_bytes for each in taking_part))
    return most


def _alternate(server: Worker, trainer: Worker, slice_s: float) -> int:
    """One of the two runs at a time, until the trainer has answered; then both go on.

    Returns the most resident bytes that were seen.
    """
    most = 0
    while True:
        server.send(signal.SIGSTOP)
        trainer.send(signal.SIGCONT)
        if trainer.answers_within(slice_s):
            break
        trainer.send(signal.SIGSTOP)
        server.send(signal.SIGCONT)
        most = max(most, server.rss_bytes + trainer.rss_bytes)
        time.sleep(slice_s)
    server.send(signal.SIGCONT)
    return most
