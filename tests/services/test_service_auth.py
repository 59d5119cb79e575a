"""Keys: plain and hashed, from flags and files; nothing plain is kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequest, Unauthorized
from tandem.services.auth import ApiKeys


def test_without_keys_everybody_is_one_tenant() -> None:
    keys = ApiKeys.read([])
    assert not keys.required
    assert keys.tenant_of(None) == keys.tenant_of("Bearer whatever") == ""


def test_plain_and_hashed_keys_are_the_same_key(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  sha256:{digest}  \nsk-two\n")
    keys = ApiKeys.read(["sk-three"], str(file))
    tenants = {keys.tenant_of(f"Bearer sk-{name}") for name in ("one", "two", "three")}
    assert len(tenants) == 3
    assert keys.tenant_of("bearer sk-one") == digest[:16]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-One", "Bearer é"]
)
def test_everything_else_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        ApiKeys.read(["sk-one"]).tenant_of(header)


def test_the_digest_itself_is_no_key() -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    with pytest.raises(Unauthorized):
        ApiKeys.read(["sk-one"]).tenant_of(f"Bearer sha256:{digest}")


def test_no_plain_key_is_kept() -> None:
    assert "sk-secret" not in repr(vars(ApiKeys.read(["sk-secret"])))


@pytest.mark.parametrize("key", ["", "two words", "sha256:12", "ключ"])
def test_unusable_keys_are_refused_at_the_start(key: str) -> None:
    with pytest.raises(InvalidRequest, match="flag"):
        ApiKeys.read([key])


def test_a_key_file_that_yields_nothing_does_not_open_the_server(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        ApiKeys.read([], str(tmp_path / "absent"))
    empty = tmp_path / "empty"
    empty.write_text("# later\n")
    with pytest.raises(InvalidRequest, match="holds no key"):
        ApiKeys.read([], str(empty))
