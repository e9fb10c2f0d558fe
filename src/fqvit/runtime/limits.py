"""The default limit on the memory that the buffers of one image need."""

from __future__ import annotations

MOST_BYTES = 512 << 20  # Swin-B at 384 pixels needs about 20 MB
