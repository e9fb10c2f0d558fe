"""Export a program as a folder of C99 source code without floats."""

from __future__ import annotations

from fqvit.export.c.writer import export as export
