"""The parts that the pages of all programs share: cards, sites, recipe, bytes, proofs, how the report was made.

base.html arranges them; the templates of page.py and detector_page.py extend it. jinja2 escapes all text that comes from files.
"""

from __future__ import annotations

import base64
import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparison as SiteComparison
from fqvit.evaluate.compare import SiteNoise
from fqvit.evaluate.inspect import Inspection, bits_of
from fqvit.report import MISSING, plots
from fqvit.report.pareto import NOTHING, Comparison
from fqvit.report.svg import asset
from fqvit.system.text import size

if TYPE_CHECKING:
    from fqvit.report.speed import Speed


@dataclass(frozen=True)
class About:
    """How the report was made.

    where: the folder or source of the images; names: the class names; warnings: shown on the page; skipped: the number of
    images that could not be read; measured: other programs of this model, for the figure of accuracy against size
    """

    command: str
    file: str
    where: str
    date: str
    names: Sequence[str]
    warnings: Sequence[str] = ()
    skipped: int = 0
    measured: Comparison = NOTHING


@dataclass(frozen=True)
class Picture:
    """A figure of the page. key: its file name and its anchor."""

    key: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Card:
    """One number of the summary: its name, its value (`figure`) and a line that explains it (`more`)."""

    name: str
    figure: str
    more: str


@dataclass(frozen=True)
class Subject:
    """What every page says about its program. recipe: as in the file's header   parameters: of the float model

    input: what the program reads, in words   calibration_images: number of images that it was calibrated with
    """

    model: str
    source: str
    version: int
    fingerprint: str
    recipe: Mapping[str, Any]
    calibration_images: int
    input: str
    images: int
    inspection: Inspection
    sites: SiteComparison
    parameters: int
    speed: Speed


def cards_of(subject: Subject) -> list[Card]:
    """Return the cards about size, speed and proofs."""
    found, floats, speed = subject.inspection, 4 * subject.parameters, subject.speed
    times = f"{speed.integer_ms:.3g} ms per image, PyTorch {speed.float_ms:.3g} ms"
    tightest = min((proof.headroom for proof in found.proofs), default=math.inf)
    return [
        Card("bits", bits_of(subject.recipe), "weights / activations / attention"),
        Card("file", size(found.total), f"{floats / found.total:.1f} times smaller than float32 ({size(floats)})"),
        Card("speed (rough)", f"{speed.ratio:.1f}×", f"{times}; one thread, {speed.isa}"),
        Card("float operations", str(found.floats), f"in {len(found.ops)} ops, from pixels to the output"),
        Card("overflow proofs", f"{len(found.proofs):,}", f"all hold; the tightest has {tightest:.1f} bits of headroom"),
    ]


def in_order(sites: SiteComparison, inspection: Inspection) -> list[SiteNoise]:
    """Return the compared sites in network order. The features that a detector's head reads come before its ops."""
    ops = {row.y: i for i, row in enumerate(inspection.ops)}
    starts: dict[str, float] = {}
    for name, i in ops.items():
        starts.setdefault(name.rpartition("/")[0], i - 0.5)
    return sorted(sites.sites, key=lambda row: ops.get(row.site, starts.get(row.site.rpartition("/")[0], len(ops))))


def render_page(template: str, subject: Subject, about: About, context: Mapping[str, Any], styles: Sequence[str] = ()) -> str:
    """Return a page as HTML text. Raises FqvitError if jinja2 is not installed.

    template: a file of this package that extends base.html   context: what it needs   styles: more style sheets of this package
    """
    try:
        import jinja2
    except ImportError:
        raise FqvitError(MISSING) from None
    files = jinja2.FunctionLoader(asset)
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=files, undefined=jinja2.StrictUndefined, **options)
    style = "".join(map(asset, ("chart.css", "page.css", *styles)))
    script = asset("page.js")
    every = {**_context(subject, about), **context, "style": safe(style), "script": safe(script)}
    return environment.get_template(template).render(**every, policy=_policy(style, script))


def safe(text: str) -> Any:
    """Mark text that needs no escaping: files of this package, and figures, whose text was escaped when they were drawn."""
    from markupsafe import Markup

    return Markup(text)


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows the style and the script of this page and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (style, script)]
    rules = (
        "default-src 'none'",
        "img-src data:",
        f"style-src 'sha256-{hashes[0]}'",
        f"script-src 'sha256-{hashes[1]}'",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _context(subject: Subject, about: About) -> dict[str, Any]:
    """Return what base.html needs."""
    found, noises = subject.inspection, in_order(subject.sites, subject.inspection)
    known = {row.site: row for row in noises}
    return {
        **vars(subject),
        "about": about,
        "recipe_name": subject.recipe.get("name", "unnamed"),
        "recipe": [(key, _plain(value)) for key, value in subject.recipe.items()],
        "found": found,
        "noise_picture": safe(plots.site_errors(noises)),
        "compared": subject.sites.images,
        "sites": [(i, row, known.get(row.site)) for i, row in enumerate(found.sites, 1)],
        "worst": min((row for row in noises if row.integer_db is not None), key=lambda row: row.integer_db or 0, default=None),
        "cosine": any(row.cosine is not None for row in noises),
        "bytes": [(kind, count, 100 * count / max(found.total, 1)) for kind, count in found.bytes.items()],
        "proofs": found.tightest(),
        "versions": _versions(),
        "machine": _machine(subject.speed.isa),
    }


def _plain(value: object) -> str:
    if isinstance(value, dict):
        rules = (f"{key}: {_plain(rule)}" if isinstance(rule, dict) else f"{key} {_plain(rule)}" for key, rule in value.items())
        return "; ".join(rules) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for name in ("fqvit", "torch", "numpy", "pillow"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def _machine(isa: str) -> str:
    from fqvit.bench.report import machine

    return f"{machine()['cpu']}, {platform.system()} {platform.machine()}, kernels {isa}"
