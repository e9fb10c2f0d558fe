"""`fqvit detect table`: compare methods by the average precision of detectors, as in Table 2 of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fqvit.cli import inputs
from fqvit.cli.commands import detectors, study
from fqvit.cli.options import DetectorStudyOptions
from fqvit.cli.output import warn, warn_of_skipped
from fqvit.detect.image_files import ImageFiles
from fqvit.detect.settings import read_settings
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import CocoImages, categories_of, open_coco, require_pycocotools
from fqvit.quant.recipe import check_integer

if TYPE_CHECKING:
    from fqvit.study.detector_cells import DetectorBench
    from fqvit.study.detector_table import DetectorRow
    from fqvit.study.methods import Method

# The methods of the paper's Table 2, then our default recipe.
DEFAULT = "minmax,ema,percentile,omse,fq-vit-8,fq-vit,fqvit"


def run(methods: str | None, bits: str | None, options: DetectorStudyOptions, out: Sequence[Path], as_json: bool) -> None:
    from fqvit.study.methods import parse, with_images

    chosen = parse(DEFAULT if methods is None else methods, bits)
    if options.images is not None:
        if options.images < 1:
            raise FqvitError(f"--images {options.images}: expected at least 1.")
        chosen = [with_images(method, options.images) for method in chosen]
    for method in chosen:
        assert method.recipe is not None
        check_integer(method.recipe)
    weights = _weights(options.weights)
    if options.calib is None or options.data is None:
        missing = "--calib DIR" if options.calib is None else "--data DIR"
        raise FqvitError(f"detect table: no images given. Pass a folder of images ({missing}).")
    study.check_outputs(out, *weights.values(), options.settings, options.annotations)
    detectors.check_threads(options.threads)
    require_pycocotools()
    data = open_coco(options.data, options.annotations, options.limit)
    study.check_outputs(out, data.annotations)
    inputs.require_torch("detect table")
    ran = study.CellCounts()
    rows: list[DetectorRow] = []
    for bench in _benches(weights, data, options):
        rows += _run_cells(bench, chosen, ran)
    from fqvit.study.detector_table import markdown

    study.write_results(ran, [msgspec.to_builtins(row) for row in rows], markdown(rows), out, as_json)


def _weights(given: Sequence[str] | None) -> dict[str, Path]:
    """Parse --weights: FILE or NAME=FILE, separated by commas or in several options. Returns {name in the table: file}."""
    found: dict[str, Path] = {}
    for word in (word for each in given or () for word in each.split(",") if word):
        name, equals, file = word.partition("=")
        path = Path(file if equals and file else word)
        name = name if equals and file else path.stem
        if name in found:
            raise FqvitError(f"--weights: {name} is given twice. Name each detector once (--weights NAME=FILE).")
        if not path.is_file():
            raise FqvitError(f"{path}: no such file. Pass a checkpoint of a detector (--weights FILE).")
        found[name] = path
    if not found:
        raise FqvitError("detect table: no checkpoint given. Pass the weights of a detector (--weights FILE).")
    return found


def _benches(weights: dict[str, Path], data: CocoImages, options: DetectorStudyOptions) -> Iterator[DetectorBench]:
    """Yield one bench per detector, so that only one detector is in memory at a time."""
    import torch

    from fqvit.detect.fixed.constants import check_settings
    from fqvit.detect.model.load import load_detector
    from fqvit.models.device import keep_freed_memory
    from fqvit.study.cells import Cache
    from fqvit.study.detector_cells import DetectorBench

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    assert options.calib is not None
    changes = None if options.settings is None else read_settings(options.settings)
    calib = ImageFiles.in_folder(options.calib)
    cache = Cache(options.cache or study.default_cache(), options.fresh)
    said: set[str] = set()  # the same warning may concern several detectors
    for name, path in weights.items():
        detector = load_detector(path, changes)
        config = detector.module.config
        check_settings(detector.settings, len(config.backbone.depths) + 1, config.stages)
        for warning in categories_of(data, detector.settings, config.classes)[1]:
            if warning not in said:
                warn(warning)
            said.add(warning)
        yield DetectorBench(name, detector, calib.limit, data, cache, warn_of_skipped, options.threads)


def _run_cells(bench: DetectorBench, methods: Sequence[Method], ran: study.CellCounts) -> list[DetectorRow]:
    """Run the float detector and every method. A method that fails does not stop the others."""
    from fqvit.study.cells import CacheError
    from fqvit.study.detector_table import row
    from fqvit.study.methods import FLOAT

    exact, reused = bench.result(FLOAT)
    ran.reused += reused
    bench.data.files.skipped[:] = exact.skipped
    warn_of_skipped(bench.data.files)
    rows = [row(bench, FLOAT, exact, exact)]
    for method in methods:
        try:
            result, reused = bench.result(method)
        except CacheError:
            raise  # every cell would fail
        except FqvitError as error:
            ran.failed.append(f"{bench.name} {method.label}: {error}")
            continue
        rows.append(row(bench, method, result, exact))
        ran.reused += reused
    return rows
