"""Calibration images that workers share: each observes some batches, the first one folds and finishes, all get the result.

Batches and the sample are positions in the source, known before anything is read, so that they do not depend on who reads
what. Its neighbour calibrate.py has what happens to a batch, and plain iterables for one worker.
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


class Observing(Mergeable, Protocol):
    def observe(self, batch: NDArray[np.uint8], last: bool) -> None: ...


def observe(
    found: Observing, source: Source, recipe: Recipe, workers: Workers, progress: Progress | None
) -> Callable[[], NDArray[np.uint8]]:
    """Afterwards the first worker's `found` has seen all images, and `source.skipped` lists what nobody could read.

    Gives a function for the first worker: the sample for rounding and `auto`, uint8 [n, H, W, C].
    """
    rules = hashlib.sha256(msgspec.json.encode(recipe)).hexdigest()[:8]
    workers.agree("calibration", f"recipe {recipe.name} ({rules})", "Start all workers with the same command.")
    workers.agree("calibration images", f"{len(source)} of them", "Start all workers with the same command.")
    chosen = source.limit(recipe.images)
    if recipe.shuffle is not None:
        chosen = chosen.take(np.random.default_rng(recipe.shuffle).permutation(len(chosen)).tolist())
    count = -(-len(chosen) // recipe.batch)
    # The original code's last batch depends on what all before it gave, so it cannot be dealt.
    dealt = count - 1 if recipe.last_batch else count
    share = workers.share(dealt)
    batches = chosen.batches(recipe.batch, share)
    for batch in progress(batches, len(share), "calibrating") if progress and workers.first else batches:
        found.observe(batch.images, last=False)
    skipped = list(chosen.skipped)
    workers.merge(found)
    if dealt < count and workers.first:
        for batch in chosen.batches(recipe.batch, range(dealt, count)):
            found.observe(batch.images, last=True)
        skipped += chosen.skipped
    chosen.skipped = skipped
    chosen.merge_skipped(workers)
    source.skipped = chosen.skipped

    def sample() -> NDArray[np.uint8]:
        # Read again rather than kept: 128 pictures are soon decoded, and nobody has to send them.
        part = chosen.take(sample_positions(len(chosen), sample_size(recipe)))
        return np.concatenate([batch.images for batch in part.batches(recipe.batch)])

    return sample


def share(result: Calibration | None, workers: Workers) -> Calibration:
    """The first worker's calibration, for all of them. Others pass None."""
    if workers.size == 1:
        assert result is not None
        return result
    sent = None if result is None else {"text": result.to_json(), "choice": msgspec.to_builtins(result.choice)}
    received = workers.broadcast(sent)
    if result is not None:
        return result
    found = Calibration.from_json(received["text"])
    return replace(found, choice=msgspec.convert(received["choice"], Choice | None))
