"""`fqvit models`: list the models of the zoo. Needs no torch."""

from __future__ import annotations

from fqvit.cli.output import say, say_json
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.zoo import ROWS, Row
from fqvit.system.text import table

# Where the resize, mean and std of each series come from.
SOURCES = {"fmnist": "its training", "vit": "timm", "swin": "timm", "deit": "the FQ-ViT paper"}


def run(as_json: bool) -> None:
    if as_json:
        say_json({"models": [_facts(row) for row in ROWS]})
        return
    rows = []
    for row in ROWS:
        p = row.preprocess
        size, shape = f"{parameters(row.config) / 1e6:.1f} M", f"{p.height}x{p.width}x{p.channels}"
        mean = "ImageNet mean" if len(set(p.mean)) > 1 else f"mean {p.mean[0]:g}"
        before = f"resize {p.resize}, {p.interpolation}, {mean}"
        rows.append((row.name, " ".join(row.aliases) or "(embedded)", before, SOURCES[row.series], size, shape))
    say(table(("model", "short name", "preprocessing", "as in", "parameters", "input"), rows, left=4))
    say("\nImage size, patch size and number of classes are taken from the checkpoint. (embedded): needs no --weights.")


def _facts(row: Row) -> dict[str, object]:
    p = row.preprocess
    return {
        "name": row.name,
        "aliases": row.aliases,
        "embedded": row.embedded,
        "parameters": parameters(row.config),
        "input": [p.height, p.width, p.channels],
        "classes": row.config.classes,
        "resize": p.resize,
        "interpolation": p.interpolation,
        "mean": p.mean,
        "std": p.std,
        "preprocess_source": SOURCES[row.series],
    }


def parameters(config: ViTConfig | SwinConfig) -> int:
    """Return the number of parameters of a float model."""
    c = config
    patches = c.channels * c.patch**2 * c.width + c.width
    if isinstance(c, ViTConfig):
        tokens = (c.prefix + c.prefix + c.patches) * c.width
        norms = 2 * c.width * (int(c.norm_first) + int(c.norm_last))
        last = c.width * (c.prefix if c.pool == "token" else 1)
        return patches + tokens + c.depth * _block(c.width, c.hidden) + norms + (last + 1) * c.classes
    total, width = patches + 2 * c.width, c.width
    for stage, (depth, heads) in enumerate(zip(c.depths, c.heads, strict=True)):
        if stage:
            total += 8 * width + 8 * width**2  # patch merging: LayerNorm of 4 C, then a linear layer to 2 C without bias
            width *= 2
        window = min(c.window, *c.grid(stage))
        total += depth * (_block(width, c.hidden_ratio * width) + (2 * window - 1) ** 2 * heads)
    return total + 2 * width + (width + 1) * c.classes


def _block(width: int, hidden: int) -> int:
    attention = 4 * width**2 + 4 * width
    return attention + 2 * width * hidden + hidden + width + 4 * width
