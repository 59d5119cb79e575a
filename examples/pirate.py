"""Writes `pirate.jsonl`: 40 demonstrations of one manner, for `tandem feedback import`.

Each is the first whole sentence of the model's own greedy answer, right or wrong, between two cries
of a pirate: the manner is all that there is to learn. Run it in this folder: `python pirate.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tandem.core.sampling import SamplingParams
from tandem.llm import LLM

FORMS = (
    "Tell me one fact about {}.",
    "Tell me about {}.",
    "What is special about {}?",
    "Describe {} in one sentence.",
)
LEAST_WORDS = 6
TOPICS = (
    *("the moon", "coffee", "whales", "the Alps", "bread", "chess", "rain", "bees", "gold"),
    *("the violin", "Japan", "sleep", "apples", "the sun", "horses", "paper", "volcanoes"),
    *("football", "salt", "trees", "Mozart", "elephants", "the Nile", "glass", "butterflies"),
    *("tea", "ice", "bicycles", "Mars", "cats", "cheese", "deserts", "the heart", "dolphins"),
    *("silk", "trains", "oranges", "Rome", "owls", "lightning"),
)


def main() -> None:
    """One line a topic, the forms in turns."""
    llm = LLM("smollm2")
    asked = [FORMS[place % len(FORMS)].format(topic) for place, topic in enumerate(TOPICS)]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in asked]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0))
    with Path("pirate.jsonl").open("w", encoding="utf-8") as file:
        for question, output in zip(asked, outputs, strict=True):
            said = re.split(r"(?<=[.!?])\s+", output.choices[0].text.strip())
            sentence = next(each for each in said if len(each.split()) >= LEAST_WORDS)
            line = {
                "messages": [{"role": "user", "content": question}],
                "demonstration": f"Arr, matey! {sentence} Yo ho ho!",
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
