"""Flags and docs/settings.md follow the configuration."""

from __future__ import annotations

import re
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tandem.cli
from tandem.cli.flags import HELP, all_settings, parse_size, settings_from, shown_size
from tandem.config import Settings
from tandem.core.errors import InvalidRequest
from tandem.scheduling.registry import known_policies

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"
NOTHING = {setting.parameter: None for setting in all_settings()}


def test_every_setting_has_a_help_text_and_a_flag_of_its_own() -> None:
    settings = list(all_settings())
    assert {setting.path for setting in settings} == set(HELP)
    assert len({setting.flag for setting in settings}) == len(settings)


def test_every_setting_is_documented_with_its_flag_and_default() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE
    )
    documented = {path: (flag.strip("`"), default, text) for path, flag, default, text in rows}
    assert documented == {
        setting.path: (
            "MODEL (argument)" if setting.path == "model.model" else setting.flag,
            setting.default_text,
            HELP[setting.path],
        )
        for setting in all_settings()
    }


def test_the_policy_flag_names_every_policy() -> None:
    assert [name for name in known_policies() if name not in HELP["scheduling.policy"]] == []


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    assert settings_from(NOTHING, {}) == Settings()


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('[server]\nport = 1\nhost = "file"\nmax_n = 3\n')
    environ = {"TANDEM_SERVER_PORT": "2", "TANDEM_SERVER_HOST": "environment"}
    settings = settings_from({**NOTHING, "server_port": 4}, environ, file)
    assert (settings.server.port, settings.server.host, settings.server.max_n) == (
        4,
        "environment",
        3,
    )


def test_adapters_are_named() -> None:
    settings = settings_from({**NOTHING, "adapters_preload": ["a=./x", "b=./y=z"]}, {})
    assert settings.adapters.preload == {"a": "./x", "b": "./y=z"}
    with pytest.raises(InvalidRequest, match="NAME=VALUE"):
        settings_from({**NOTHING, "adapters_preload": ["./x"]}, {})


def test_a_number_out_of_range_names_flag_and_setting() -> None:
    with pytest.raises(InvalidRequest, match=r"^--kv-memory: cache\.memory_bytes: .* >= 0"):
        settings_from({**NOTHING, "cache_memory_bytes": -1}, {})
    # Another than the flag was wrong, so the flag is not named.
    for wrong in ({"TANDEM_SERVER_DRAIN_S": "-5"}, {"TANDEM_SERVER_DRAIN_S": "x"}):
        with pytest.raises(InvalidRequest, match=r"^TANDEM_SERVER_DRAIN_S: server\.drain_s: "):
            settings_from({**NOTHING, "server_port": 4}, wrong)
    with pytest.raises(InvalidRequest, match=r"^model\.model: "):
        settings_from({**NOTHING, "model_model": 3}, {})


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("8MiB", 8 << 20), ("4g", 4 << 30), ("1 KB", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("size", [0, 1000, 1024, 8 << 20, 3 << 30, 1 << 40, (1 << 30) + 1])
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    assert parse_size(shown_size(size)) == size
    assert len(shown_size(size)) < 8 or size % 1024


def test_the_help_of_serve_has_examples_groups_and_sizes() -> None:
    text = CliRunner(env={"COLUMNS": "120"}).invoke(tandem.cli.app, ["serve", "--help"]).output
    assert "Examples" in text and "tandem serve demo --port 8001" in text
    assert "512MiB" in text and "536870912" not in text
    for group in ("Model", "Cache", "Scheduling", "Adapters", "Store", "Learning", "Server"):
        assert f"─ {group} ─" in text


@pytest.mark.parametrize("text", ["", "4 gigs", "-1", "1.5GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


def test_the_command_line_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    shows: list[object] = []

    def serve_forever(settings: Settings, console: object, show: object) -> int:
        seen.append(settings)
        shows.append(show)
        return 3

    module = type(sys)("tandem.cli.serve")
    monkeypatch.setattr(module, "serve_forever", serve_forever, raising=False)
    monkeypatch.setitem(sys.modules, "tandem.cli.serve", module)
    arguments = ["serve", "my/model", "--port", "9", "--kv-memory", "2GiB", "--no-prefix-caching"]
    arguments += ["--adapter", "a=x", "--adapter", "b=y", "--api-key", "k", "--drain", "2.5"]
    result = CliRunner().invoke(tandem.cli.app, arguments)
    assert result.exit_code == 3, result.output
    (settings,) = seen
    assert settings.model.model == "my/model"
    assert settings.server.port == 9 and settings.server.drain_s == 2.5
    assert settings.cache.memory_bytes == 2 << 30 and not settings.cache.prefix_caching
    assert settings.adapters.preload == {"a": "x", "b": "y"}
    assert settings.server.api_keys == ("k",)
    assert CliRunner().invoke(tandem.cli.app, ["serve", "--open"]).exit_code == 3
    assert shows == [None, webbrowser.open]


def test_help_and_chat_start_without_heavy_imports() -> None:
    code = (
        "import sys; import tandem.cli, tandem.cli.chat; "
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_script_shows_version_and_help() -> None:
    runner = CliRunner()
    assert "tandem" in runner.invoke(tandem.cli.app, ["--version"]).output
    text = runner.invoke(tandem.cli.app, ["--help"]).output
    for command in ("serve", "chat", "doctor", "bench"):
        assert command in text
