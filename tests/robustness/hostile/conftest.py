"""Run all tests of this folder on one torch thread."""

from __future__ import annotations

from tests.factories import one_thread as one_thread
