"""Build the settings and rows of the paper's Table 3 and Figure 1: each part of the method on and off.

Needs no torch. See also: figure1.py (the bar chart), bitops.py, published.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fqvit.quant.recipe import Recipe, load_recipe
from fqvit.study.bitops import Layer, giga, paper_bitops
from fqvit.study.methods import Method
from fqvit.study.published import ABLATION

if TYPE_CHECKING:
    from fqvit.study.table import Row

PAPER_MODEL = "vit_base_patch16_224"


@dataclass(frozen=True)
class Setting:
    """One row of the ablation. ptf: Power-of-Two Factor; lis: Log-Int-Softmax; partial: LayerNorm and Softmax stay in float."""

    method: Method
    ptf: bool
    lis: bool
    attention_bits: int
    partial: bool = False


def settings() -> list[Setting]:
    """Return `partial` (Figure 1), then each combination of 8 or 4 attention bits, PTF off or on, and LIS off or on."""
    found = [Setting(Method("partial", load_recipe("partial")), False, False, 8, partial=True)]
    for bits in (8, 4):
        for ptf in (False, True):
            for lis in (False, True):
                label = f"{'PTF' if ptf else '-'} {'LIS' if lis else '-'} {bits}"
                recipe = Recipe(
                    name=label,
                    residual="ptf" if ptf else "tensor",
                    # Integer programs have no 8-bit log2 codes: attention below 2^-15 would not change any sum.
                    attention="uniform" if not lis else "log2" if bits == 4 else "log2-wide",
                    attention_bits=bits,
                )
                found.append(Setting(Method(label, recipe), ptf, lis, bits))
    return found


def rows(cells: Sequence[Row], layers: Mapping[str, list[Layer]]) -> list[dict[str, object]]:
    """Flatten every cell and add its setting, its bit operations (G, in the paper's convention) and the published top-1."""
    from fqvit.study.table import flat

    known = {setting.method.label: setting for setting in settings()}
    flat_rows = []
    for cell in cells:
        setting = known.get(cell.method)
        part: dict[str, object] = {"partial": None, "ptf": None, "lis": None, "attention_bits": None, "bitops": None}
        if setting is not None:
            key = (setting.ptf, setting.lis, setting.attention_bits)
            part = {
                "partial": setting.partial,
                "ptf": setting.ptf,
                "lis": setting.lis,
                "attention_bits": key[2],
                "bitops": None,
            }
            if not setting.partial:
                part["bitops"] = sum(paper_bitops(layer, *key) for layer in layers[cell.model]) / 1e9
        published = cell.published
        if setting is not None and not setting.partial and cell.model == PAPER_MODEL:
            published = ABLATION.get((setting.ptf, setting.lis, setting.attention_bits))
        flat_rows.append({**flat(cell), **part, "published": published})
    return flat_rows


def markdown(cells: Sequence[Row], flat_rows: Sequence[Mapping[str, object]]) -> str:
    """Format one table per model."""
    from fqvit.study.table import difference, grid, title_of

    parts = []
    for model in dict.fromkeys(cell.model for cell in cells):
        chosen = [(cell, row) for cell, row in zip(cells, flat_rows, strict=True) if cell.model == model]
        known = any(row["published"] is not None for _, row in chosen)
        head = ["W/A/Attn", "PTF", "LIS", "top-1", "against float", "agreement", "BitOPs, G", *(["published"] if known else [])]
        body = []
        for cell, row in chosen:
            exact = cell.runs == "float"
            on = ["yes" if row[part] else "-" for part in ("ptf", "lis")]
            name = "float" if exact else f"partial {cell.bits} *" if row["partial"] else cell.bits
            line = [f"{name} *" if cell.runs == "simulation" and not row["partial"] else name]
            line += ["", ""] if exact or row["partial"] else on
            line += [
                f"{cell.top1:.1f}",
                "" if exact else difference(cell.against_float),
                "" if exact else f"{cell.agreement:.1f}",
            ]
            line.append("" if row["bitops"] is None else giga(cast(float, row["bitops"])))
            if known:
                line.append("" if row["published"] is None else f"{row['published']:.2f}")
            body.append(line)
        parts.append(f"{title_of([cell for cell, _ in chosen])}\n\n{grid(head, body, 3)}")
    notes = (
        "partial: LayerNorm and Softmax in float, MinMax elsewhere. \\* simulated in float; integer programs have no 8-bit"
        " Log-Int-Softmax. BitOPs per image, in the paper's convention (`fqvit bitops`)."
    )
    return "\n\n".join([*parts, notes]) + "\n"
