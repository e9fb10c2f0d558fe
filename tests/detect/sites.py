"""Compare a network of a detector with its float simulation: every site (quantized activation), from the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.lowering.emit import LoweredValue
from fqvit.models.graph import IMAGES, Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.simulate import Simulation


@dataclass(frozen=True)
class Compared:
    """One site. codes: from the simulation   found: from the program   real: values that were encoded as `codes`

    q: scale and zero point; None for accumulators
    """

    node: Node
    q: QParams | None
    codes: NDArray[Any]
    found: NDArray[Any]
    real: Tensor


@torch.no_grad()
def compared_sites(
    model: FloatModel,
    calibration: Calibration,
    values: Mapping[str, LoweredValue],
    buffers: Mapping[str, NDArray[Any]],
    x: NDArray[np.uint8],
) -> Iterator[Compared]:
    """Yield the comparison of every quantized site and of every output that consists of accumulators.

    buffers: all buffers of the program after a run on x, with the batch axis
    """
    simulation = Simulation(model, calibration)
    written_by = {relu: producer for producer, relu in simulation.relus.items()}
    for node in simulation.graph.nodes:
        q = simulation.sites.get(node.name)
        if q is None and node.name not in simulation.graph.outputs:
            continue
        producer = simulation.graph.node(written_by.get(node.name, node.name))
        real = simulation.call(producer, [_value(simulation, values, buffers, x, name) for name in producer.inputs])
        if q is None:
            unit = torch.from_numpy(values[node.name].unit)
            yield Compared(node, q, (real / unit).round().numpy(), buffers[values[node.name].buffer], real)
            continue
        codes = q.encode(real if producer is node else simulation.call(node, [real])).numpy()
        found = buffers[values[node.name].buffer]
        if node.leaf.role == "logits":  # the program's logits have the site's scale, but no zero point and no clamp
            found = (found + q.zero).clip(0, q.last)
        yield Compared(node, q, codes, found, real)


def _decoded(value: LoweredValue, codes: NDArray[Any]) -> Tensor:
    x = torch.from_numpy(codes.astype(np.float64))
    if value.q is None:
        return x * torch.from_numpy(value.unit)
    if len(value.q.scale) > x.shape[-1]:  # V split into heads, with one scale per channel
        return value.q.decode(x.transpose(-2, -3).flatten(-2)).unflatten(-1, (x.shape[-3], -1)).transpose(-2, -3)
    return value.q.decode(x)


def _value(
    simulation: Simulation,
    values: Mapping[str, LoweredValue],
    buffers: Mapping[str, NDArray[Any]],
    x: NDArray[np.uint8],
    site: str,
) -> Tensor:
    """Return the real values of a site. Moves run in float, because an attention head has only some of V's channels."""
    if site == IMAGES:
        return simulation.values(x)
    node = simulation.graph.node(site)
    if node.leaf.role == "route":
        return node.leaf(*(_value(simulation, values, buffers, x, name) for name in node.inputs))  # type: ignore[no-any-return]
    return _decoded(values[site], buffers[values[site].buffer]).float()
