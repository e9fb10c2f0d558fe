"""`fqvit models`: list the models of the zoo, the supported families, and the ops of live modules. Needs no torch."""

from __future__ import annotations

import textwrap

from fqvit.cli.output import say, say_json
from fqvit.models import supported
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.zoo import ROWS, Row
from fqvit.system.text import table

# Where the resize, mean and std of each series come from.
SOURCES = {"fmnist": "its training", "vit": "timm", "swin": "timm", "deit": "the FQ-ViT paper"}


def run(as_json: bool) -> None:
    if as_json:
        families = [{"name": family.name, "layouts": family.layouts} for family in supported.FAMILIES]
        ops = {kind: names.split() for kind, names in supported.OPS.items()}
        listed = [_facts(row) for row in ROWS]
        say_json({"models": listed, "families": families, "ops": ops, "moves": supported.MOVES, "folded": supported.FOLDED})
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
    say("\nCheckpoints of these families load in any size, without timm or transformers:\n")
    say(table(("family", "layouts"), [(family.name, family.layouts) for family in supported.FAMILIES], left=2))
    say("\nOther models load as live torch modules, fqvit.load_model(module), if they consist of these ATen ops:\n")
    lines = [(kind, line) for kind, names in supported.OPS.items() for line in _wrapped(names)]
    say(table(("kind", "ops"), [(kind if line[0] != " " else "", line.strip()) for kind, line in lines], left=2))
    say(f"\nThey may also contain {supported.MOVES}\n")
    say(table(("folded", "into"), list(supported.FOLDED.items()), left=2))
    say("\n`fqvit check MODEL` says whether a checkpoint is supported.")


def _wrapped(names: str) -> list[str]:
    """Break a long list of names into lines; all but the first are indented."""
    return textwrap.wrap(", ".join(names.split()), 100, subsequent_indent=" ")


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
            total += 8 * width + 8 * width**2  # patch merging: LayerNorm of 4 * C, then linear to 2 * C without bias
            width *= 2
        window = min(c.window, *c.grid(stage))
        total += depth * (_block(width, c.hidden_ratio * width) + (2 * window - 1) ** 2 * heads)
    return total + 2 * width + (width + 1) * c.classes


def _block(width: int, hidden: int) -> int:
    attention = 4 * width**2 + 4 * width
    return attention + 2 * width * hidden + hidden + width + 4 * width
