from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path)
    yield store
    store.close()
