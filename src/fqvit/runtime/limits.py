"""The default limit of the memory of one image."""

from __future__ import annotations

MOST_BYTES = 512 << 20  # Swin-B at 384 pixels needs about 20 MB
