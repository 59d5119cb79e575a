"""Measures a loaded model on this machine and fits a profile: what its passes, layers and updates
take.

Joins the executor's probe and a loop's. Serves nobody meanwhile. Invariant: a profile names the
versions and the machine that it was measured with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata

from tandem import __version__
from tandem.build import join_loop
from tandem.config import Settings
from tandem.core.ports import Executor
from tandem.engine.probe import LoopProbe
from tandem.estimators.batching import fit_batching
from tandem.estimators.calibrate import fit
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Profile


def measure(
    executor: Executor, settings: Settings, seconds: float, on_progress: Callable[[float], None]
) -> Profile:
    """The profile of a loaded model."""
    profiler = Profiler(executor, settings)
    profiler.run(seconds, on_progress)
    return profiler.profile()


class Profiler:
    """Measures a loaded model, at one time or at several, for one profile."""

    def __init__(self, executor: Executor, settings: Settings) -> None:
        from tandem.executor.ceilings import measure_ceilings
        from tandem.executor.profile import ProbeLimits, Prober

        self._info, scheduling = executor.info, settings.scheduling
        limits = ProbeLimits(
            scheduling.max_batch_tokens, scheduling.max_sequences, settings.learning.rank
        )
        self._ceilings = measure_ceilings(self._info.device, self._info.dtype)
        loop = join_loop(settings, executor, rates=Rates.guess_for(self._info))
        self._loop_probe = LoopProbe(loop)
        self._prober = Prober(executor, limits, self._loop_probe.turn)
        self._seconds, self._times = 0.0, 0

    def run(self, seconds: float, on_progress: Callable[[float], None]) -> None:
        """Measure for about so many seconds more, while nobody is served."""
        self._prober.run(seconds, on_progress)
        self._seconds += seconds
        self._times += 1

    def profile(self) -> Profile:
        """Of all that was measured."""
        info, samples = self._info, self._prober.samples
        found = fit(samples, Rates.guess_for(info))
        times = f" at {self._times} times" if self._times > 1 else ""
        return Profile(
            info=info,
            rates=found.rates,
            ceilings=self._ceilings,
            source=f"measured in {self._seconds:.0f} s{times}: {len(samples.passes)} passes, "
            f"{len(samples.slices)} slices, {len(samples.updates)} updates",
            errors=found.errors,
            noise=found.noise,
            caches=found.caches,
            repeat=found.repeat,
            host_s=self._loop_probe.host_s,
            kept_alone=found.kept_alone,
            kept_beside=found.kept_beside,
            versions={
                "tandem": __version__,
                "torch": metadata.version("torch"),
                "transformers": metadata.version("transformers"),
                "measured": time.strftime("%Y-%m-%d"),
            },
            threads=info.threads,
            batching=fit_batching(found.rates, self._loop_probe.host_s),
        )
