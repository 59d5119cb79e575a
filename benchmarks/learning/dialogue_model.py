"""Train the small model of the learning benchmark on public dialogue text, in minutes on two cores.

Reads `dialogue`, `text` and the open models' answers in `lengths` of the shared data; never
`preferences`, and no dialogue that begins like a pair's, so that all a model knows of the pairs
comes from feedback. Starts from the bundled demo model and keeps its tokenizer. A folder that is
there already is kept: `python -m benchmarks learning.dialogue_model --help`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from benchmarks.learning.preferences import read_preferences
from demo import network
from demo.train import Batch, rate, save
from tandem.model.names import DEMO_PATH

WINDOW_TOKENS = 384
BATCH_WINDOWS = 12
PEAK_RATE = 2e-3
AVERAGING = 0.99
OPEN_MODELS = ("oasst-sft-4-pythia-12b", "falcon-7b-sft", "deepseek-v3")

Turns = list[tuple[str, str]]


def dialogues(data: Path) -> Iterator[Turns]:
    """(role, text) turns of every dialogue: people, and answers of open models to one message."""
    yield from _persona_chats(data / "dialogue" / "synthetic_persona_chat_valid.csv.gz")
    for chat in _json(data / "dialogue" / "topical_chat_valid_freq.json.gz").values():
        yield _alternating([turn["message"] for turn in chat["content"]])
    for task in _json(data / "dialogue" / "taskmaster_4_data_07.json.gz"):
        yield [
            ("user" if turn["speaker"] == "user" else "assistant", turn["text"])
            for turn in task["utterances"]
        ]
    reports = sorted((data / "lengths" / "oasst_1k_prompts").iterdir())
    reports += [
        path
        for path in sorted((data / "lengths" / "oasst_lottery").iterdir())
        if any(model in path.name for model in OPEN_MODELS)
    ]
    for path in reports:
        for prompt in _json(path)["prompts"]:
            for result in prompt["results"]:
                for output in result["outputs"]:
                    yield [
                        ("user", prompt["prompt"]),
                        ("assistant", output.split("<|endoftext|>")[0]),
                    ]


def _persona_chats(path: Path) -> Iterator[Turns]:
    rows = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    for row in rows:
        lines = row["Best Generated Conversation"].splitlines()
        yield _alternating([line.partition(": ")[2] for line in lines if ": " in line])


def _alternating(texts: list[str]) -> Turns:
    return [("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(texts)]


def books(data: Path) -> Iterator[str]:
    """Plain text, for English beyond chats."""
    for path in sorted((data / "text").glob("*.txt.gz")):
        yield gzip.decompress(path.read_bytes()).decode()


def _json(path: Path) -> Any:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def documents(data: Path, max_characters: int = 1500) -> list[str]:
    """What is learnt, in chat format, without long chats and whatever a pair begins with."""
    kept_apart = {
        turn["content"].strip()
        for pair in read_preferences(data / "preferences")
        for turn in pair.messages[:1]
    }
    texts = []
    for turns in dialogues(data):
        said = [(role, text.strip()) for role, text in turns if text.strip()]
        if (
            not said
            or said[0][1] in kept_apart
            or sum(len(t) for _, t in said) > max_characters * 2
        ):
            continue
        texts.append("".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said))
    for book in books(data):
        pieces = [book[at : at + max_characters] for at in range(0, len(book), max_characters)]
        texts += pieces
    return texts


def windows(coder: Tokenizer, texts: list[str], rng: Random) -> Iterator[Batch]:
    """Endless batches [BATCH_WINDOWS, WINDOW_TOKENS] of documents laid end to end, reshuffled each
    round; every next token is learnt."""
    encoded = [encoding.ids for encoding in coder.encode_batch(texts, add_special_tokens=False)]
    per_batch = BATCH_WINDOWS * WINDOW_TOKENS
    row: list[int] = []
    while True:
        rng.shuffle(encoded)
        for ids in encoded:
            row += ids
            while len(row) >= per_batch:
                tokens = torch.tensor(row[:per_batch]).view(BATCH_WINDOWS, WINDOW_TOKENS)
                del row[:per_batch]
                places = torch.arange(per_batch).view(BATCH_WINDOWS, WINDOW_TOKENS)[:, :-1]
                yield Batch(tokens, places.reshape(-1), tokens[:, 1:].reshape(-1))


def train(data: Path, out: Path, minutes: float, threads: int, seed: int) -> None:
    """Train the demo model on until the minutes are over; the averaged weights go to `out`."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    rng = Random(seed)
    texts = documents(data)
    coder = Tokenizer.from_file(str(DEMO_PATH / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(DEMO_PATH, dtype=torch.float32)
    parameters = list(model.parameters())
    lean = network.LeanPass(model, compiled=True)
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    averaged = [parameter.detach().clone() for parameter in parameters]
    # Computing time: what else runs on the machine shall not make another model.
    began, mean_loss = time.process_time(), 0.0
    for step, batch in enumerate(windows(coder, texts, rng)):
        done = (time.process_time() - began) / (60 * minutes * threads)
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = PEAK_RATE * rate(step, done)
        loss = lean.loss(batch.tokens, batch.places, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        weight = 1 - min(AVERAGING, (step + 1) / (step + 10))
        torch._foreach_lerp_(averaged, [parameter.detach() for parameter in parameters], weight)
        mean_loss += (loss.item() - mean_loss) / min(step + 1, 50)
        if step % 25 == 24:
            print(f"step {step + 1}  loss {mean_loss:.3f}  {done:.0%}", flush=True)
    assert math.isfinite(mean_loss)
    save(model, averaged, coder, out)
    LlamaForCausalLM.from_pretrained(out)


def main(
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path(
        ".bench-cache/dialogue-model"
    ),
    minutes: Annotated[float, typer.Option(help="Computing time of each core.")] = 6.0,
    threads: Annotated[int, typer.Option(help="Cores to use.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the weights and the order.")] = 0,
) -> None:
    """Train the model unless `out` holds one."""
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    if not data.is_dir():
        raise SystemExit(f"skipped: no shared data at {data}")
    train(data, out, minutes, threads, seed)


if __name__ == "__main__":
    typer.run(main)
