"""What the documents name exists: files, links, packages, policies, classes, tests, commands."""

from __future__ import annotations

import ast
import html
import re
import subprocess
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer

import tandem
from benchmarks.__main__ import studies
from tandem.cli import app
from tandem.cli.flags import all_settings
from tandem.scheduling.policies.unified import Options
from tandem.scheduling.registry import known_policies

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tandem.__file__).parent
FOLDERS = ("docs", "demo", "benchmarks", "src")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)
# Documents about the code; the others name files of their own folders.
ABOUT_THE_CODE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SUFFIXES = ("py", "md", "toml", "txt", "yaml", "cpp", "h")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """The text without fenced blocks."""
    return FENCE.sub("", path.read_text())


def fenced(path: Path) -> str:
    return "\n".join(match[0] for match in FENCE.finditer(path.read_text()))


def quoted(path: Path) -> set[str]:
    """What stands in single backticks."""
    return set(CODE.findall(prose(path)))


def looks_like_a_path(text: str) -> bool:
    """A path of the repository, by suffix or first folder; not a pattern such as NAME.py."""
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*/?", text) or re.search(r"NAME|DEVICE", text):
        return False
    tops = {path.name for path in [*ROOT.iterdir(), *PACKAGE.iterdir()] if path.is_dir()}
    return text.rpartition(".")[2] in SUFFIXES or ("/" in text and text.split("/")[0] in tops)


def exists(text: str) -> bool:
    return (ROOT / text).exists() or (PACKAGE / text).exists()


@cache
def members() -> dict[str, set[str]]:
    """Names that each class defines, and under "" all functions, over the whole package."""
    found: dict[str, set[str]] = {"": set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[""].add(node.name)
            elif isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for item in node.body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(item.name)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        names.add(item.target.id)
    return found


def test_documents_are_found() -> None:
    assert {"README.md", "ARCHITECTURE.md", "docs/api.md", "demo/README.md"} <= set(
        map(named, DOCUMENTS)
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_relative_links_resolve(document: Path) -> None:
    links = [link for link in LINK.findall(prose(document)) if ":" not in link]
    targets = [link.partition("#")[0] for link in links]
    assert [t for t in targets if t and not (document.parent / t).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_within_a_document_resolve(document: Path) -> None:
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    wanted = {link[1:] for link in LINK.findall(prose(document)) if link.startswith("#")}
    assert wanted <= anchors


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_rules_of_tables_are_as_wide_as_their_heads(document: Path) -> None:
    """Else the table is shown as text."""
    rule = re.compile(r"\|( *:?-+:? *\|)+")
    lines = prose(document).splitlines()
    pairs = [(head, each) for head, each in pairwise(lines) if rule.fullmatch(each)]
    wide = re.compile(r"(?<!\\)\|")
    assert [h for h, each in pairs if len(wide.findall(h)) != each.count("|")] == []


@pytest.mark.parametrize("document", ABOUT_THE_CODE, ids=named)
def test_named_files_exist(document: Path) -> None:
    paths = {text.partition("::")[0] for text in quoted(document)}
    assert sorted(path for path in paths if looks_like_a_path(path) and not exists(path)) == []


def test_readme_and_architecture_name_files() -> None:
    """The pattern finds paths at all."""
    for document in ("README.md", "ARCHITECTURE.md"):
        paths = {text for text in quoted(ROOT / document) if looks_like_a_path(text)}
        assert paths


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_named_studies_exist(document: Path) -> None:
    named_ones = set(re.findall(r"python -m benchmarks ([a-z][\w.]+)", document.read_text("utf-8")))
    assert named_ones <= dict(studies()).keys()


@pytest.mark.parametrize("document", ABOUT_THE_CODE, ids=named)
def test_named_tests_exist(document: Path) -> None:
    wanted = [text.split("::") for text in quoted(document) if "::" in text]
    missing = [
        (path, name)
        for path, name in wanted
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_architecture_names_every_package_and_top_module() -> None:
    tree = fenced(ROOT / "ARCHITECTURE.md")
    lines = {line.split()[0] for line in tree.splitlines() if line.strip()}
    folders = {f"{path.parent.name}/" for path in PACKAGE.rglob("__init__.py")} - {"tandem/"}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert folders | modules <= lines
    assert {"src/tandem/", "tests/", "docs/", "demo/", "benchmarks/"} <= lines


def test_architecture_names_real_classes_and_functions() -> None:
    known = members()
    wrong = []
    for text in quoted(ROOT / "ARCHITECTURE.md"):
        if match := re.fullmatch(r"([A-Z]\w*)\.([a-z_]\w*)", text):
            right = match[2] in known.get(match[1], set())
        elif match := re.fullmatch(r"([a-z_]\w*)\(\)", text):
            right = match[1] in known[""]
        elif re.fullmatch(r"[A-Z]\w*[a-z]\w*", text):
            right = text in known or text == "Random"
        else:
            continue
        if not right:
            wrong.append(text)
    assert wrong == []


def test_every_policy_has_a_row_and_no_other() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == known_policies()
    assert sorted(re.findall(r"^\*\*`(\w+)`\*\*$", text, re.MULTILINE)) == known_policies()


def test_the_table_of_unified_has_its_options_and_defaults() -> None:
    text = (ROOT / "docs" / "unified.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE)
    assert rows == [(each.name, str(each.default).lower()) for each in fields(Options)]


def test_every_decision_record_is_listed_in_order() -> None:
    folder = ROOT / "docs" / "adr"
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert LINK.findall((folder / "README.md").read_text()) == records
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    for name in records:
        headings = re.findall(r"^## (.+)$", (folder / name).read_text(), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("document", ABOUT_THE_CODE, ids=named)
def test_named_commands_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    commands = {command.name for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    assert set(re.findall(r"(?:`|^)tandem ([a-z-]+)", text, re.MULTILINE)) <= commands


def test_every_command_and_option_is_documented() -> None:
    """`make commands` writes the page."""
    text = html.unescape((ROOT / "docs" / "commands.md").read_text())
    sections = dict(re.findall(r"^##+ `(.+?)`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    waiting = {"tandem": typer.main.get_command(app)}
    while waiting:
        name, command = waiting.popitem()
        waiting |= {f"{name} {each}": sub for each, sub in getattr(command, "commands", {}).items()}
        flags = {flag for each in command.params for flag in each.opts if flag.startswith("--")}
        if name != "tandem":
            told = set(re.findall(r"--[a-z][a-z-]*", sections.pop(name)))
            assert flags <= told, name
    assert sections == {}


def test_make_serve_passes_flags_on() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "serve", "MODEL=other", "ARGS=--port 8001"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].endswith("tandem serve other --port 8001")


def test_flags_of_the_server_in_the_readme_exist() -> None:
    flags = {setting.flag for setting in all_settings()}
    lines = [line for line in fenced(ROOT / "README.md").splitlines() if "tandem serve" in line]
    used = {flag for line in lines for flag in re.findall(r"--[a-z-]+", line)}
    assert used and used <= flags
