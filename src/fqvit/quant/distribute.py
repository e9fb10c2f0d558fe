"""Distribute calibration batches over workers and merge the observer states.

Each worker observes some of the batches; the first worker merges the states and computes the calibration, which all workers
receive. Batches, and the sample of images that refining methods read again, are lists of positions in the source. They are
known before any image is read, so they do not depend on the number of workers.
See also: calibrate.py (observes a batch), distributed/workers.py (communication).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.images import Source
from fqvit.distributed.workers import Mergeable, Workers
from fqvit.quant.batches import sample_positions, sample_size
from fqvit.quant.calibration import Calibration, Choice
from fqvit.quant.recipe import Recipe
from fqvit.system.progress import Progress


class BatchObserver(Mergeable, Protocol):
    """An observer of batches whose states can be merged across workers."""

    def observe(self, batch: NDArray[np.uint8], last: bool) -> None: ...


def observe(
    observer: BatchObserver, source: Source, recipe: Recipe, workers: Workers, progress: Progress | None
) -> Callable[[], NDArray[np.uint8]]:
    """Observe at most recipe.images images of `source`. Afterwards the first worker's `observer` has seen all of them.

    `source.skipped` then lists the images that could not be read. Returns a function for the first worker that reads the sample
    for methods that refine a calibration: uint8 [n, H, W, C].
    """
    digest = hashlib.sha256(msgspec.json.encode(recipe)).hexdigest()[:8]
    workers.agree("calibration", f"recipe {recipe.name} ({digest})", "Start all workers with the same command.")
    workers.agree("calibration images", f"{len(source)} images", "Start all workers with the same command.")
    chosen = source.limit(recipe.images)
    if recipe.shuffle is not None:
        chosen = chosen.take(np.random.default_rng(recipe.shuffle).permutation(len(chosen)).tolist())
    count = -(-len(chosen) // recipe.batch)
    # With last_batch, the last batch depends on the statistics of all others, so the first worker observes it after the merge.
    distributed = count - 1 if recipe.last_batch else count
    share = workers.share(distributed)
    batches = chosen.batches(recipe.batch, share)
    for batch in progress(batches, len(share), "calibrating") if progress and workers.first else batches:
        observer.observe(batch.images, last=False)
    skipped = list(chosen.skipped)
    workers.merge(observer)
    if distributed < count and workers.first:
        for batch in chosen.batches(recipe.batch, range(distributed, count)):
            observer.observe(batch.images, last=True)
        skipped += chosen.skipped
    chosen.skipped = skipped
    chosen.merge_skipped(workers)
    source.skipped = chosen.skipped

    def sample() -> NDArray[np.uint8]:
        # Read the sample again instead of keeping it: decoding a few hundred images is fast, and no worker has to send any.
        part = chosen.take(sample_positions(len(chosen), sample_size(recipe)))
        return np.concatenate([batch.images for batch in part.batches(recipe.batch)])

    return sample


def broadcast(result: Calibration | None, workers: Workers) -> Calibration:
    """Send the first worker's calibration to all workers and return it. Other workers pass None."""
    if workers.size == 1:
        assert result is not None
        return result
    sent = None if result is None else {"text": result.to_json(), "choice": msgspec.to_builtins(result.choice)}
    received = workers.broadcast(sent)
    if result is not None:
        return result
    found = Calibration.from_json(received["text"])
    return replace(found, choice=msgspec.convert(received["choice"], Choice | None))
