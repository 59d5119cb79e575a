"""Precedence and errors of the configuration."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tandem.cli.checks import unknown_variables
from tandem.config import CHOICES, Settings, resolve
from tandem.core.errors import InvalidRequest


def test_flags_beat_the_environment_beats_the_file(tmp_path):
    path = tmp_path / "tandem.toml"
    path.write_text("[cache]\nblock_size = 8\nmemory_bytes = 1\n[server]\nport = 1\n")
    environ = {"TANDEM_CACHE_MEMORY_BYTES": "2", "TANDEM_SERVER_PORT": "2", "OTHER": "x"}
    settings = resolve({"server": {"port": 3, "host": None}}, environ=environ, toml_path=path)
    assert (settings.cache.block_size, settings.cache.memory_bytes) == (8, 2)
    assert (settings.server.port, settings.server.host) == (3, "127.0.0.1")


def test_the_environment_carries_tuples_tables_and_booleans():
    environ = {
        "TANDEM_ADAPTERS_ROOTS": "/a, /b",
        "TANDEM_ADAPTERS_PRELOAD": "x=/a/x,y=/b/y",
        "TANDEM_CACHE_PREFIX_CACHING": "off",
    }
    settings = resolve(environ=environ)
    assert settings.adapters.roots == ("/a", "/b")
    assert settings.adapters.preload == {"x": "/a/x", "y": "/b/y"}
    assert settings.cache.prefix_caching is False


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("[nowhere]\na = 1", "unknown section"),
        ("[cache]\nsize = 1", "unknown setting cache.size"),
        ("cache = 3", "must be a table"),
        ("[cache", "cannot read"),
        ('[cache]\nblock_size = "many"', "block_size"),
    ],
)
def test_mistakes_are_named(tmp_path, text, needle):
    path = tmp_path / "tandem.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=needle):
        resolve(toml_path=path)


NUMBERS = [
    pytest.param(section.name, item.name, type(default), id=f"{section.name}.{item.name}")
    for section in fields(Settings)
    for item in fields(getattr(Settings(), section.name))
    if type(default := getattr(getattr(Settings(), section.name), item.name)) in (int, float)
]


@pytest.mark.parametrize(("section", "name", "kind"), NUMBERS)
def test_every_number_has_a_range(section, name, kind):
    outside = [-1, 10**30, -(10**30)] + ([float("nan"), float("inf")] if kind is float else [])
    for value in outside:
        with pytest.raises(InvalidRequest, match=f"^{section}.{name}: expected") as error:
            resolve({section: {name: value}})
        assert error.value.param == f"{section}.{name}"
    variable = f"TANDEM_{section}_{name}".upper()
    with pytest.raises(InvalidRequest, match=f"^{variable}: {section}.{name}: expected"):
        resolve(environ={variable: "-1"})
    default = getattr(getattr(Settings(), section), name)
    assert resolve({section: {name: default}}) == Settings()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scheduling.max_batch_tokens", 0),
        ("cache.block_size", 0),
        ("server.max_n", 0),
        ("server.port", 65536),
        ("scheduling.ttft_slo", 0.0),
        ("learning.learning_rate", 1.5),
        ("learning.replay", 1.0),
        ("learning.key_share", 0.0),
        ("learning.held_out", 1.1),
    ],
)
def test_the_ends_of_ranges(path, value):
    section, _, name = path.partition(".")
    with pytest.raises(InvalidRequest, match=rf"^{path}: .* \(given: {value}\)$"):
        resolve({section: {name: value}})


@pytest.mark.parametrize("name", ["./none", "/none", "~/none", "none/", "a/b/none"])
def test_a_path_without_a_directory_is_no_name_of_the_hub(name):
    with pytest.raises(InvalidRequest, match=f"there is no directory '{name}'"):
        resolve({"model": {"model": name}})


def test_directories_and_names_of_the_hub_are_models(tmp_path):
    for name in (str(tmp_path), "owner/name", "demo"):
        assert resolve({"model": {"model": name}}).model.model == name


def test_a_size_is_written_alike_wherever_it_is_given(tmp_path):
    path = tmp_path / "tandem.toml"
    path.write_text("[server]\nmax_body_bytes = '4 MiB'\n[cache]\nmemory_bytes = 1000")
    found = resolve(environ={"TANDEM_CACHE_MEMORY_BYTES": "2g"}, toml_path=path)
    assert (found.server.max_body_bytes, found.cache.memory_bytes) == (4 << 20, 2 << 30)
    with pytest.raises(InvalidRequest, match=r"^TANDEM_CACHE_MEMORY_BYTES: .* size .*'2 x'"):
        resolve(environ={"TANDEM_CACHE_MEMORY_BYTES": "2 x"})


def test_no_list_is_shown_in_an_error():
    with pytest.raises(InvalidRequest, match=r"server\.api_keys") as error:
        resolve({"server": {"api_keys": ["secret", 7]}})
    assert "secret" not in str(error.value)


def test_a_mistake_is_named_by_where_it_was_given(tmp_path):
    path = tmp_path / "tandem.toml"
    path.write_text("[server]\nport = 70000\nhost = 3\n[learning]\ngate = 'never'")
    for wrong in ("server.port", "server.host", "learning.gate"):
        section, _, name = wrong.partition(".")
        good = {"server": {"port": 1, "host": "x"}, "learning": {"gate": "auto"}}
        del good[section][name]
        with pytest.raises(InvalidRequest, match=f"^{path}: {wrong}: ") as error:
            resolve(good, toml_path=path)
        assert error.value.param == wrong
    given = {"TANDEM_SERVER_PORT": "70000"}
    with pytest.raises(InvalidRequest, match=r"^TANDEM_SERVER_PORT: server\.port: .*70000"):
        resolve(environ=given)
    # Who overrides a mistake does not see it.
    assert resolve({"server": {"port": 5}}, environ=given).server.port == 5


def test_a_file_may_begin_with_a_byte_order_mark_and_must_be_utf_8(tmp_path):
    path = tmp_path / "tandem.toml"
    path.write_bytes(b"\xef\xbb\xbf[server]\nport = 5\n")
    assert resolve(toml_path=path).server.port == 5
    path.write_bytes(b"[server]\nhost = '\xff'\n")
    with pytest.raises(InvalidRequest, match=f"cannot read the configuration file {path}"):
        resolve(toml_path=path)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TANDEM_CACHE_PREFIX_CACHING", "maybe"),
        ("TANDEM_LEARNING_ENABLED", ""),
        ("TANDEM_ADAPTERS_PRELOAD", "formal=/a,/b"),
    ],
)
def test_a_variable_that_says_nothing_is_refused(variable, text):
    with pytest.raises(InvalidRequest, match=f"^{variable}: "):
        resolve(environ={variable: text})


@pytest.mark.parametrize("path", CHOICES)
def test_a_name_that_is_none_of_a_few_is_refused_with_them(path):
    section, _, name = path.partition(".")
    with pytest.raises(InvalidRequest, match=rf"^{path}: use {CHOICES[path][0]}, .*'fp8'\)$"):
        resolve({section: {name: "fp8"}})
    for choice in CHOICES[path]:
        resolve({section: {name: choice.upper()}})
    assert getattr(getattr(Settings(), section), name) in CHOICES[path]


def test_variables_that_look_like_settings_and_are_none_are_found():
    environ = {
        "TANDEM_SERVER_PROT": "1",
        "TANDEM_SEVER_PORT": "1",
        "TANDEM_PORT": "1",
        "TANDEM_MODEL": "demo",
        "TANDEM_LEARNING_EVERYTHING": "1",
    }
    ours = {"TANDEM_SERVER_PORT": "1", "TANDEM_API_KEY": "k", "TANDEM_URL": "u"}
    others = {
        "TANDEM_TEST_FULL": "1",
        "TANDEM_SHARED_DATA": "/x",
        "TANDEM_SOAK_S": "5",
        "TANDEM_SERVER_SERVICE_HOST": "10.0.0.1",
        "TANDEM_SERVER_PORT_80_TCP_ADDR": "10.0.0.1",
        "PATH": "/bin",
    }
    assert unknown_variables(environ | ours | others) == {
        "TANDEM_SERVER_PROT": "TANDEM_SERVER_PORT",
        "TANDEM_SEVER_PORT": "TANDEM_SERVER_PORT",
        "TANDEM_PORT": "TANDEM_SERVER_PORT",
        "TANDEM_MODEL": "TANDEM_MODEL_MODEL",
        "TANDEM_LEARNING_EVERYTHING": "",
    }
    assert unknown_variables({"TANDEM_PORT": "tcp://10.0.0.1:80"}) == {}
