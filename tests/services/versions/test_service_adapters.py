"""Adapters by name and the whitelist of directories, models by id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from tandem.core.errors import InvalidRequest, NotFound
from tandem.services.answering.models import Models
from tandem.services.auth import Caller
from tandem.services.versions.adapters import Adapters


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    (tmp_path / "allowed" / "formal").mkdir(parents=True)
    (tmp_path / "outside" / "secret").mkdir(parents=True)
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside" / "secret")
    return tmp_path


async def test_load_by_relative_absolute_and_no_path(roots: Path) -> None:
    adapters = Adapters(FakeEngine(), [str(roots / "allowed")], {})
    wanted = str(roots / "allowed" / "formal")
    assert (await adapters.load("formal", "formal")).path == wanted
    assert (await adapters.load("formal", wanted)).number == 2
    assert (await adapters.load("formal")).label == "formal@3"
    assert [version.label for version in adapters.listed()] == ["formal@3"]


@pytest.mark.parametrize(
    "path",
    ["../outside/secret", "formal/../../outside/secret", "link", "absent", "nul\0", "{outside}"],
)
async def test_paths_outside_the_roots_are_refused(roots: Path, path: str) -> None:
    engine = FakeEngine()
    adapters = Adapters(engine, [str(roots / "allowed")], {})
    with pytest.raises(InvalidRequest) as caught:
        await adapters.load("x", path.format(outside=roots / "outside" / "secret"))
    assert caught.value.param == "path"
    assert not engine.adapters


async def test_without_roots_only_preloaded_ones_may_be_loaded_again(roots: Path) -> None:
    given = str(roots / "outside" / "secret")
    adapters = Adapters(FakeEngine(), [], {"mine": given})
    assert (await adapters.load("mine")).path == given
    assert (await adapters.load("other", given)).path == given
    with pytest.raises(InvalidRequest, match="--adapter-root"):
        await adapters.load("formal", str(roots / "allowed" / "formal"))


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", ".hidden", "a:b", "x" * 65, "é"])
async def test_names_are_checked(roots: Path, name: str) -> None:
    adapters = Adapters(FakeEngine(), [str(roots / "allowed")], {})
    with pytest.raises(InvalidRequest, match="adapter name") as caught:
        await adapters.load(name, "formal")
    assert caught.value.param == "name"


async def test_unload(roots: Path) -> None:
    engine = FakeEngine()
    adapters = Adapters(engine, [str(roots / "allowed")], {})
    await adapters.load("formal")
    await adapters.unload("formal")
    assert not engine.adapters
    await engine.load_adapter("~candidate/other", "x")
    with pytest.raises(NotFound, match="loaded: none"):
        await adapters.unload("formal")


async def test_models_are_found_by_id_and_unknown_ones_list_the_known(roots: Path) -> None:
    engine = FakeEngine()
    await engine.load_adapter("formal", "x")
    models = Models(engine, "demo", created_s=1)
    assert models.find("demo", Caller()).adapter is None
    assert models.find("demo:formal", Caller()).adapter == engine.adapters["formal"]
    for unknown in ("", "Demo", "demo:", "demo:absent", "formal"):
        with pytest.raises(NotFound, match="demo, demo:formal") as caught:
            models.find(unknown, Caller())
        assert caught.value.code == "model_not_found"
    assert models.fingerprint("base") != models.fingerprint("formal@1")


async def test_the_fingerprint_tells_two_models_of_one_name_apart() -> None:
    found = set()
    for weights in ("0123456789", "9876543210"):
        engine = FakeEngine()
        engine.info = replace(engine.info, weights_hash=weights)
        found.add(Models(engine, "demo", created_s=1).fingerprint("base"))
    assert len(found) == 2


def test_a_reserved_name_cannot_be_given_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="means the model itself"):
        Adapters(FakeEngine(), [], {"base": str(tmp_path)})
