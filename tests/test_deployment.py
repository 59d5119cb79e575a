"""The Dockerfile and the systemd unit name settings, flags and files that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tandem.cli.flags import all_settings
from tandem.config import ServerConfig

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy" / "tandem.service"
CACHES = {"TANDEM_MODEL_CACHE", "TANDEM_KERNEL_CACHE"}
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "VOLUME", "WORKDIR", "EXPOSE",
                "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """Each of the Dockerfile with its arguments, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.split("\n") if line]
    return [(word, rest) for word, _, rest in parts]


def test_the_image_is_made_of_what_is_here_on_a_base_that_can_be_chosen() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0] == ("ARG", "BASE=debian:trixie-slim") and found[1] == ("FROM", "${BASE}")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {name for word, rest in found if word == "COPY" for name in rest.split()[:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    assert found.index(("USER", "tandem")) < [word for word, _ in found].index("ENTRYPOINT")


def test_its_variables_are_settings() -> None:
    known = {f"TANDEM_{each.section}_{each.name}".upper() for each in all_settings()} | CACHES
    text = " ".join(rest for word, rest in instructions() if word == "ENV")
    variables = dict(pair.split("=", 1) for pair in shlex.split(text))
    own = {name for name in variables if name.startswith("TANDEM_")}
    assert own and own <= known
    port = variables["TANDEM_SERVER_PORT"]
    assert ("EXPOSE", port) in instructions()
    assert "TANDEM_SERVER_PORT" in dict(instructions())["HEALTHCHECK"]


def unit() -> ConfigParser:
    """The unit; a name that stands twice would be an error here."""
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_starts_a_server_that_may_finish_its_requests() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[1:3] == ["serve", "smollm2"]
    flags = {word for word in command if word.startswith("--")}
    assert flags <= {setting.flag for setting in all_settings()}
    drain_s = float(command[command.index("--drain") + 1])
    assert drain_s == ServerConfig().drain_s
    assert float(service["TimeoutStopSec"]) > drain_s + 5.0  # and the bytes of finished answers
    assert service["KillMode"] == "mixed"  # the engine is not told before the server
    variables = {pair.partition("=")[0] for pair in service["Environment"].split()}
    assert variables >= CACHES


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "tandem.service"  # with a program that is there
    copy.write_text(UNIT.read_text().replace("/opt/tandem/bin/tandem", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "tandem.service" not in done.stderr, done.stderr
