"""Render a Report as one self-contained HTML page that loads nothing from the network.

This module writes captions and numbers, template.html arranges them. See also: frame.py (what all pages share), gather.py,
plots.py, maps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fqvit.evaluate.compare import SiteNoise
from fqvit.evaluate.inspect import bits_of
from fqvit.report import embedding_plots, maps, plots
from fqvit.report.data import entropy, used
from fqvit.report.embeddings import Neighbour
from fqvit.report.frame import About, Card, Picture, Subject, cards_of, in_order, render_page, safe
from fqvit.report.gather import Report
from fqvit.report.pareto import NOTHING, Comparison, Measured, size_accuracy
from fqvit.report.predictions import Disagreement, Guess

THUMBNAIL = 160


def pictures(report: Report, measured: Comparison = NOTHING) -> list[Picture]:
    """Draw every figure that this report has data for, in the order of the page."""
    found = [*_size_pictures(report, measured), *_norm_pictures(report), *_attention_pictures(report)]
    if report.exp is not None:
        gaps, tables = report.exp.gaps, report.exp.tables
        caption = (
            "The paper approximates exp by a parabola on (−ln 2, 0] and halves it for every further ln 2. The largest error is"
            f" {gaps['code']:.2e} with the coefficients of the paper’s code (the 1.9e-3 that the paper quotes) and"
            f" {gaps['paper']:.2e} with the coefficients that the paper prints. In integers, at the median score scale of this"
            f" program ({report.exp.scale:.3g}), it is {tables['coarse']:.1e} as the paper’s code computes it,"
            f" {tables['polynomial']:.1e} with more bits, and {tables['table']:.1e} with a lookup table of exp."
        )
        found.append(Picture("i-exp", "I-Exp against exp", caption, plots.exponentials(report.exp)))
    return found


def embedding_pictures(report: Report) -> list[Picture]:
    """Draw the figures about embeddings and tokens; none if the program outputs only logits."""
    quality = report.embeddings
    if quality is None:
        return []
    first = (
        f"Cosine similarity of the vectors of the float model and the integer program, for each of {report.images:,} images."
        " For tokens: the mean over the tokens of an image. 1 means the same direction."
    )
    found = [Picture("embedding-cosines", "Cosine of every image", first, embedding_plots.cosine_histograms(quality))]
    layers = _layers(report)
    if layers:
        second = (
            f"Mean cosine over all tokens at the sites of the residual stream, in network order, for {report.sites.images}"
            " images. A step down shows the layer in which the error arises."
        )
        found.append(Picture("layer-cosines", "Cosine, layer by layer", second, embedding_plots.layer_cosines(layers)))
    if quality.tokens:
        third = (
            f"The patch tokens of {quality.token_site}: their first three principal components as red, green and blue. The"
            " projection is fitted to the float tokens of each image and applied to float and integer tokens, so equal colours"
            " mean equal tokens. The last column shows where they differ; its brightness is the square root of 1 − cosine."
        )
        found.append(Picture("token-colours", "Patch tokens as colours", third, embedding_plots.token_pictures(quality.tokens)))
    return found


def _size_pictures(report: Report, measured: Comparison) -> list[Picture]:
    """Draw this program among others that were measured; nothing if there are none."""
    rows, float_top1 = measured
    if not rows:
        return []
    accuracy = None if report.predictions is None else report.predictions.accuracy()
    recipe = report.program.header.recipe
    points = list(rows)
    caption = (
        "Programs of this model from the table of measurements. The line is the Pareto front: programs that no other program"
        " beats in both size and accuracy. The dashed line is the float model."
    )
    if accuracy is not None:
        name, total = str(recipe.get("name")), report.inspection.total
        points.append(Measured(name, bits_of(recipe), accuracy.integer_top1, total, own=True))
        caption += " The coloured name is this program, on the images of this report."
    drawn = size_accuracy(points, float_top1, report.program.header.model)
    return [Picture("sizes", "Accuracy against file size", caption, drawn)]


def _layers(report: Report) -> list[SiteNoise]:
    """Return the compared sites of the residual stream, in network order; empty if there are fewer than two."""
    found = [row for row in in_order(report.sites, report.inspection) if row.role == "residual" and row.cosine is not None]
    return found if len(found) > 1 else []


def _norm_pictures(report: Report) -> list[Picture]:
    if not report.norms:
        return []
    worst = max(report.norms, key=lambda one: one.ratio)
    ratios = sorted(one.ratio for one in report.norms)
    middle = ratios[len(ratios) // 2]
    first = (
        f"One vertical line per channel at the input of {worst.norm}: its smallest to its largest value over {report.images:,}"
        f" images. The widest range is {worst.ratio:.1f} times the median range. The larger this ratio, the fewer codes a"
        " single scale leaves for the other channels. The Power-of-Two Factor, or a 16-bit residual stream, corrects this."
    )
    second = (
        "Each box spans the quartiles of the channel ranges; the line inside is the median, dots are channels beyond 1.5 box"
        f" lengths. Above each box: widest range ÷ median range, with median {middle:.1f} and maximum {ratios[-1]:.1f}."
    )
    return [
        Picture("channel-ranges", f"Channels before {worst.norm}", first, plots.channel_ranges(worst)),
        Picture("norm-ranges", "Channel ranges, norm by norm", second, plots.norm_boxes(report.norms)),
    ]


def _attention_pictures(report: Report) -> list[Picture]:
    found = []
    if report.attention is not None:
        counts = report.attention
        caption = (
            f"{counts.total:,} softmax outputs of {counts.images} images; {100 * counts.share_below:.1f} % are below 1/16. All"
            f" of these fall into a single uniform bin (of 16), but into {used(counts.below)} of 16 log2 codes. A uniform code"
            f" carries {entropy(counts.uniform):.1f} bits of information per value, a log2 code {entropy(counts.log2):.1f}."
            " The stronger the colour of a cell, the more values it holds."
        )
        found.append(Picture("attention-values", "Attention values", caption, plots.attention_values(counts)))
    for number, one in enumerate(report.maps, 1):
        look = "Attention that each patch receives" if one.kind == "received" else f"Attention of the {one.kind}"
        few = ", ".join(f"{stored.method} {maps.decibels(stored.decibels)}" for stored in one.stored if stored.bits == 4)
        caption = (
            f"{look} in the last layer ({one.site}), averaged over heads; all maps share the brightness scale of the float map."
            " With fewer bits, uniform codes round more small values to 0; log2 codes are nearly as coarse at 8 bits as at 4;"
            " relative codes are fractions of the largest value in each row. Signal-to-noise ratio of the whole layer at 4"
            f" bits: {few}."
        )
        if number > 1:
            caption = f"The same for another image. At 4 bits: {few}."
        title = "Attention maps" if number == 1 else f"Attention maps, image {number}"
        found.append(Picture(f"attention-maps-{number}", title, caption, maps.attention_maps(one)))
    return found


def pictures_of(report: Report, names: Sequence[str], measured: Comparison = NOTHING) -> list[tuple[str, str]]:
    """Draw every figure of the page as (name, SVG), to be written to files."""
    found = [(one.key, one.svg) for one in (*embedding_pictures(report), *pictures(report, measured))]
    found.append(("site-errors", plots.site_errors(in_order(report.sites, report.inspection))))
    rows = report.predictions.by_class() if report.predictions is not None else []
    if any(row.change for row in rows):
        found.append(("class-changes", plots.class_changes([(row, _name(row.label, names)) for row in rows])))
    return found


def render(report: Report, about: About) -> str:
    """Return the page as HTML text. Raises FqvitError if jinja2 is not installed."""
    styles = ("embeddings.css",) if report.embeddings is not None else ()
    return render_page("template.html", subject_of(report), about, _context(report, about), styles)


def subject_of(report: Report) -> Subject:
    """Return what every page says about its program."""
    header = report.program.header
    p = header.preprocess
    return Subject(
        model=header.model,
        source=header.source,
        version=header.version,
        fingerprint=report.fingerprint,
        recipe=header.recipe,
        calibration_images=header.images,
        input=f"uint8 {p.height} × {p.width} × {p.channels}, from {p.steps}",
        images=report.images,
        inspection=report.inspection,
        sites=report.sites,
        parameters=report.parameters,
        speed=report.speed,
    )


def _context(report: Report, about: About) -> dict[str, Any]:
    rows = report.predictions.by_class() if report.predictions is not None else []
    changed = [row for row in rows if row.change]
    named = [(row, _name(row.label, about.names)) for row in rows]
    drawn = pictures(report, about.measured)
    return {
        "report": report,
        "accuracy": None if report.predictions is None else report.predictions.accuracy(),
        "cards": _cards(report),
        "cosine": report.embeddings is not None,
        "embedding_pictures": [(one, safe(one.svg)) for one in embedding_pictures(report)],
        "worst_images": _worst_images(report, about),
        "pictures": [(one, safe(one.svg)) for one in drawn],
        "classes": len(rows),
        "changed": len(changed),
        "class_picture": safe(plots.class_changes(named)),
        "class_rows": [(name, row) for row, name in sorted(named, key=lambda one: (one[0].change, one[1])) if row.change],
        "disagreements": [_disagreement(one, about) for one in report.predictions.disagreements] if report.predictions else [],
        "differing": 0 if report.predictions is None else report.predictions.images - report.predictions.agree,
        "points": _signed,
    }


def _cards(report: Report) -> list[Card]:
    predictions = report.predictions
    cards = []
    accuracy = None if predictions is None else predictions.accuracy()
    if accuracy is not None:
        for name, float_top, integer_top in (
            ("top-1", accuracy.float_top1, accuracy.integer_top1),
            ("top-5", accuracy.float_top5, accuracy.integer_top5),
        ):
            change = f"float {float_top:.1f} %, {_signed(integer_top - float_top)} percentage points"
            cards.append(Card(name, f"{integer_top:.1f} %", change))
    if predictions is not None:
        differing = predictions.images - predictions.agree
        same = f"same class as the float model; {differing} of {predictions.images:,} differ"
        cards.append(Card("agreement", f"{predictions.agreement:.1f} %", same))
    cards += _embedding_cards(report)
    return [*cards, *cards_of(subject_of(report))]


def _embedding_cards(report: Report) -> list[Card]:
    """Return the cards of the main output and of the first output of tokens; the table has all outputs."""
    quality = report.embeddings
    if quality is None:
        return []
    main = next(one for one in quality.outputs if one.name == quality.main)
    tokens = next((one for one in quality.outputs if len(one.shape) > 1 and one is not main), None)
    cards = []
    for one in (main, tokens):
        if one is not None:
            more = f"mean over the images; first percentile {one.first_percentile:.4f}, worst {one.worst:.4f}"
            cards.append(Card(f"cosine, {one.name}", f"{one.mean_cosine:.4f}", more))
    if main.neighbour_agreement is not None:
        same = f"of {main.images:,} images have the same nearest neighbour as in float"
        cards.insert(1, Card("neighbours", f"{main.neighbour_agreement:.1f} %", same))
    return cards


def _worst_images(report: Report, about: About) -> list[dict[str, Any]]:
    shown = []
    for one in () if report.embeddings is None else report.embeddings.worst:
        near: list[tuple[str, Neighbour]] = []
        if one.float_neighbour is not None and one.integer_neighbour is not None:
            same = one.float_neighbour == one.integer_neighbour
            near = [("nearest" if same else "nearest, float", one.float_neighbour)]
            near += [] if same else [("nearest, integer", one.integer_neighbour)]
        neighbours = [(words, _short(other.path, about), other.thumbnail) for words, other in near]
        shown.append(
            {
                "path": _short(one.path, about),
                "thumbnail": maps.jpeg(one.pixels, THUMBNAIL),
                "cosine": one.cosine,
                "neighbours": neighbours,
            }
        )
    return shown


def _short(path: str, about: About) -> str:
    """Return the name of an image without the folder of all images."""
    return path.removeprefix(about.where).lstrip("/\\") or path


def _disagreement(one: Disagreement, about: About) -> dict[str, Any]:
    def lines(guesses: Sequence[Guess]) -> list[tuple[str, float, bool]]:
        return [(_name(guess.label, about.names), 100 * guess.share, guess.label == one.label) for guess in guesses]

    truth = None if one.label is None else _name(one.label, about.names)
    return {
        "path": _short(one.path, about),
        "truth": truth,
        "thumbnail": maps.jpeg(one.pixels, THUMBNAIL),
        "sides": (("float", lines(one.float_guesses)), ("integer", lines(one.integer_guesses))),
    }


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else f"class {label}"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")
