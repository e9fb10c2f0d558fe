"""Whether a calibration belongs to a model. Names, kinds of codes and numbers of channels must agree; weights are not compared.

Neighbours: plan.py (which sites a model has), lowering/lower.py and evaluate/compare.py (who ask).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Patches
from fqvit.quant.calibration import Calibration
from fqvit.quant.plan import plan
from fqvit.quant.weights import LinearLeaf, bits_and_group, fits_groups, weight_rows


def check_fit(
    graph: Graph, calibration: Calibration, preprocess: Preprocess, model: str, square: tuple[int, int, int] | None = None
) -> None:
    """Refuses the first site that is missing, foreign or of another width. square: see FloatModel."""
    if (square is None) != (calibration.square is None):
        raise FqvitError(f"{model}: calibrated for another kind of input than it takes. Calibrate this model again.")
    wanted, found = plan(graph, calibration.recipe), calibration.sites
    for name in wanted:
        if name not in found:
            raise FqvitError(f"{name}: not calibrated, but a site of {model}. Calibrate this model again.")
    for name in found:
        if name not in wanted:
            raise FqvitError(f"{name}: calibrated, but {model} does not have such a site. Calibrate this model again.")
    shapes = site_shapes(graph, preprocess, square)
    linear = {node.name: _weight_shape(node.leaf) for node in graph.nodes if isinstance(node.leaf, LinearLeaf | Patches)}
    for name, weights in calibration.weights.items():
        if linear.get(name) != weights.w.shape:
            raise FqvitError(
                f"{name}: weights of {list(weights.w.shape)}, which {model} does not have. Calibrate this model again."
            )
        if not fits_groups(weights, *bits_and_group(calibration.recipe, graph.node(name).leaf)):
            raise FqvitError(
                f"{name}: weights that are not of the bits and groups of recipe {calibration.recipe.name}. Calibrate again."
            )
    for name, q in found.items():
        site, channels = wanted[name], shapes[name][-1]
        found_kind = (q.bits, q.log2, q.alpha is not None, bool(q.levels))
        if found_kind != (site.bits, site.kind == "log2", site.kind == "ptf", site.kind == "relative"):
            raise FqvitError(
                f"{name}: calibrated for other codes than recipe {calibration.recipe.name} asks for. Calibrate again."
            )
        if q.alpha is not None and q.alpha.shape != (channels,):
            raise FqvitError(
                f"{name}: calibrated for {q.alpha.size} channels, {model} has {channels} there. Calibrate this model again."
            )
        if site.kind == "range" and len(q.scale) != site.groups:
            raise FqvitError(f"{name}: calibrated with {len(q.scale)} scales, expected {site.groups}. Calibrate again.")
        if site.kind == "channels" and len(q.scale) not in (1, channels):
            raise FqvitError(f"{name}: calibrated for {len(q.scale)} channels, {model} has {channels} there. Calibrate again.")
        if q.levels and len(q.levels) != q.last + 1:
            raise FqvitError(f"{name}: {len(q.levels)} levels for {q.bits} bits. Calibrate again.")
        if q.zero.max() > q.last:
            raise FqvitError(f"{name}: zero point {q.zero.max()}, but {q.bits} bits end at {q.last}. Calibrate again.")


def _weight_shape(leaf: LinearLeaf | Patches) -> tuple[int, ...]:
    return tuple(leaf.weight.flatten(1).shape) if isinstance(leaf, Patches) else weight_rows(leaf)[0].shape


@torch.no_grad()
def site_shapes(graph: Graph, preprocess: Preprocess, square: tuple[int, int, int] | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of every node's output for one image, found by running a black one: a fraction of what lowering takes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(node: Node, y: Tensor) -> Tensor:
        shapes[node.name] = tuple(y.shape[1:])
        return y

    shape = square or (preprocess.channels, preprocess.height, preprocess.width)
    graph.run(torch.zeros(1, *shape), visit)
    return shapes
