"""The paper's Table 3 and Figure 1: each part of the method on and off, accuracy beside bit operations. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.quant.recipe import Recipe, load_recipe
from fqvit.study.bitops import giga, layers_of, paper_bitops
from fqvit.study.methods import Method
from fqvit.study.published import ABLATION

if TYPE_CHECKING:
    from fqvit.study.table import Row

PAPER_MODEL = "vit_base_patch16_224"


@dataclass(frozen=True)
class Setting:
    """Power-of-Two Factor, Log-Int-Softmax, bits of attention; `partial` quantizes neither LayerNorm nor Softmax."""

    method: Method
    ptf: bool
    lis: bool
    attention_bits: int
    partial: bool = False


def settings() -> list[Setting]:
    """`partial` (Figure 1), then PTF off and on, times uniform and Log-Int-Softmax, at 8 and at 4 bits."""
    found = [Setting(Method("partial", load_recipe("partial")), False, False, 8, partial=True)]
    for bits in (8, 4):
        for ptf in (False, True):
            for lis in (False, True):
                label = f"{'PTF' if ptf else '-'} {'LIS' if lis else '-'} {bits}"
                recipe = Recipe(
                    name=label,
                    residual="ptf" if ptf else "tensor",
                    # 8-bit log2 codes are not those of a program: there are none below 2^-15 that would change a sum.
                    attention="uniform" if not lis else "log2" if bits == 4 else "log2-wide",
                    attention_bits=bits,
                )
                found.append(Setting(Method(label, recipe), ptf, lis, bits))
    return found


def rows(cells: Sequence[Row], configs: Mapping[str, ViTConfig | SwinConfig]) -> list[dict[str, object]]:
    """A flat row for every cell, with its setting, its bit operations in the paper's convention (G) and the paper's figure."""
    from fqvit.study.table import flat

    known = {setting.method.label: setting for setting in settings()}
    told = []
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
                part["bitops"] = sum(paper_bitops(layer, *key) for layer in layers_of(configs[cell.model])) / 1e9
        published = cell.published
        if setting is not None and not setting.partial and cell.model == PAPER_MODEL:
            published = ABLATION.get((setting.ptf, setting.lis, setting.attention_bits))
        told.append({**flat(cell), **part, "published": published})
    return told


def markdown(cells: Sequence[Row], told: Sequence[Mapping[str, object]]) -> str:
    """One table a model."""
    from fqvit.study.table import difference, grid, title_of

    parts = []
    for model in dict.fromkeys(cell.model for cell in cells):
        chosen = [(cell, row) for cell, row in zip(cells, told, strict=True) if cell.model == model]
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
        "partial: LayerNorm and Softmax in float, MinMax elsewhere. \\* simulated in float; an 8-bit Log-Int-Softmax has codes"
        " that no program needs. BitOPs in the paper's convention (`fqvit bitops`), for one image."
    )
    return "\n\n".join([*parts, notes]) + "\n"
