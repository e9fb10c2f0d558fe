"""Fixtures for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import CLASSIFIER, DETECTOR, EMBEDDER, TOKENS, Running, running

for name in ("fastapi", "uvicorn", "httpx"):
    pytest.importorskip(name)


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """Return a server with a classifier, an embedding model, a model that returns tokens, and a detector."""
    with running(CLASSIFIER, EMBEDDER, TOKENS, DETECTOR, "--max-body", 300_000, "--max-pixels", 100_000, "--timeout", 5) as one:
        yield one
