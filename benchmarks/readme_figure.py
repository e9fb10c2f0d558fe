"""Draw docs/assets/results.svg: accuracy and speed of the float model, the paper's method and fqvit.

    .venv/bin/python benchmarks/readme_figure.py [--check]

This is the figure in the README. It is drawn from results/table.csv (benchmarks/paper.py) and results/speed.csv
(benchmarks/speed.py). --check writes nothing and fails if the committed figure is out of date.
"""

from __future__ import annotations

import csv
from pathlib import Path

from figure_file import write_or_check

from fqvit.report.svg import Axis, Canvas, standalone

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "assets" / "results.svg"
MODELS = {"deit_tiny_patch16_224": "DeiT-Tiny", "vit_tiny_patch16_224": "ViT-Tiny"}
METHODS = {"float": ("float", "bar-quiet"), "fq-vit": ("the paper's method, FQ-ViT", "box"), "fqvit": ("fqvit", "bar")}
TIMED = "deit_tiny_patch16_224"
PEERS = {  # column `peer` of speed.csv: (label, method)
    "torch fp32": ("PyTorch float32", "float"),
    "onnxruntime fp32": ("ONNX Runtime float32", "float"),
    "recipe fq-vit": ("FQ-ViT, our engine", "fq-vit"),
    "recipe fqvit": ("fqvit", "fqvit"),
}


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def top1() -> dict[tuple[str, str], float]:
    """Return the top-1 accuracy in percent by (model, method)."""
    return {(row["model"], row["method"]): float(row["top1"]) for row in read("table.csv")}


def milliseconds() -> dict[str, float]:
    """Return the CPU milliseconds per image by peer: DeiT-Tiny with its real weights, batch 1, one thread, AVX2."""
    wanted = {"model": TIMED, "weights": "real", "batch": "1", "threads": "1", "instruction set": "avx2"}
    return {row["peer"]: float(row["CPU ms"]) for row in read("speed.csv") if wanted.items() <= row.items()}


def draw() -> str:
    canvas = Canvas(760, 266)
    x = 20.0
    for name, kind in METHODS.values():
        canvas.rect(kind, (x, 14), (x + 14, 26))
        canvas.text("word", (x + 22, 25), name)
        x += 44 + 7.2 * len(name)
    said = [_accuracy(canvas), _speed(canvas)]
    canvas.text("tick", (20, 254), "1,000 ImageNet validation images")
    canvas.text("tick", (396, 254), "DeiT-Tiny, one thread of a Zen 3 CPU with AVX2")
    return standalone(canvas.finish("Accuracy and speed", " ".join(said)))


def _accuracy(canvas: Canvas) -> str:
    found = top1()
    canvas.text("strong", (20, 56), "Top-1 accuracy, higher is better")
    y = Axis(0, 80, 212, 84)
    canvas.line("base", (20, y(0)), (346, y(0)))
    said = []
    for i, (model, name) in enumerate(MODELS.items()):
        left = 32 + 164 * i
        for j, (method, (_, kind)) in enumerate(METHODS.items()):
            value, at = found[model, method], left + 48 * j
            canvas.rect(kind, (at, y(0)), (at + 40, y(value)), f"{name}, {method}: {value:.1f} %")
            canvas.text("blue" if method == "fqvit" else "word", (at + 20, y(value) - 6), f"{value:.1f}", "middle")
        canvas.text("word", (left + 68, 230), name, "middle")
        said.append(f"{name}: {', '.join(f'{method} {found[model, method]:.1f}' for method in METHODS)} percent.")
    return " ".join(said)


def _speed(canvas: Canvas) -> str:
    found = milliseconds()
    canvas.text("strong", (396, 56), "Milliseconds per image, lower is better")
    x = Axis(0, max(found[peer] for peer in PEERS), 556, 700)
    for i, (peer, (name, method)) in enumerate(PEERS.items()):
        top, value = 80 + 36 * i, found[peer]
        canvas.text("word", (546, top + 17), name, "end")
        canvas.rect(METHODS[method][1], (x(0), top), (x(value), top + 24), f"{name}: {value:.1f} ms")
        canvas.text("blue" if method == "fqvit" else "word", (x(value) + 8, top + 17), f"{value:.1f}")
    return f"DeiT-Tiny: {', '.join(f'{name} {found[peer]:.1f}' for peer, (name, _) in PEERS.items())} milliseconds per image."


if __name__ == "__main__":
    write_or_check(FIGURE, draw(), "readme_figure.py", __doc__)
