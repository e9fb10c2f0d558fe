"""`fqvit check`: say whether a model is supported, before any calibration, and what its preprocessing is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.system.text import facts


def run(name: str | None, weights: str | None, as_json: bool) -> None:
    inputs.check_name(name, weights)
    inputs.require_torch("check")
    from fqvit.models.graph import Captured, trace

    model = inputs.float_model(name, weights)
    graph = trace(model.module)
    parity = model.module.parity if isinstance(model.module, Captured) else None
    p = model.preprocess
    found: dict[str, Any] = {
        "model": model.name,
        "supported": True,
        "source": model.source,
        "classes": model.module.classes if isinstance(model.module, Captured) else inputs.classes_of(model),
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "input": [p.height, p.width, p.channels],
        "resize": p.resize,
        "squash": p.squash,
        "interpolation": p.interpolation,
        "mean": p.mean,
        "std": p.std,
        "assumed": model.assumed,
        "leaves": dict(Counter(type(node.leaf).__name__ for node in graph.nodes)),
        "captured": isinstance(model.module, Captured),
        "parity": parity,
    }
    if as_json:
        say_json(found)
        return
    resize = f"squash to {p.height}x{p.width}" if p.squash else f"short side {p.resize}, center crop {p.height}x{p.width}"
    rows = [
        ("supported", "yes, captured with torch.export" if found["captured"] else "yes"),
        ("source", model.source),
        ("output", f"{found['classes']} logits" if found["classes"] else "features"),
        ("parameters", f"{found['parameters'] / 1e6:.1f} M"),
        ("preprocessing", f"{resize}, {p.interpolation}, mean {_numbers(p.mean)}, std {_numbers(p.std)}"),
        ("assumed", "; ".join(model.assumed) or "nothing"),
        ("graph", ", ".join(f"{count} {kind}" for kind, count in sorted(found["leaves"].items()))),
    ]
    if parity is not None:
        rows.append(("float parity", f"{parity:.1e} of the largest output, on two random images"))
    say(f"{model.name}\n" + facts(rows))


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in dict.fromkeys(values))
