"""Make the demo model: fit the tokenizer, train the network, write the assets folder.

One command, no network, no data files: dialogues are drawn as training goes. Batches hold
dialogues of similar length, so little padding is computed. The averaged weights are written now
and then, so an interrupted run leaves a usable folder. The run ends after its steps, or sooner
when its minutes are over; the learning rate follows whichever is nearer.
"""

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from demo import network, tokenizer
from demo.corpus import sample_dialogue
from demo.request import Dialogue

LENGTHS_TOKENS = (32, 48, 72, 112, 192, 512)
BATCH_TOKENS = 4096
TOKENIZER_DIALOGUES = 30_000
POOL_DIALOGUES = 2048
PEAK_RATE = 3e-3
WARM_UP_STEPS = 100
AVERAGING = 0.995


@dataclass(frozen=True)
class Batch:
    """Token ids [batch, length], and the flat places whose next token is learnt, with it."""

    tokens: Tensor
    places: Tensor
    targets: Tensor


def encode(coder: Tokenizer, dialogues: list[Dialogue]) -> list[tuple[list[int], list[bool]]]:
    """For each dialogue its ids, and for each id whether it is the assistant's own."""
    texts = [m.content for d in dialogues for m in d.messages]
    contents = iter(coder.encode_batch(texts, add_special_tokens=False))
    start, end = coder.token_to_id(tokenizer.START), coder.token_to_id(tokenizer.END)
    newline = coder.encode("\n").ids
    heads = {r: [start, *coder.encode(f"{r}\n").ids] for r in ("system", "user", "assistant")}
    encoded = []
    for dialogue in dialogues:
        ids: list[int] = []
        own: list[bool] = []
        for message in dialogue.messages:
            body = [*next(contents).ids, end]
            head, learnt = heads[message.role], message.role == "assistant"
            ids += [*head, *body, *newline]
            own += [False] * len(head) + [learnt] * len(body) + [False] * len(newline)
        encoded.append((ids, own))
    return encoded


def _batch(group: list[tuple[list[int], list[bool]]], length: int, pad: int) -> Batch:
    tokens = torch.full((len(group), length), pad)
    own = torch.zeros((len(group), length), dtype=torch.bool)
    for row, (ids, mask) in enumerate(group):
        tokens[row, : len(ids)] = torch.tensor(ids)
        own[row, : len(ids)] = torch.tensor(mask)
    places = own.view(-1).nonzero().squeeze(1)
    return Batch(tokens, places - 1, tokens.view(-1)[places])


def batches(coder: Tokenizer, rng: Random) -> Iterator[Batch]:
    """Batches without end, each of one length out of `LENGTHS_TOKENS`."""
    waiting: dict[int, list[tuple[list[int], list[bool]]]] = {n: [] for n in LENGTHS_TOKENS}
    pad = coder.token_to_id(tokenizer.PAD)
    while True:
        ready = []
        pool = [sample_dialogue(rng) for _ in range(POOL_DIALOGUES)]
        for ids, own in encode(coder, pool):
            length = next((n for n in LENGTHS_TOKENS if len(ids) <= n), None)
            if length is None:
                continue
            waiting[length].append((ids, own))
            if len(waiting[length]) * length >= BATCH_TOKENS - length + 1:
                ready.append(_batch(waiting[length], length, pad))
                waiting[length] = []
        rng.shuffle(ready)
        yield from ready


def save(model: LlamaForCausalLM, averaged: list[Tensor], coder: Tokenizer, folder: Path) -> None:
    """Write the assets aside, then put each file in place with one rename."""
    aside = folder.with_name(folder.name + ".part")
    aside.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = coder.token_to_id(tokenizer.END), coder.token_to_id(tokenizer.PAD)
    current = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), averaged, strict=True):
            parameter.copy_(mean)
        copy = LlamaForCausalLM(model.config).bfloat16()
        copy.load_state_dict(model.state_dict())
        for parameter, kept in zip(model.parameters(), current, strict=True):
            parameter.copy_(kept)
    copy.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    copy.save_pretrained(aside)
    tokenizer.save(coder, aside)
    for path in aside.iterdir():
        path.chmod(0o644)
        path.replace(folder / path.name)
    aside.rmdir()


def rate(step: int, done: float) -> float:
    """Share of the peak rate: a short warm-up, then half a cosine; `done` goes from 0 to 1."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train(options: argparse.Namespace) -> None:
    """Run the whole recipe."""
    began = time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    rng = Random(options.seed)
    coder = _coder(options.resume, rng)
    model = network.build(coder.token_to_id(tokenizer.PAD), coder.token_to_id(tokenizer.END))
    if options.resume is not None:
        earlier = LlamaForCausalLM.from_pretrained(options.resume, dtype=torch.float32)
        model.load_state_dict(earlier.state_dict())
    parameters = list(model.parameters())
    print(f"{coder.get_vocab_size()} tokens, {sum(p.numel() for p in parameters):,} parameters")
    lean = network.LeanPass(model, compiled=_can_compile())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    averaged = [p.detach().clone() for p in parameters]
    seen, mean_loss, saved = 0, 0.0, began
    for step, batch in zip(range(options.steps), batches(coder, rng), strict=False):
        spent = (time.monotonic() - began) / (60 * options.minutes)
        if spent >= 1:
            break
        done = max(step / options.steps, spent)
        optimizer.param_groups[0]["lr"] = options.peak_rate * rate(step, done)
        loss = lean.loss(batch.tokens, batch.places, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        weight = 1 - min(AVERAGING, (step + 1) / (step + 10))
        torch._foreach_lerp_(averaged, [p.detach() for p in parameters], weight)
        seen += batch.tokens.numel()
        mean_loss += (loss.item() - mean_loss) / min(step + 1, 50)
        now = time.monotonic()
        if step % 50 == 49:
            pace = seen / (now - began)
            print(f"step {step + 1}/{options.steps}  loss {mean_loss:.3f}  {now - began:.0f} s  "
                  f"{pace:,.0f} tokens/s", flush=True)  # fmt: skip
        if now - saved > options.save_every_s:
            save(model, averaged, coder, options.out)
            saved = now
    save(model, averaged, coder, options.out)
    print(f"wrote {options.out} after {time.monotonic() - began:.0f} s, "
          f"{time.process_time():.0f} s of them computing")  # fmt: skip


def _coder(resume: Path | None, rng: Random) -> Tokenizer:
    """The tokenizer of an earlier run, or a new one fitted to the corpus."""
    if resume is not None:
        return Tokenizer.from_file(str(resume / "tokenizer.json"))
    drawn = (sample_dialogue(rng) for _ in range(TOKENIZER_DIALOGUES))
    return tokenizer.fit(m.content for d in drawn for m in d.messages)


def _can_compile() -> bool:
    """Whether a C++ compiler is at hand; without one training runs, but slower."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def main() -> None:
    """Train the demo model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the assets")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop by then in any case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="go on from the assets in this folder")
    parser.add_argument("--peak-rate", type=float, default=PEAK_RATE)
    parser.add_argument("--save-every-s", type=float, default=300.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
