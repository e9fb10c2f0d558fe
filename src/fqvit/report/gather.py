"""Run the float model and the integer program on the images and gather all data of a report.

One pass over all images is followed by the per-site comparison, the attention maps and the speed measurement. Everything that
page.py shows is in Report. Needs torch. See also: collect.py, predictions.py, embeddings.py, evaluate/compare.py, speed.py.
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
from fqvit.evaluate.compare import Comparer, Comparison, See
from fqvit.evaluate.inspect import Inspection, inspect
from fqvit.ir.program import Program
from fqvit.models.device import one_thread
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.fit import site_shapes
from fqvit.report.attention import NO_MAPS, attention_layout, attention_maps
from fqvit.report.collect import AttentionHistogram, NormRanges
from fqvit.report.data import AttentionCounts, AttentionMaps, ChannelRanges, ExpCurves, exp_curves
from fqvit.report.embeddings import EmbeddingPairs, EmbeddingQuality
from fqvit.report.predictions import Predictions
from fqvit.report.speed import Speed, quick_look
from fqvit.report.tokens import TokenColours, token_colours, token_layout
from fqvit.runtime.native import Engine
from fqvit.system.progress import Progress

BATCH = 8
COMPARED = 8  # images for the per-site comparison, which runs the slow reference interpreter
COUNTED = 4  # attention values are counted in 4 to 7 batches only: DeiT-Tiny has 1.4 million of them per image
MAPPED = 2  # images with attention maps
COLOURED = 3  # images whose patch tokens are shown as colours


@dataclass(frozen=True)
class Report:
    """All data of one report.

    predictions: None for programs without logits   parameters: number of parameters of the float model
    notes: one sentence per figure that is left out   embeddings: None for programs that output only logits
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
    embeddings: EmbeddingQuality | None = None


def gather(program: Program, path: Path, model: FloatModel, batches: Iterable[Batch], total: int, track: Progress) -> Report:
    """Gather a report. path: file of the program; batches: BATCH images each, `total` images in all.

    Raises FqvitError if the float model does not match the program, or if there are no images.
    """
    comparer = Comparer(program, model)  # first, because it checks that the float model matches
    model = dataclasses.replace(model, preprocess=program.header.preprocess)
    graph = comparer.graph
    seen = _walk(program, model, graph, batches, total)
    tokens = _TokenPictures(program, model, graph, seen) if seen.embeddings.outputs else None
    with one_thread():
        for number, (name, pixels) in enumerate(track(seen.chosen, len(seen.chosen), "comparing sites")):
            comparer.add(pixels[None], [name], None if tokens is None else tokens.seeing(number))
    layout = attention_layout(model, graph)
    maps = []
    if layout is not None:
        maps = [attention_maps(model, graph, layout, pixels) for _, pixels in seen.chosen[:: COMPARED // MAPPED]]
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
        speed=quick_look(program, model, seen.chosen[0][1]),
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        notes=() if maps else (NO_MAPS,),
        embeddings=_quality(seen.embeddings, tokens),
    )


@dataclass
class _Seen:
    predictions: Predictions | None
    norms: NormRanges
    histogram: AttentionHistogram
    embeddings: EmbeddingPairs
    chosen: list[tuple[str, NDArray[np.uint8]]]
    images: int = 0
    counted: int = 0


@torch.no_grad()
def _walk(program: Program, model: FloatModel, graph: Graph, batches: Iterable[Batch], total: int) -> _Seen:
    """Run one pass over the images. Subsets are evenly spaced, because paths are sorted by class."""
    outputs = program.header.outputs
    logits = next((i for i, output in enumerate(outputs) if output.kind == "logits"), None)
    engine = Engine(program)
    seen = _Seen(
        None if logits is None else Predictions(outputs[logits].scale),
        NormRanges(graph),
        AttentionHistogram(),
        EmbeddingPairs(program),
        chosen=[],
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
        floats = [values.numpy() for values in graph.run_all(normalise(batch.images, model.preprocess), visit)]
        integers = engine.run_all(batch.images)
        if seen.predictions is not None and logits is not None:
            seen.predictions.add(batch.images, batch.labels, batch.paths, floats[logits], integers[logits])
        seen.embeddings.add(batch.images, batch.paths, floats, integers)
        images = enumerate(zip(batch.paths, batch.images, strict=True), seen.images)
        seen.chosen += [(path, pixels.copy()) for i, (path, pixels) in images if i in wanted]
        seen.images += len(batch.images)
        seen.counted += len(batch.images) if counting else 0
    if not seen.images:
        raise FqvitError("report: no images were read. Pass a folder with at least one readable image.")
    return seen


class _TokenPictures:
    """Collects the patch tokens of a few of the compared images."""

    def __init__(self, program: Program, model: FloatModel, graph: Graph, seen: _Seen) -> None:
        self.layout = token_layout(program, graph, site_shapes(graph, model.preprocess), model.preprocess)
        self.chosen = seen.chosen
        count = min(COLOURED, len(seen.chosen))
        self.wanted = {i * len(seen.chosen) // count for i in range(count)}
        self.found: list[TokenColours] = []

    def seeing(self, number: int) -> See | None:
        """Return a function that keeps the tokens of the chosen image `number`; None if they are not wanted."""
        layout = self.layout
        if layout is None or number not in self.wanted:
            return None
        path, pixels = self.chosen[number]

        def see(name: str, exact: Tensor, integer: Tensor) -> None:
            if name == layout.site:
                self.found.append(token_colours(layout, path, pixels, exact[0].numpy(), integer[0].numpy()))

        return see


def _quality(pairs: EmbeddingPairs, tokens: _TokenPictures | None) -> EmbeddingQuality | None:
    found = pairs.result()
    if found is None or tokens is None or tokens.layout is None:
        return found
    return dataclasses.replace(found, tokens=tokens.found, token_site=tokens.layout.site)


def _exp(program: Program) -> ExpCurves | None:
    """Evaluate the exponentials at the median scale of the program's scores; None if it has no scores."""
    scores = {name: site for name, site in program.header.sites.items() if site.role == "scores" and site.scale}
    if not scores:
        return None
    scale = float(np.median([site.scale[0] for site in scores.values()]))
    buffers = program.verify().buffers
    name, site = next(iter(scores.items()))
    return exp_curves(scale, 2**site.bits, buffers[name].shape[-1])
