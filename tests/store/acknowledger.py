"""A process that stores feedback for ever and prints each id when it may be acknowledged.

Arguments: directory, URL (may be empty), a prefix for its ids. Meant to be killed.
"""

from __future__ import annotations

import asyncio
import sys

from records import make_feedback, make_sample

from tandem.store import Store, feedback


async def acknowledge(store: Store, lane: str) -> None:
    for number in range(1_000_000):
        name = f"{lane}-{number}"
        made = [make_sample(f"{name}-{k}", feedback_id=name) for k in range(2)]
        await store.write(feedback.add, make_feedback(name), made)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


async def main(directory: str, url: str, prefix: str) -> None:
    store = Store.open(directory, url)
    await asyncio.gather(*(acknowledge(store, f"{prefix}.{lane}") for lane in range(8)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
