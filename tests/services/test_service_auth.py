"""Keys: plain and hashed, from flags and files; nothing plain is kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tandem.core.errors import Forbidden, InvalidRequest, Unauthorized
from tandem.services.auth import ApiKeys


def test_without_keys_everybody_is_one_tenant() -> None:
    keys = ApiKeys.read([])
    assert not keys.required
    assert keys.caller_of(None).tenant == keys.caller_of("Bearer whatever").tenant == ""


def test_plain_and_hashed_keys_are_the_same_key(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  sha256:{digest}  \nsk-two\n")
    keys = ApiKeys.read(["sk-three"], str(file))
    tenants = {keys.caller_of(f"Bearer sk-{name}").tenant for name in ("one", "two", "three")}
    assert len(tenants) == 3
    assert keys.caller_of("bearer sk-one").tenant == digest[:16]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-One", "Bearer é"]
)
def test_everything_else_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        ApiKeys.read(["sk-one"]).caller_of(header)


def test_the_digest_itself_is_no_key() -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    with pytest.raises(Unauthorized):
        ApiKeys.read(["sk-one"]).caller_of(f"Bearer sha256:{digest}")


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


def test_plain_keys_may_do_everything() -> None:
    caller = ApiKeys.read(["sk-one"]).caller_of("Bearer sk-one")
    caller.require_admin()
    caller.require_train("formal")
    caller.require_serve("formal")
    caller.require_serve(None)
    assert caller.feedback_per_hour == caller.samples_cap == 0


def test_a_toml_file_says_what_a_key_may_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[keys]]\nkey = "sk-app"\nname = "the app"\nserve = ["base", "formal*"]\n'
        'train = ["formal*"]\nfeedback_per_hour = 10\nsamples_cap = 100\n'
        "ttft_slo = 0.5\n"
        '[[keys]]\nkey = "sk-boss"\nadmin = true\n'
    )
    keys = ApiKeys.read(["sk-flag"], str(file))
    app, boss = keys.caller_of("Bearer sk-app"), keys.caller_of("Bearer sk-boss")
    assert (app.name, app.feedback_per_hour, app.samples_cap) == ("the app", 10, 100)
    assert (app.ttft_slo, app.tpot_slo, boss.ttft_slo) == (0.5, None, None)
    assert [app.may_serve(name) for name in (None, "formal", "formal2", "other")] == [
        True,
        True,
        True,
        False,
    ]
    app.require_train("formal-2")
    for forbidden in (
        lambda: app.require_train("other"),
        lambda: app.require_serve("other"),
        app.require_admin,
        lambda: boss.require_train("formal"),
    ):
        with pytest.raises(Forbidden, match="this API key may not"):
            forbidden()
    boss.require_admin()
    keys.caller_of("Bearer sk-flag").require_admin()


@pytest.mark.parametrize(
    "text",
    [
        "keys = 5",
        "[[keys]]\nname = 'x'",
        "[[keys]]\nkey = 'k'\ntrains = ['x']",
        "[[keys]]\nkey = 'k'\ntrain = 'x'",
        "[[keys]]\nkey = 'two words'",
        "[[keys]]\nkey = 'k'\nsamples_cap = -1",
        "[[keys]]\nkey = 'k'\ntpot_slo = 0",
        "[[keys]]\nkey = 'k'\nfeedback_per_hour = -1",
        "[[keys]]\nkey = 'k'\n[[keys]]\nkey = 'k'\nadmin = true",
        "[other]",
        "",
        "= broken",
    ],
)
def test_a_toml_file_with_mistakes_does_not_open_the_server(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"keys\.toml"):
        ApiKeys.read([], str(file))


def test_a_flag_does_not_widen_what_a_key_of_a_file_may(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nkey = "sk-one"\n')
    with pytest.raises(InvalidRequest, match="given by a flag too"):
        ApiKeys.read(["sk-one"], str(file))
    assert ApiKeys.read(["sk-two", "sk-two"], str(file)).caller_of("Bearer sk-two").admin
