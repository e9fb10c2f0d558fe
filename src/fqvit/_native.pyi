"""The compiled part, built from native/bind.cpp."""

version: str
"""Of the sources it was built from; differs from the package's only in a stale build."""

def cpu_features() -> dict[str, bool]:
    """Integer instruction sets that this machine can run: avx2, avx_vnni, avx512_vnni, neon, neon_dotprod, neon_i8mm."""
