"""Check that a calibration belongs to a model: site names, kinds of codes, and shapes.

The values of the model's weights are not compared.
See also: plan.py (the sites of a model), lowering/lower.py and evaluate/compare.py (the callers).
"""

from __future__ import annotations

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, value_shapes
from fqvit.models.layers import Patches
from fqvit.quant.calibration import Calibration
from fqvit.quant.plan import plan
from fqvit.quant.weights import LinearLeaf, bits_and_group, fits_groups, weight_rows


def check_fit(
    graph: Graph, calibration: Calibration, preprocess: Preprocess, model: str, square: tuple[int, int, int] | None = None
) -> None:
    """Raise FqvitError for the first site that is missing, unknown, or of another kind or shape. square: see FloatModel."""
    if (square is None) != (calibration.square is None):
        read, calibrated = ("images", "RoI features") if square is None else ("RoI features", "images")
        raise FqvitError(f"{model}: calibrated for {calibrated}, expected {read}. Calibrate this model again.")
    wanted, found = plan(graph, calibration.recipe), calibration.sites
    for name in wanted:
        if name not in found:
            raise FqvitError(f"{name}: not calibrated, but {model} has this site. Calibrate this model again.")
    for name in found:
        if name not in wanted:
            raise FqvitError(f"{name}: calibrated, but {model} has no such site. Calibrate this model again.")
    shapes = site_shapes(graph, preprocess, square)
    linear = {node.name: _weight_shape(node.leaf) for node in graph.nodes if isinstance(node.leaf, LinearLeaf | Patches)}
    for name, weights in calibration.weights.items():
        if linear.get(name) != weights.w.shape:
            raise FqvitError(
                f"{name}: weights of shape {list(weights.w.shape)} do not fit {model}. Calibrate this model again."
            )
        if not fits_groups(weights, *bits_and_group(calibration.recipe, graph.node(name))):
            raise FqvitError(
                f"{name}: weights do not have the bits and groups of recipe {calibration.recipe.name}. Calibrate again."
            )
    for name, q in found.items():
        site, channels = wanted[name], shapes[name][-1]
        found_kind = (q.width, q.log2, q.alpha is not None, bool(q.levels))
        if found_kind != (site.bits, site.kind == "log2", site.kind == "ptf", site.kind == "relative"):
            raise FqvitError(
                f"{name}: calibrated for other codes than those of recipe {calibration.recipe.name}. Calibrate again."
            )
        if q.octave > 1 or (q.grid and q.bits > 8):
            raise FqvitError(f"{name}: calibrated for codes that are only simulated. Calibrate again.")
        if q.alpha is not None and q.alpha.shape != (channels,):
            raise FqvitError(
                f"{name}: calibrated for {q.alpha.size} channels, but {model} has {channels}. Calibrate this model again."
            )
        if site.kind == "range" and len(q.scale) != site.groups:
            raise FqvitError(f"{name}: calibrated with {len(q.scale)} scales, expected {site.groups}. Calibrate again.")
        if site.kind == "channels" and len(q.scale) not in (1, channels):
            raise FqvitError(f"{name}: calibrated for {len(q.scale)} channels, but {model} has {channels}. Calibrate again.")
        if q.levels and len(q.levels) != q.last + 1:
            raise FqvitError(f"{name}: {len(q.levels)} levels, expected {q.last + 1} for {q.bits} bits. Calibrate again.")
        if q.zero.max() > q.last:
            raise FqvitError(
                f"{name}: zero point {q.zero.max()}, expected at most {q.last} for {q.bits} bits. Calibrate again."
            )


def _weight_shape(leaf: LinearLeaf | Patches) -> tuple[int, ...]:
    return tuple(leaf.weight.flatten(1).shape) if isinstance(leaf, Patches) else weight_rows(leaf)[0].shape


def site_shapes(graph: Graph, preprocess: Preprocess, square: tuple[int, int, int] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every node's output for one image, without the batch axis, by running the model on zeros."""
    return value_shapes(graph, square or (preprocess.channels, preprocess.height, preprocess.width))
