"""`fqvit check`: say whether a model is supported, before any calibration, and what its preprocessing is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fqvit.cli import inputs
from fqvit.cli.output import about_inputs, preprocessing_source, say, say_json
from fqvit.models.locate import located
from fqvit.system.text import facts


def run(name: str | None, weights: str | None, settings: dict[str, Any], as_json: bool) -> None:
    name, weights = located(name, weights)
    inputs.require_torch("check")
    model = inputs.float_model(name, weights, **settings)
    from fqvit.models.graph import Captured, trace
    from fqvit.models.load import class_count
    from fqvit.models.outputs import available

    graph = trace(model.module)
    parity = model.module.parity if isinstance(model.module, Captured) else None
    p = model.preprocess
    names, layers = available(model.module, (p.channels, p.height, p.width))
    found: dict[str, Any] = {
        "model": model.name,
        "supported": True,
        "source": model.source,
        "classes": class_count(model),
        "outputs": len(graph.outputs),
        "named_outputs": list(names),
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "input": [p.height, p.width, p.channels],
        "resize": p.resize,
        "squash": p.squash,
        "interpolation": p.interpolation,
        "mean": p.mean,
        "std": p.std,
        "preprocess_source": preprocessing_source(model),
        "assumed": model.assumed,
        "leaves": dict(Counter(type(node.leaf).__name__ for node in graph.nodes)),
        "captured": parity is not None,
        "parity": parity,
    }
    if as_json:
        say_json(found)
        return
    output = f"{found['classes']} logits" if found["classes"] else "features, no classifier"
    more = f", and {len(graph.others)} more outputs" if graph.others else ""
    rows = [
        ("supported", "yes" if parity is None else "yes, captured with torch.export"),
        ("source", model.source),
        ("output", output + more),
        ("outputs", ", ".join(names) + (f", layers @0 to @{layers - 1}" if layers else "")),
        ("parameters", f"{found['parameters'] / 1e6:.1f} M"),
        *about_inputs(model),
        ("graph", ", ".join(f"{count} {kind}" for kind, count in sorted(found["leaves"].items()))),
    ]
    if parity is not None:
        rows.append(("float parity", f"within {parity:.1e} of the largest output, on random images"))
    say(f"{model.name}\n" + facts(rows))
