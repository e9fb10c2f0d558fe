"""Encode masks in COCO's run-length encoding (RLE), and decode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError

MAX_SHIFT = 60  # a length is encoded in at most 65 bits; images have fewer than 2^63 pixels


class Runs(TypedDict):
    """A mask in COCO's compressed RLE. size: height, width   counts: encoded run lengths of the columns, see to_runs"""

    size: list[int]
    counts: str


def run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Return the lengths of the runs of False, True, False, ... column by column; the first may be 0."""
    columns = np.flatnonzero(mask.any(0))
    first, last = (columns[0], columns[-1] + 1) if len(columns) else (0, 0)
    # Only columns with True pixels are scanned: a mask is a small part of a large image.
    flat = np.append(mask[:, first:last].ravel(order="F"), False).view(np.int8)
    changes = np.flatnonzero(np.diff(flat, prepend=np.int8(0))) + first * len(mask)
    changes = changes[changes < mask.size]
    lengths: list[int] = np.diff(np.concatenate([[0], changes, [mask.size]])).tolist()
    return lengths


def to_runs(mask: NDArray[np.bool_]) -> Runs:
    """Encode a mask in COCO's compressed RLE.

    Each length (from the fourth on, its difference from the length two before) is written in groups of five bits, the least
    significant group first. A sixth bit is set if more groups follow. A character is the six bits plus 48.
    """
    lengths = run_lengths(mask)
    letters = []
    for i, length in enumerate(lengths):
        value = length - lengths[i - 2] if i > 2 else length
        more = True
        while more:
            group = value & 0x1F
            value >>= 5
            more = value != (-1 if group & 0x10 else 0)
            letters.append(chr((group | 0x20 if more else group) + 48))
    return Runs(size=[mask.shape[0], mask.shape[1]], counts="".join(letters))


def from_runs(runs: Runs) -> NDArray[np.bool_]:
    """Decode a mask: the inverse of to_runs."""
    height, width = runs["size"]
    lengths = lengths_of(runs)
    flat = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return flat.reshape(width, height).T


def lengths_of(runs: Runs) -> list[int]:
    """Decode the run lengths and check that they cover exactly the pixels of `size`."""
    lengths: list[int] = []
    value = shift = 0
    for letter in runs["counts"]:
        group = ord(letter) - 48
        if not 0 <= group < 64:
            raise FqvitError(f"run lengths: unexpected character {letter!r}. The annotation is damaged.")
        if shift > MAX_SHIFT:
            raise FqvitError("run lengths: a length has too many characters. The annotation is damaged.")
        value |= (group & 0x1F) << shift
        shift += 5
        if not group & 0x20:
            if group & 0x10:
                value -= 1 << shift
            lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
            value = shift = 0
    check_lengths(lengths, runs["size"], shift == 0)
    return lengths


def check_lengths(lengths: list[int], size: Sequence[int], complete: bool = True) -> None:
    """Check that run lengths cover exactly height x width pixels. complete: False if the last length is truncated"""
    height, width = size
    pixels = height * width
    # Check the lengths before printing their sum: a number from a file may exceed Python's limit of digits for printing.
    if not complete or not all(0 <= length <= pixels for length in lengths):
        raise FqvitError(
            f"run lengths: a length is truncated, negative or above {height} x {width}. The annotation is damaged."
        )
    if sum(lengths) != pixels:
        raise FqvitError(
            f"run lengths: {sum(lengths)} pixels in total, expected {height} x {width}. The annotation is damaged."
        )
