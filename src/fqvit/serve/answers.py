"""Turn the integers of a model into the answers of the endpoints."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from fqvit.detect.results import coco_results, named
from fqvit.errors import FqvitError
from fqvit.inference.embeddings import decode
from fqvit.inference.results import best_scores
from fqvit.serve.bodies import Input
from fqvit.serve.hosted import HostedDetector, HostedProgram
from fqvit.serve.limits import Rejected
from fqvit.serve.schemas import (
    Classification,
    Classified,
    Codes,
    Detected,
    Detection,
    Detections,
    Embedding,
    EmbeddingList,
    Mask,
    Score,
)

MOST_CLASSES = 1000
FORMATS = ("float", "base64", "int")


async def classify(hosted: HostedProgram, request: Input) -> Classification:
    """Return the best classes of each image. Field `top`: number of classes, 5 by default"""
    top = _number(request, "top", 5, 1, MOST_CLASSES)
    program = hosted.program
    scale = program.engine.header.output.scale
    results = []
    for outputs in await hosted.outputs(request.files):
        scores = best_scores(next(iter(outputs.values())), scale, program.classes, top)
        results.append(Classified(top=[Score.model_validate({"class": one.index, **asdict(one)}) for one in scores]))
    return Classification(model=hosted.name, fingerprint=program.fingerprint, results=results)


async def embed(hosted: HostedProgram, request: Input) -> EmbeddingList:
    """Return the embedding of each image. Fields: `output`, `encoding_format` (float, base64 or int), `dimensions`"""
    try:
        info = hosted.embedding(_text(request, "output", None))
    except FqvitError as error:
        raise Rejected(400, str(error)) from None
    encoding = _text(request, "encoding_format", "float")
    if encoding not in FORMATS:
        raise Rejected(400, f"encoding_format: {encoding!r}, expected one of {', '.join(FORMATS)}.")
    codes = np.stack([outputs[info.name] for outputs in await hosted.outputs(request.files)])
    values = codes if encoding == "int" else decode(info, codes)
    _number(request, "dimensions", values.shape[1], values.shape[1], values.shape[1])
    rows = (
        values.tolist() if encoding != "base64" else [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in values]
    )
    return EmbeddingList(
        data=[Embedding(index=index, embedding=row) for index, row in enumerate(rows)],
        model=hosted.name,
        fingerprint=hosted.program.fingerprint,
        codes=Codes(scale=info.scale, zero=info.zero) if encoding == "int" else None,
    )


async def detect(hosted: HostedDetector, request: Input) -> Detections:
    """Return the detections of each image. Fields: `score`: minimum score, 0 by default; `masks`: true adds masks"""
    least = _number(request, "score", 0.0, 0.0, 1.0)
    masks = _flag(request, "masks")
    settings = hosted.detector.detector.header.settings
    results = []
    for found in await hosted.detections(request.files):
        rows = await hosted.shared.in_thread(lambda found=found: named(coco_results(found, 0, settings), "", settings))
        detections = [
            Detection(
                **{"class": row["category_id"]},
                box=row["bbox"],
                score=row["score"],
                name=row["category"],
                mask=Mask(**row["segmentation"]) if masks else None,
            )
            for row in rows
            if row["score"] >= least
        ]
        results.append(Detected(height=found.height, width=found.width, detections=detections))
    return Detections(model=hosted.name, fingerprint=hosted.detector.fingerprint, results=results)


def _text(request: Input, name: str, default: Any) -> Any:
    value = request.fields.get(name, default)
    if value is not default and not isinstance(value, str):
        raise Rejected(400, f"{name}: {type(value).__name__}, expected a string.")
    return value


def _number(request: Input, name: str, default: Any, least: Any, most: Any) -> Any:
    """Return a field, converted to the type of `default`. Forms and query strings contain numbers as text."""
    value = request.fields.get(name, default)
    kind = type(default)
    try:
        number = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number <= most:
        expected = f"{least:g} to {most:g}" if least != most else f"{least:g}"
        raise Rejected(400, f"{name}: {str(value)[:40]!r}, expected {expected}.")
    return number


def _flag(request: Input, name: str) -> bool:
    value = request.fields.get(name, False)
    try:
        return msgspec.convert(value, bool, strict=False)
    except msgspec.ValidationError:
        raise Rejected(400, f"{name}: {str(value)[:40]!r}, expected true or false.") from None
