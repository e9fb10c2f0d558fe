"""Lowering: from a float model and its calibration to the verified integer program.

This is the last place where a float exists: every scale ends as a multiplier, a shift, a table entry or a bias.
Neighbours: rules.py and rules_attention.py (one rule a leaf module), emit.py (constants and fixed-point encoding).
"""

from __future__ import annotations

import msgspec
import numpy as np

import fqvit.ir.rules_attention  # noqa: F401  # registers its rules
from fqvit.errors import FqvitError
from fqvit.ir.emit import Emitter, Wire
from fqvit.ir.file import VERSION
from fqvit.ir.program import CLASSES, INPUT, Header, Output, Program
from fqvit.ir.rules import Lowering, rule
from fqvit.models import layers
from fqvit.models.graph import IMAGES, Graph, trace
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.fit import check_fit


def lower(model: FloatModel, calibration: Calibration) -> Program:
    """The integer program of `model`, verified. The model is only read."""
    return lower_with_wires(model, calibration)[0]


def lower_with_wires(model: FloatModel, calibration: Calibration) -> tuple[Program, dict[str, Wire]]:
    """Also what every node of the graph became, for comparing float and integer values."""
    graph = trace(model.module, calibration.features)
    check_fit(graph, calibration, model.preprocess, model.name)
    masked = any(isinstance(node.leaf, layers.Softmax) and node.leaf.mask is not None for node in graph.nodes)
    emitter = Emitter(calibration, masked)
    emitter.wires[IMAGES] = Wire(INPUT, (model.preprocess.height, model.preprocess.width, model.preprocess.channels))
    for node in graph.nodes:
        lowering = Lowering(emitter, node, [emitter.wires[name] for name in node.inputs], model.preprocess)
        wire = rule(node.leaf, lowering)
        emitter.wires[node.name] = wire
    header = Header(
        version=VERSION,
        model=model.name,
        preprocess=model.preprocess,
        ops=tuple(emitter.ops),
        output=_output(graph, emitter, calibration),
        sites=emitter.sites(graph),
        # With its defaults, so that the file still says what it was made with when they change.
        recipe={name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(calibration.recipe).items()},
        source=model.source,
        images=calibration.images,
    )
    if model.classes is not None and calibration.features == "logits":
        broken = next((name for name in model.classes if "\n" in name), None)
        if broken is not None:
            raise FqvitError(f"class name {broken!r}: has a line break. Names are kept one a line.")
        emitter.constant(CLASSES, np.frombuffer("\n".join(model.classes).encode(), np.uint8))
    program = Program(header, emitter.constants)
    program.verify()
    return program, emitter.wires


def _output(graph: Graph, emitter: Emitter, calibration: Calibration) -> Output:
    wire = emitter.wires[graph.output]
    if calibration.features == "logits":
        return Output(wire.buffer, "logits", float(wire.unit[0]))
    q = wire.codes()
    return Output(wire.buffer, calibration.features, float(q.scale[0]), int(q.zero[0]), emitter.alpha(q))
