"""Codebooks: levels of narrow weights that are not evenly spaced.

Each row of weights is split into groups of `size` weights. A group uses one of the layer's codebooks, at most 16, and each of
its weights is one of the levels of that codebook:

    w[o, k] = codebooks[choice[o, k // size], code[o, k]]

Levels are i8, in units of the row's scale. The codebooks of a layer minimize the squared error of its weights. As in k-means
(Lloyd 1982; Linde, Buzo and Gray 1980), fitting alternates between two steps: each group chooses the codebook with the least
error, and each level moves to the mean of its weights. One level of every codebook is 0, so that weights of 0 stay 0.
See also: weights.py (chooses the scales of rows), ir/packing.py (stores codes and choices).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.ir.packing import MAX_CODEBOOKS

LARGEST = 127  # the largest level
SAMPLE = 4096  # codebooks are fitted to at most this many groups of a layer
GROUPS_PER_CODEBOOK = 16  # at least: with fewer, 4-bit weights of a small layer could take more space than 6-bit weights
ROUNDS = 20
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Groups:
    """The groups of a layer's weights i8 [O, K] and their codebooks.

    choice: u8 [O, G], the codebook of each group, G = ceil(K / size)   codebooks: i8 [B, L], each ascending
    size: weights per group
    """

    choice: NDArray[np.uint8]
    codebooks: NDArray[np.int8]
    size: int

    def of_weights(self, inputs: int) -> NDArray[np.uint8]:
        """Return the codebook of every weight, u8 [O, K]."""
        return self.choice[:, np.arange(inputs) // self.size]

    def fits(self, w: NDArray[np.int8], bits: int, size: int) -> bool:
        """Return whether w [O, K] are levels of these codebooks, and these are groups of `size` weights of `bits` bits."""
        books, levels = self.codebooks.shape
        shape = (len(w), -(-w.shape[1] // size))
        if self.size != size or levels != 2**bits or self.choice.shape != shape or int(self.choice.max()) >= books:
            return False
        known = np.zeros((books, 256), bool)
        known[np.arange(books)[:, None], self.codebooks.astype(np.intp) + 128] = True
        return bool(known[self.of_weights(w.shape[1]), w.astype(np.intp) + 128].all())

    def steps(self, inputs: int) -> Tensor:
        """Return the mean distance between neighbouring levels of the codebook of every weight, [O, K]."""
        return torch.from_numpy(self._steps[self.of_weights(inputs)])

    def cells(self, w: NDArray[np.int8]) -> tuple[Tensor, Tensor]:
        """Return the ends of the interval of values whose nearest level is w [O, K]; outer intervals extend by half a step."""
        ends = np.zeros((2, len(self.codebooks), 256), np.float32)
        for book, levels in enumerate(self.codebooks.astype(np.float32)):
            kept, half = np.unique(levels), self._steps[book] / 2
            edges = np.concatenate([kept[:1] - half, (kept[1:] + kept[:-1]) / 2, kept[-1:] + half])
            index = kept.astype(np.intp) + 128
            ends[0, book, index], ends[1, book, index] = edges[:-1], edges[1:]
        low, high = ends[:, self.of_weights(w.shape[1]), w.astype(np.intp) + 128]
        return torch.from_numpy(low), torch.from_numpy(high)

    def extent(self, inputs: int) -> tuple[Tensor, Tensor]:
        """Return the range of values that the codebook of every weight covers, half a step beyond its outer levels."""
        low, high = self.codebooks[:, 0] - self._steps / 2, self.codebooks[:, -1] + self._steps / 2
        own = self.of_weights(inputs)
        return torch.from_numpy(low[own]), torch.from_numpy(high[own])

    @cached_property
    def _steps(self) -> NDArray[np.float32]:
        low, high = (self.codebooks[:, end].astype(np.float32) for end in (0, -1))
        found: NDArray[np.float32] = np.maximum((high - low) / np.float32(self.codebooks.shape[1] - 1), np.float32(0.5))
        return found

    @cached_property
    def _nearest(self) -> Tensor:
        """The nearest level of each half-open interval of width 1/2 from -128 on: float32 [B, 512].

        Two levels are integers, so the value in the middle between them is a multiple of 1/2.
        """
        middles = np.arange(-128, 128, 0.5) + 0.25
        return torch.from_numpy(np.stack([_quantized(book.astype(np.float64), middles) for book in self.codebooks])).float()

    def nearest(self, values: Tensor, first: int = 0) -> Tensor:
        """Return the nearest levels of values [O, n], the columns of the weights from `first` on; of two, the larger one."""
        columns = (first + np.arange(values.shape[1])) // self.size
        choice = torch.from_numpy(self.choice[:, columns].astype(np.int64))
        index = (values * 2).floor().clamp(-256, 255).long() + 256 + choice * 512
        return self._nearest.to(values.dtype).view(-1)[index]


def number_of_codebooks(groups: int) -> int:
    """Return the number of codebooks of a layer with this many groups."""
    return min(max(groups // GROUPS_PER_CODEBOOK, 1), MAX_CODEBOOKS)


def fit_groups(values: Floats, importance: Floats, size: int, bits: int) -> Groups:
    """Choose codebooks for values [O, K], which are weights in units of their row's scale; |value| <= 127.

    importance: the weight of each squared error, [O, K]
    """
    rows, columns = values.shape
    padding = ((0, 0), (0, -columns % size))
    grouped, weights = (np.pad(part, padding).reshape(-1, size) for part in (values, importance))
    count = min(len(grouped), SAMPLE)
    sample = np.arange(count) * len(grouped) // count
    codebooks = _fit(grouped[sample], weights[sample], number_of_codebooks(len(grouped)), bits)
    choice = _errors(codebooks.astype(np.float64), grouped, weights).argmin(0)
    return Groups(choice.astype(np.uint8).reshape(rows, -1), codebooks, size)


def _fit(groups: Floats, weights: Floats, count: int, bits: int) -> NDArray[np.int8]:
    """Return codebooks i8 [count, 2^bits] for groups [N, size].

    Levels start evenly spaced; the ranges of the codebooks start at quantiles of the largest weights of the groups.
    """
    ranges = np.quantile(np.abs(groups).max(1), (np.arange(count) + 0.5) / count)
    codebooks = _with_zero(ranges[:, None] * np.linspace(-1, 1, 2**bits))
    for _ in range(ROUNDS):
        choice = _errors(codebooks, groups, weights).argmin(0)
        for book, levels in enumerate(codebooks):
            mine = choice == book
            x, w = groups[mine].ravel(), weights[mine].ravel()
            code = np.searchsorted(_middles(levels), x, side="right")
            total = np.bincount(code, w, len(levels))
            mean = np.bincount(code, w * x, len(levels)) / np.where(total > 0, total, 1)
            codebooks[book] = np.sort(np.where(total > 0, mean, levels))
        codebooks = _with_zero(codebooks)
    return np.clip(np.rint(codebooks), -LARGEST, LARGEST).astype(np.int8)


def _with_zero(codebooks: Floats) -> Floats:
    """Move the level of each codebook that is nearest to 0 to 0."""
    found = codebooks.copy()
    found[np.arange(len(found)), np.abs(found).argmin(1)] = 0
    return found


def _middles(levels: Floats) -> Floats:
    return (levels[1:] + levels[:-1]) / 2


def _quantized(levels: Floats, values: Floats) -> Floats:
    found: Floats = levels[np.searchsorted(_middles(levels), values, side="right")]
    return found


def _errors(codebooks: Floats, groups: Floats, weights: Floats) -> Floats:
    """Return the squared error of every group with every codebook: groups and weights [N, size] -> [B, N]"""
    return np.stack([(weights * (groups - _quantized(levels, groups)) ** 2).sum(1) for levels in codebooks])
