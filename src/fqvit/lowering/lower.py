"""Lower a float model and its calibration to a verified integer program.

This is the last stage with floats: every scale becomes a multiplier, a shift, a table entry or a bias.
See also: context.py (facts about the graph), rules/ (one rule per leaf module), emit.py (collects ops), encode.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.program import CLASSES, INPUT, CodeInput, Header, Kind, Output, Program, version_of
from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.rules import lower_node
from fqvit.lowering.rules.base import Lowering
from fqvit.lowering.sites import describe_sites
from fqvit.models.graph import IMAGES, Graph, returned_outputs
from fqvit.models.load import FloatModel
from fqvit.models.requests import Request, parse_outputs
from fqvit.quant.calibration import Calibration
from fqvit.quant.fit import check_fit
from fqvit.quant.recipe import Recipe, check_integer

# Kinds of outputs that hold codes, by their number of axes.
CODE_KINDS: dict[int, Kind] = {1: "pooled", 2: "tokens", 3: "map"}
# Recipe fields that did not exist when the first files were written.
LATER_FIELDS = (
    *("symmetric", "mult", "nonlinear", "intervals", "levels", "keys", "scores", "gelu_floor"),
    *("layer_bits", "widths", "max_size", "ranges", "gelu", "mlps", "outliers", "doubled"),
    *("extremes", "refine_images", "heads"),
)


def lower(model: FloatModel, calibration: Calibration) -> Program:
    """Return the verified integer program of a model. The model is not modified."""
    return lower_with_values(model, calibration)[0]


def lower_with_values(model: FloatModel, calibration: Calibration) -> tuple[Program, dict[str, LoweredValue]]:
    """Like lower, but also return the lowered value of every node, for comparing float and integer values."""
    check_integer(calibration.recipe)
    graph = calibration.graph(model)
    check_fit(graph, calibration, model.preprocess, model.name, model.square)
    context, emitter = LoweringContext.of(graph, model.preprocess, calibration), Emitter()
    image = (model.preprocess.height, model.preprocess.width, model.preprocess.channels)
    values = {IMAGES: LoweredValue(INPUT, model.square or image, calibration.square)}
    for node in graph.nodes:
        values[node.name] = lower_node(Lowering(context, emitter, node, [values[name] for name in node.inputs]))
    output, *others = _outputs(graph, returned_outputs(model.module, graph), calibration, values, emitter)
    header = Header(
        version=version_of(emitter.ops),
        model=model.name,
        preprocess=model.preprocess,
        ops=tuple(emitter.ops),
        output=output,
        sites=describe_sites(graph, calibration, values, emitter),
        # Including defaults, so that the file still describes its recipe if the defaults change.
        recipe=recorded(calibration.recipe),
        source=model.source,
        images=calibration.images,
        others=tuple(others),
        input=_input(model, calibration),
        moves=emitter.moves,
    )
    if model.classes is not None and any(each.kind == "logits" for each in (output, *others)):
        broken = next((name for name in model.classes if "\n" in name), None)
        if broken is not None:
            raise FqvitError(f"class name {broken!r}: contains a line break. Names are stored one per line.")
        emitter.constant(CLASSES, np.frombuffer("\n".join(model.classes).encode(), np.uint8))
    program = Program(header, emitter.constants)
    program.verify()
    return program, values


def recorded(recipe: Recipe) -> dict[str, object]:
    """Return the fields of a recipe as stored in a file.

    LATER_FIELDS with their default values are omitted, so that lowering reproduces the fingerprints of the first files.
    """
    fields = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(recipe).items()}
    defaults = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(Recipe(name="")).items()}
    return {name: value for name, value in fields.items() if name not in LATER_FIELDS or value != defaults[name]}


def _input(model: FloatModel, calibration: Calibration) -> CodeInput | None:
    """Return the description of the input if it is codes (heads of detectors); None if it is pixels."""
    q = calibration.square
    if model.square is None or q is None:
        return None
    return CodeInput(model.square, float(q.scale[0]), int(q.zero[0]), q.bits)


def _outputs(
    graph: Graph, names: Sequence[str], calibration: Calibration, values: Mapping[str, LoweredValue], emitter: Emitter
) -> list[Output]:
    """Describe the outputs with these names, in this order."""
    if calibration.outputs:
        requests = parse_outputs(calibration.outputs)
        return [_named_output(each, values[name], emitter) for each, name in zip(requests, graph.outputs, strict=True)]
    found = []
    for name in names:
        value, features = values[name], calibration.features
        if value.q is None:
            kind: Kind = "deltas" if graph.node(name).leaf.role == "deltas" else "logits" if len(value.shape) == 1 else "scores"
            found.append(Output(value.buffer, kind, float(value.unit[0])))
        else:
            one_scale = len(value.shape) == 1 and value.q.alpha is None and features == "logits"
            kind = "embedding" if one_scale else CODE_KINDS[len(value.shape)] if features == "logits" else features
            found.append(Output(value.buffer, kind, float(value.q.scale[0]), int(value.q.zero[0]), emitter.alpha(value.q)))
    return found


def _named_output(request: Request, value: LoweredValue, emitter: Emitter) -> Output:
    """Describe an output that the user asked for."""
    if value.q is None:
        return Output(
            value.buffer, "logits" if request.name == "logits" else "embedding", float(value.unit[0]), name=request.label
        )
    kind: Kind = "signs" if "sign" in request.modifiers else "tokens" if request.name == "tokens" else "embedding"
    scale, zero = float(value.q.scale[0]), int(value.q.zero[0])
    return Output(value.buffer, kind, scale, zero, emitter.alpha(value.q), request.label)
