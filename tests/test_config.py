"""Precedence and errors of the configuration."""

from __future__ import annotations

import pytest

from tandem.config import resolve
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
