from __future__ import annotations

from tests.factories import few_steps as few_steps
from tests.factories import one_thread as one_thread
