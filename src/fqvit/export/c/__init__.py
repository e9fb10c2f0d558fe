"""Export a program as C99."""

from __future__ import annotations

from fqvit.export.c.writer import export as export
