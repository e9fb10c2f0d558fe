"""Describe how to read the codes of every quantized site: the `sites` of a program's header."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.program import Site
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.encode import powers
from fqvit.models.graph import Graph
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import SCALE_GRID, QParams


def describe_sites(
    graph: Graph, calibration: Calibration, values: Mapping[str, LoweredValue], emit: Emitter
) -> dict[str, Site]:
    """Return {site: how to decode its codes} for all quantized sites. Adds the constants that the descriptions refer to."""
    found = {}
    for node in graph.nodes:
        q = values[node.name].q
        if q is None or node.name not in calibration.sites:
            continue
        role = node.leaf.role
        if q.log2:
            found[node.name] = Site(role, q.bits, log2=True, zero_code=q.zero_code)
        elif q.levels:
            found[node.name] = Site(role, q.bits, levels=q.levels)
        elif len(q.scale) > 3 and role == "gelu":  # one scale per channel, not one per tensor or one each for Q, K and V
            finest, alpha, zeros = powers(q)
            found[node.name] = Site(role, q.bits, (_short(finest),), zeros, emit.shared("alpha", alpha))
        elif len(q.scale) > 3:
            units, counts = scale_counts(q, 3 if role == "qkv" else 1)
            steps = emit.shared("steps", counts)
            zero = emit.zero(q)
            found[node.name] = Site(role, q.bits, units, (zero,) if isinstance(zero, int) else zero, steps=steps)
        else:
            scales = tuple(_short(scale) for scale in q.scale)
            found[node.name] = Site(role, q.bits, scales, tuple(q.zero.tolist()), emit.alpha(q))
    return found


def scale_counts(q: QParams, groups: int) -> tuple[tuple[float, ...], NDArray[np.uint16]]:
    """Split per-channel scales into units and u16 counts: scale[c] = count[c] * unit.

    groups: 1, or 3 for Q, K and V. With 3 groups, Q and K have one scale each, which is their unit; only V has counts.
    """
    scale = q.scale.reshape(groups, -1)
    unit = float(scale[-1].max()) / SCALE_GRID
    counts = np.rint(scale[-1] / unit).astype(np.uint16)
    return tuple(_short(u) for u in (*scale[:-1, 0].tolist(), unit)), counts


def _short(scale: float) -> float:
    """Round to nine digits. Running a program does not use the scales of sites; they only describe its codes."""
    return float(f"{scale:.9g}")
