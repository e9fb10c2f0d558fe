"""Format tables and sizes as plain aligned text.

rich is not used: its import takes time, and plain text looks the same in a terminal, a log and a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align columns: the first `left` ones to the left, the others (numbers) to the right."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    lines = []
    for row in every:
        cells = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Format one name and one value per line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def size(count: int) -> str:
    """Format a number of bytes in kB or MB, powers of ten."""
    for unit, scale in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
