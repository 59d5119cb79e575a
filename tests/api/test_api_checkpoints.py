"""Checkpoints of fine-tuning jobs as models, with the openai client over the scripted engine."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob
from test_api_learning import server, upload

from fake_engine import FakeEngine, Script
from patience import eventually
from tandem.config import SchedulingConfig, ServerConfig
from tandem.core.request import Request
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import TrainingStep
from tandem.core.version import INTERNAL

TURNS: list[Any] = [{"role": "user", "content": "Hello"}]
KEYS = """
[[keys]]
key = "sk-owner"
train = ["*"]
[[keys]]
key = "sk-narrow"
serve = ["base"]
train = ["*"]
[[keys]]
key = "sk-other"
train = ["*"]
admin = true
"""


def client_of(http: httpx.Client, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=str(http.base_url), api_key=key, max_retries=0)


@contextmanager
def served(tmp_path: Path, engine: FakeEngine | None = None) -> Iterator[openai.OpenAI]:
    with server(tmp_path, engine) as http, client_of(http) as client:
        yield client


def begun(client: openai.OpenAI, epochs: int = 2, model: str = "demo") -> FineTuningJob:
    """A job with one step an epoch."""
    turns = [*TURNS, {"role": "assistant", "content": "Good day."}]
    hyperparameters: Any = {"n_epochs": epochs, "batch_size": 4}
    return client.fine_tuning.jobs.create(
        model=model,
        training_file=upload(client, [{"messages": turns} for _ in range(4)]),
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )


def stuck_after_a_step() -> FakeEngine:
    """An engine whose second step takes an hour."""

    def judge(step: TrainingStep) -> None:
        engine.step_s = 3600.0

    engine = FakeEngine(judge=judge)
    return engine


def trained(client: openai.OpenAI, epochs: int = 2, model: str = "demo") -> FineTuningJob:
    job = begun(client, epochs, model)

    def ended() -> FineTuningJob | None:
        found = client.fine_tuning.jobs.retrieve(job.id)
        return found if found.finished_at else None

    job = eventually(ended)
    assert job.status == "succeeded", job.error
    return job


def names_of(client: openai.OpenAI, job: FineTuningJob) -> list[str]:
    """Names of the job's checkpoints, the oldest first."""
    found = client.fine_tuning.jobs.checkpoints.list(job.id).data
    return [checkpoint.fine_tuned_model_checkpoint for checkpoint in found[::-1]]


def writer_of(client: openai.OpenAI, model: str) -> tuple[str, str]:
    """What wrote an answer of `model`, and what OpenAI calls its fingerprint."""
    raw = client.chat.completions.with_raw_response.create(model=model, messages=TURNS)
    answer = raw.parse()
    assert answer.model == model and answer.system_fingerprint is not None
    return raw.headers["x-tandem-adapter"], answer.system_fingerprint


def token_of(client: openai.OpenAI, model: str) -> None:
    client.chat.completions.create(model=model, messages=TURNS, max_tokens=1)


def require_unknown(client: openai.OpenAI, model: str) -> None:
    for look in (lambda: writer_of(client, model), lambda: client.models.retrieve(model)):
        with pytest.raises(openai.NotFoundError) as refused:
            look()
        assert refused.value.code == "model_not_found" and refused.value.param == "model"


def test_a_checkpoint_answers_under_its_own_name(tmp_path: Path) -> None:
    engine = FakeEngine()
    with served(tmp_path, engine) as client:
        job = trained(client)
        first, last = names_of(client, job)
        assert first == f"{job.fine_tuned_model}:{job.id[-8:]}:ckpt-step-1"
        label = first.removeprefix("demo:")
        writer, fingerprint = writer_of(client, first)
        assert writer == label and fingerprint.endswith(label)
        assert len({writer_of(client, model) for model in (first, last, "demo")}) == 3
        assert writer_of(client, str(job.fine_tuned_model))[0] == f"{label.split(':')[0]}@1"
        with client.chat.completions.with_streaming_response.create(
            model=first, messages=TURNS, stream=True
        ) as stream:
            assert (
                stream.headers["x-tandem-adapter"] == label and "[DONE]" in stream.read().decode()
            )
        asked = engine.adapters[engine.requests[-1].adapter or ""]
        assert asked.path.endswith(f"jobs/{job.id}/1")
        plain = client.completions.create(model=first, prompt="Once", max_tokens=2)
        assert plain.model == first
        tokenize = str(client.base_url).replace("/v1/", "/tokenize")
        for model, status in ((first, 200), (f"{first}0", 404)):
            assert httpx.post(tokenize, json={"model": model, "prompt": "a"}).status_code == status


def test_a_checkpoint_is_looked_up_but_not_listed(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        job = trained(client)
        [name, _] = names_of(client, job)
        writer_of(client, name)
        found = client.models.retrieve(name).to_dict()
        assert found["id"] == name and found["adapter"] == name.removeprefix("demo:")
        assert [model.id for model in client.models.list()] == ["demo", job.fine_tuned_model]
        listed: Any = client.get("/adapters", cast_to=object)
        assert [adapter["id"] for adapter in listed["data"]] == [
            str(job.fine_tuned_model).removeprefix("demo:")
        ]
        require_unknown(client, f"{name}0")


def test_two_jobs_on_one_adapter_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    with served(tmp_path, engine) as client:
        one = trained(client)
        other = trained(client, model=str(one.fine_tuned_model))
        names = [names_of(client, job)[0] for job in (one, other)]
        assert [name.rpartition(":")[2] for name in names] == ["ckpt-step-1"] * 2
        for name, job in zip(names, (one, other), strict=True):
            assert writer_of(client, name)[0] == name.removeprefix("demo:")
            asked = engine.adapters[engine.requests[-1].adapter or ""]
            assert asked.path.endswith(f"jobs/{job.id}/1")


def test_it_answers_while_its_job_runs_and_after_that_is_cancelled(tmp_path: Path) -> None:
    engine = stuck_after_a_step()
    with served(tmp_path, engine) as client:
        job = begun(client)
        [name] = eventually(lambda: names_of(client, job))
        assert writer_of(client, name)[0] == name.removeprefix("demo:")
        assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
        assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        assert writer_of(client, name)[0] == name.removeprefix("demo:")


def test_neither_feedback_nor_a_job_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        job = trained(client)
        name, adapter = names_of(client, job)[0], str(job.fine_tuned_model).removeprefix("demo:")
        answer = client.chat.completions.create(model=name, messages=TURNS)
        said = {"completion_id": answer.id, "rating": True}
        with pytest.raises(openai.BadRequestError, match="checkpoints do not learn: say which"):
            client.post("/feedback", body=said, cast_to=object)
        with pytest.raises(openai.BadRequestError, match=f"send adapter='{adapter}'"):
            client.post("/feedback", body={**said, "model": name}, cast_to=object)
        kept: Any = client.post("/feedback", body={**said, "adapter": adapter}, cast_to=object)
        assert kept["model"] == f"demo:{adapter}" and kept["version"] == name.removeprefix("demo:")
        with pytest.raises(openai.BadRequestError, match="not at a checkpoint") as refused:
            begun(client, model=name)
        assert refused.value.param == "model"


def test_a_checkpoint_survives_a_restart_until_its_files_are_gone(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        job = trained(client)
        names = names_of(client, job)
    engine = FakeEngine()
    with served(tmp_path, engine) as client:
        assert not any(name.startswith(INTERNAL) for name in engine.adapters)
        assert [writer_of(client, name)[0] for name in names] == [
            name.removeprefix("demo:") for name in names
        ]
        shutil.rmtree(tmp_path / "state" / "jobs" / job.id / "1")
        require_unknown(client, names[0])
        writer_of(client, names[1])


def test_an_adapters_checkpoints_are_deleted_with_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    with served(tmp_path, engine) as client:
        job, kept = trained(client), trained(client)
        names, left = names_of(client, job), names_of(client, kept)
        for name in (*names, *left):
            writer_of(client, name)
        adapter = str(job.fine_tuned_model).removeprefix("demo:")
        client.delete(f"/adapters/{adapter}", cast_to=object)
        for name in names:
            require_unknown(client, name)
        assert names_of(client, job) == []
        assert not list((tmp_path / "state" / "jobs" / job.id).iterdir())
        assert not any(adapter in name for name in engine.adapters)
        for name in left:
            writer_of(client, name)


def test_checkpoints_of_a_job_that_made_no_version_are_deleted_too(tmp_path: Path) -> None:
    engine = stuck_after_a_step()
    with served(tmp_path, engine) as client:
        job = begun(client)
        [name] = eventually(lambda: names_of(client, job))
        client.fine_tuning.jobs.cancel(job.id)
        writer_of(client, name)
        adapter = name.split(":")[1]
        assert (tmp_path / "state" / "jobs" / job.id / "1").is_dir()
        client.delete(f"/adapters/{adapter}", cast_to=object)
        require_unknown(client, name)
        assert names_of(client, job) == [] and not engine.adapters
        assert not (tmp_path / "state" / "jobs" / job.id / "1").exists()
        with pytest.raises(openai.NotFoundError, match=adapter):
            client.delete(f"/adapters/{adapter}", cast_to=object)


def test_only_a_key_of_the_jobs_owner_that_may_use_the_adapter_asks(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    with (
        server(tmp_path, server=ServerConfig(api_key_file=str(file))) as http,
        ExitStack() as open_,
    ):
        owner, narrow, other = (
            open_.enter_context(client_of(http, f"sk-{name}"))
            for name in ("owner", "narrow", "other")
        )
        name = names_of(owner, trained(owner))[0]
        writer_of(owner, name)
        require_unknown(other, name)  # although it may use the adapter, and manage it
        told = []
        for model in (name, f"{name}7"):
            with pytest.raises(openai.NotFoundError) as refused:
                writer_of(other, model)
            told.append(refused.value.message.replace(model, ""))
        assert told[0] == told[1]
        with pytest.raises(openai.NotFoundError) as unknown:
            other.delete("/adapters/nobody", cast_to=object)
        assert INTERNAL not in unknown.value.message
        mine = names_of(narrow, trained(narrow))[0]
        with pytest.raises(openai.PermissionDeniedError):
            writer_of(narrow, mine)


def test_objectives_are_those_of_its_adapter(tmp_path: Path) -> None:
    engine, own = FakeEngine(), SchedulingConfig(adapter_slos={"formal": "0.5:0.05"})
    with server(tmp_path, engine, scheduling=own) as http, client_of(http) as client:
        http.post("/adapters/formal", json={"settings": {"gate": "always"}}).raise_for_status()
        writer_of(client, names_of(client, trained(client, model="demo:formal"))[0])
        assert engine.requests[-1].slo == Slo(0.5, 0.05)


def test_a_fifth_checkpoint_waits_for_one_of_four_that_answer(tmp_path: Path) -> None:
    read_on = threading.Event()

    def play(request: Request, index: int) -> Script:
        waits = request.work_class is not WorkClass.OFFLINE  # what the gate reads comes at once
        return Script(tokens=(10,) * 200, gate=read_on if waits else None, free=1)

    with served(tmp_path, FakeEngine(play=play)) as client:
        *busy, fifth = names_of(client, trained(client, epochs=5))
        streams = [
            client.chat.completions.create(model=name, messages=TURNS, stream=True) for name in busy
        ]
        for stream in streams:
            next(stream)
        with pytest.raises(openai.RateLimitError) as refused:
            token_of(client, fifth)
        assert refused.value.code == "overloaded" and refused.value.response.headers["retry-after"]
        for name in (busy[1], "demo"):
            token_of(client, name)
        metrics = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
        assert re.search(r'tandem_slo_choices_total\{.*"shed".*\} 1\.0', metrics)
        streams[0].close()

        def answered() -> bool:
            try:
                token_of(client, fifth)
            except openai.RateLimitError:
                return False
            return True

        eventually(answered)
        read_on.set()
        for stream in streams[1:]:
            next(stream)
            stream.close()
