// RoIAlign: limits, weights, and the version for every CPU.
#include "fqvit/roialign.h"

#include "kernels/roialign_box.h"
#include "ops/ops.h"

namespace fqvit {

void check_alignment(const Alignment& a) {
    need(
        a.height >= 1 && a.height <= Alignment::CELLS && a.width >= 1 && a.width <= Alignment::CELLS && a.channels >= 1,
        "a map has 1 to 8192 rows and columns, and a channel");
    need(a.side >= 1 && a.side <= Alignment::SIDE, "squares have 1 to 64 places a side");
    need(a.cell >= Alignment::SHORTEST && a.cell <= Alignment::LONGEST, "cells have 2^8 to 2^18 units");
    need(a.zero >= 0 && a.zero <= 255 && a.head_zero >= 0 && a.head_zero <= 255 && a.last >= 0 && a.last <= 255,
         "zero points and codes are 0 to 255");
    need(a.mult >= 0 && a.mult < std::int64_t{1} << 31 && a.shift >= 1 && a.shift <= 62,
         "a multiplier or shift is out of range");
    for (std::int64_t i = 0; i < 4 * a.count; ++i) {
        need(a.boxes[i] >= -Alignment::EDGE && a.boxes[i] <= Alignment::EDGE, "edges of boxes are within 2^24 units");
    }
}

AlignScratch::AlignScratch(const Alignment& a)
    : numerators(static_cast<std::size_t>(std::max(a.height, a.width))),
      strip(static_cast<std::size_t>(a.width * a.channels)),
      sums(static_cast<std::size_t>(a.channels)) {
    const auto bins = static_cast<std::size_t>(a.side);
    for (Axis* axis : {&rows, &columns}) axis->begin.resize(bins), axis->end.resize(bins);
    rows.weights.resize(bins * static_cast<std::size_t>(a.height));
    columns.weights.resize(bins * static_cast<std::size_t>(a.width));
}

void find_weights(std::int64_t low, std::int64_t high, std::int64_t cell, std::int64_t bins, std::int64_t size,
                  std::vector<std::int64_t>& numerators, AlignScratch::Axis& axis) {
    const std::int64_t samples = -floor_divide(low - high, bins * cell);
    std::fill(axis.begin.begin(), axis.begin.end(), 0);
    std::fill(axis.end.begin(), axis.end.end(), 0);
    if (samples <= 0) return;
    const std::int64_t parts = 2 * samples * bins, whole = cell * parts;
    const std::int64_t start = (low - cell / 2) * parts;
    for (std::int64_t bin = 0; bin < bins; ++bin) {
        std::int64_t begin = 0, end = 0;  // of the cells met so far; places ascend
        for (std::int64_t k = bin * samples; k < (bin + 1) * samples; ++k) {
            const std::int64_t exact = start + (2 * k + 1) * (high - low);
            if (exact < -whole || exact > size * whole) continue;
            const std::int64_t place = std::clamp<std::int64_t>(exact, 0, (size - 1) * whole);
            const std::int64_t first = place / whole, next = std::min(first + 1, size - 1);
            const std::int64_t toward = place - first * whole;
            if (end == 0) begin = end = first;
            while (end <= next) numerators[static_cast<std::size_t>(end++)] = 0;
            numerators[static_cast<std::size_t>(first)] += whole - toward;
            numerators[static_cast<std::size_t>(next)] += toward;
        }
        axis.begin[static_cast<std::size_t>(bin)] = begin;
        axis.end[static_cast<std::size_t>(bin)] = end;
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t weight =
                round_divide(numerators[static_cast<std::size_t>(i)] * (1 << 15), whole * samples);
            axis.weights[static_cast<std::size_t>(bin * size + i)] = static_cast<std::int32_t>(weight);
        }
    }
}

void align_boxes_scalar(const Alignment& a, std::int64_t begin, std::int64_t end, AlignScratch& scratch) {
    align_boxes(a, begin, end, scratch);
}

}  // namespace fqvit
