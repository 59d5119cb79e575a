"""What a job trains: its examples, read from files and encoded for steps, and its trainer's start.

Knows no trainer but by name. Invariant: what is wrong with a file ends the job with a `JobFailed`
that names the file, and the line where it is one line's fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.core.errors import InvalidRequest
from tandem.core.learning import JobRecord, Sample
from tandem.core.training import TrainerSpec
from tandem.core.version import INTERNAL
from tandem.services.files import gone
from tandem.services.jobs.data import BadLine, line_of, parse_examples
from tandem.services.jobs.method import Method, read_method
from tandem.services.jobs.tools import JobFailed
from tandem.services.jobs.validation import OF_VALIDATION
from tandem.services.learning.references import Model
from tandem.services.learning.settings import (
    BASE,
    LearningSettings,
    reference_number,
    resolve_settings,
)
from tandem.services.learning.steps import StepMaker, StepShape
from tandem.services.learning.tools import LearningTools
from tandem.store import adapters, files


@dataclass(frozen=True, slots=True)
class Examples:
    """What a job trains on and measures on (`held`), and how; nothing of it is "auto"."""

    method: Method
    training: Sequence[Sample]
    held: Sequence[Sample]

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch."""
        return self.method.epoch_steps(len(self.training))

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        assert self.method.n_epochs
        return self.method.n_epochs * self.epoch_steps

    def epoch(self, seed: int, epoch: int) -> list[list[str]]:
        """Samples of each step of an epoch."""
        return self.method.epoch(self.training, seed, epoch)


async def trainer_spec(
    job: JobRecord, trainer: str, method: Method, course: LearningTools
) -> TrainerSpec:
    """A trainer at the job's last commit, or where the job begins."""
    settings = await settings_of(job, course)
    source, resume = job.checkpoint_path, bool(job.checkpoint_path)
    if not resume:
        start = job.start_version or 0
        version = await course.store.read(adapters.version, job.adapter, start)
        source = version.path if version is not None else ""
    return TrainerSpec(
        name=trainer,
        lora=replace(settings.lora, seed=job.seed),
        optimizer=replace(method.optimizer, total_steps=job.total_steps),
        source=source,
        resume=resume,
        own_schedule=True,
    )


async def reference_of(job: JobRecord, method: Method, course: LearningTools) -> Model:
    """What the job's steps are measured against; a version is loaded under a name of the job's own,
    as learning lets go of its own references. Raises `JobFailed`."""
    number = reference_number(method.reference or BASE)
    if not number:
        return course.references.base
    version = await course.store.read(adapters.version, job.adapter, number)
    if version is None:
        raise JobFailed(f"the reference, version {number}, is gone", "reference_gone", "method")
    loaded = await course.publisher.load_reference(version, reference_name(job))
    return course.references.version(loaded.name, loaded)


def reference_name(job: JobRecord) -> str:
    """The engine's name of it."""
    return f"{INTERNAL}reference-of/{job.job_id}"


async def settings_of(job: JobRecord, course: LearningTools) -> LearningSettings:
    """Those of the job's adapter."""
    record = await course.store.read(adapters.find, job.adapter)
    own = {} if record is None else record.settings
    return resolve_settings(course.defaults, own)


async def read_examples(job: JobRecord, course: LearningTools) -> Examples:
    """Raises `JobFailed`, and `OSError` while the disk fails."""
    _, method = read_method(job.method, None, await settings_of(job, course), kept=True)
    training = await _read(job, job.training_file, "training_file", method, course)
    held: list[Sample] = []
    if job.validation_file:
        held = await _read(job, job.validation_file, "validation_file", method, course)
        held = [replace(s, sample_id=f"{OF_VALIDATION}{s.sample_id}") for s in held]
    decided = method.decided(len(training))
    if job.total_steps:  # what was decided first stays, also where "auto" means something else now
        epochs = job.total_steps // decided.epoch_steps(len(training))
        decided = replace(decided, n_epochs=epochs)
    return Examples(decided, training, held)


def require_steps(examples: Examples) -> None:
    """Raises `JobFailed` where a step would be of dislikes alone, or none after warm-up."""
    liked, steps = sum(sample.desirable for sample in examples.training), examples.epoch_steps
    if liked < steps:
        raise JobFailed(
            f"{liked} of {len(examples.training)} labels are true, and an epoch has {steps} steps: "
            "a step of dislikes alone says only what an answer should not be, and a model trained "
            "on that breaks; add answers that are liked, or raise batch_size",
            "invalid_training_file",
            "training_file",
        )
    warmup_steps = examples.method.optimizer.warmup_steps
    if warmup_steps >= examples.total_steps:
        raise JobFailed(
            f"warmup_steps is {warmup_steps}, and the job has {examples.total_steps} steps",
            "invalid_hyperparameters",
            "method",
        )


async def admit(
    job: JobRecord, trainer: str, examples: Examples, reference: Model, course: LearningTools
) -> StepMaker:
    """Encode them for steps of `trainer`. Raises `JobFailed`; the engine was ready."""
    settings = await settings_of(job, course)
    rows = course.client.info.recording_tokens
    shape = StepShape(trainer, reference, settings.micro_batch_samples, rows)
    maker = StepMaker(course.encoder(settings), course.references, shape)
    problems = await asyncio.to_thread(maker.admit, [*examples.training, *examples.held])
    for sample_id, problem in problems.items():
        param = "validation_file" if sample_id.startswith(OF_VALIDATION) else "training_file"
        line = line_of(sample_id.removeprefix(OF_VALIDATION))
        raise JobFailed(str(BadLine(line, problem)), "invalid_training_file", param)
    return maker


async def _read(
    job: JobRecord, file_id: str, param: str, method: Method, course: LearningTools
) -> list[Sample]:
    file = await course.store.read(files.find, file_id)
    if file is None or file.tenant != job.tenant:
        raise JobFailed(f"the file {file_id} does not exist", "file_not_found", param)
    try:
        raw = await asyncio.to_thread(Path(file.path).read_bytes)
        return await asyncio.to_thread(parse_examples, raw, method.kind, job.adapter)
    except FileNotFoundError as error:
        raise JobFailed(str(gone(file)), "file_not_found", param) from error
    except InvalidRequest as error:
        raise JobFailed(f"{file_id}: {error}", "invalid_training_file", param) from error
