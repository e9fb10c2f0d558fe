"""Liveness: which step of a sequence reads each value last, so that its memory can be released."""

from __future__ import annotations

from collections.abc import Iterable


def last_uses(reads: Iterable[Iterable[str]], outputs: Iterable[str] = ()) -> dict[str, int]:
    """Return the index of the last step that reads each value. Values that no step reads are absent.

    reads: the names that each step reads, in execution order
    outputs: names that stay alive to the end; their index is the number of steps
    """
    last: dict[str, int] = {}
    steps = 0
    for step, names in enumerate(reads):
        last.update(dict.fromkeys(names, step))
        steps = step + 1
    last.update(dict.fromkeys(outputs, steps))
    return last
