"""Run the float model and the integer program on the images and gather all data of a report.

One pass over all images is followed by the per-site comparison, the attention maps and the speed measurement. Everything that
page.py shows is in Report. Needs torch. See also: collect.py, predictions.py, evaluate/compare.py, speed.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.images import Batch
from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer, Comparison
from fqvit.evaluate.inspect import Inspection, inspect
from fqvit.ir.program import Program
from fqvit.models.device import one_thread
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.report.attention import NO_MAPS, attention_layout, attention_maps
from fqvit.report.collect import AttentionHistogram, NormRanges
from fqvit.report.data import AttentionCounts, AttentionMaps, ChannelRanges, ExpCurves, exp_curves
from fqvit.report.predictions import Predictions
from fqvit.report.speed import Speed, quick_look
from fqvit.runtime.native import Engine
from fqvit.system.progress import Progress

BATCH = 8
COMPARED = 8  # images for the per-site comparison, which runs the slow reference interpreter
COUNTED = 4  # attention values are counted in 4 to 7 batches only: one image has 1.4 million in DeiT-Tiny
MAPPED = 2  # images with attention maps


@dataclass(frozen=True)
class Report:
    """All data of one report.

    predictions: None for programs that output features   parameters: their number in the float model
    notes: one sentence per figure that is left out
    """

    program: Program
    inspection: Inspection
    fingerprint: str
    images: int
    predictions: Predictions | None
    norms: list[ChannelRanges]
    attention: AttentionCounts | None
    maps: list[AttentionMaps]
    exp: ExpCurves | None
    sites: Comparison
    speed: Speed
    parameters: int
    notes: tuple[str, ...] = ()


def gather(program: Program, path: Path, model: FloatModel, batches: Iterable[Batch], total: int, track: Progress) -> Report:
    """Gather a report. path: file of the program; batches: BATCH images each, `total` images in all.

    Raises FqvitError if the float model does not match the program, or if there are no images.
    """
    comparer = Comparer(program, model)  # first, because it checks that the float model matches
    model = dataclasses.replace(model, preprocess=program.header.preprocess)
    seen = _walk(program, model, comparer.graph, batches, total)
    with one_thread():
        for pixels in track(seen.chosen, len(seen.chosen), "comparing sites"):
            comparer.add(pixels[None])
    graph = comparer.graph
    layout = attention_layout(model, graph)
    maps = []
    if layout is not None:
        maps = [attention_maps(model, graph, layout, pixels) for pixels in seen.chosen[:: COMPARED // MAPPED]]
    return Report(
        program=program,
        inspection=inspect(program, path),
        fingerprint=program.fingerprint(),
        images=seen.images,
        predictions=seen.predictions,
        norms=seen.norms.result(),
        attention=seen.histogram.result(seen.counted),
        maps=maps,
        exp=_exp(program),
        sites=comparer.result(),
        speed=quick_look(program, model, seen.chosen[0]),
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        notes=() if maps else (NO_MAPS,),
    )


@dataclass
class _Seen:
    predictions: Predictions | None
    norms: NormRanges
    histogram: AttentionHistogram
    chosen: list[NDArray[np.uint8]]
    images: int = 0
    counted: int = 0


@torch.no_grad()
def _walk(program: Program, model: FloatModel, graph: Graph, batches: Iterable[Batch], total: int) -> _Seen:
    """Run one pass over the images. Subsets are evenly spaced, because paths are sorted by class."""
    output = program.header.output
    engine = Engine(program)
    seen = _Seen(
        Predictions(output.scale) if output.kind == "logits" else None, NormRanges(graph), AttentionHistogram(), chosen=[]
    )
    wanted = {i * total // COMPARED for i in range(min(COMPARED, total))}
    every = max(1, -(-total // BATCH) // COUNTED)
    counting = False

    def visit(node: Node, y: Tensor) -> Tensor:
        seen.norms.see(node, y)
        if counting:
            seen.histogram.see(node, y)
        return y

    for number, batch in enumerate(batches):
        counting = number % every == 0
        scores = graph.run_all(normalise(batch.images, model.preprocess), visit)[0]
        if seen.predictions is not None:
            seen.predictions.add(batch.images, batch.labels, batch.paths, scores.numpy(), engine.run(batch.images))
        seen.chosen += [pixels.copy() for i, pixels in enumerate(batch.images, seen.images) if i in wanted]
        seen.images += len(batch.images)
        seen.counted += len(batch.images) if counting else 0
    if not seen.images:
        raise FqvitError("report: no images were read. Pass a folder with at least one readable image.")
    return seen


def _exp(program: Program) -> ExpCurves | None:
    """Evaluate the exponentials at the median scale of the program's scores; None if it has no scores."""
    scores = {name: site for name, site in program.header.sites.items() if site.role == "scores" and site.scale}
    if not scores:
        return None
    scale = float(np.median([site.scale[0] for site in scores.values()]))
    buffers = program.verify().buffers
    name, site = next(iter(scores.items()))
    return exp_curves(scale, 2**site.bits, buffers[name].shape[-1])
