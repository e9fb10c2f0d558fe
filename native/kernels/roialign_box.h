// One box of RoIAlign. Plain loops over channels that compilers make vectors of: roialign.cpp compiles them as they
// are, roialign_avx2.cpp for AVX2.
#pragma once

#include "core/fixed.h"
#include "fqvit/roialign.h"

#if defined(__GNUC__)
#define FQVIT_EVERYWHERE __attribute__((always_inline)) inline
#else
#define FQVIT_EVERYWHERE inline
#endif

namespace fqvit {

// y[i] += weight (x[i] - zero)
FQVIT_EVERYWHERE void add_codes(std::int32_t* y, const std::uint8_t* x, std::int32_t weight, std::int32_t zero,
                                std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) y[i] += weight * (x[i] - zero);
}

FQVIT_EVERYWHERE void add_scaled(std::int32_t* y, const std::int32_t* x, std::int32_t weight, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) y[i] += weight * x[i];
}

// The cells of all bins together: those of bins are in order, but bins can be empty.
FQVIT_EVERYWHERE void reach(const AlignScratch::Axis& axis, std::int64_t bins, std::int64_t& begin, std::int64_t& end) {
    begin = end = 0;
    for (std::int64_t bin = 0; bin < bins; ++bin) {
        if (axis.begin[bin] == axis.end[bin]) continue;
        if (end == 0) begin = axis.begin[bin];
        end = axis.end[bin];
    }
}

// Rows and columns of `scratch` are those of the box. y: u8 [side, side, channels]
FQVIT_EVERYWHERE void align_box(const Alignment& a, AlignScratch& scratch, std::uint8_t* y) {
    std::int64_t left = 0, right = 0;
    reach(scratch.columns, a.side, left, right);
    const std::int64_t wide = (right - left) * a.channels;
    std::int32_t* strip = scratch.strip.data();
    std::int32_t* sums = scratch.sums.data();
    for (std::int64_t bin = 0; bin < a.side; ++bin) {
        const std::int32_t* weights = scratch.rows.weights.data() + bin * a.height;
        std::fill(strip, strip + wide, 0);
        for (std::int64_t row = scratch.rows.begin[bin]; row < scratch.rows.end[bin]; ++row) {
            add_codes(strip, a.map + (row * a.width + left) * a.channels, weights[row], a.zero, wide);
        }
        for (std::int64_t i = 0; i < wide; ++i) strip[i] = (strip[i] + 128) >> 8;
        for (std::int64_t other = 0; other < a.side; ++other, y += a.channels) {
            const std::int32_t* across = scratch.columns.weights.data() + other * a.width;
            std::fill(sums, sums + a.channels, 0);
            for (std::int64_t column = scratch.columns.begin[other]; column < scratch.columns.end[other]; ++column) {
                add_scaled(sums, strip + (column - left) * a.channels, across[column], a.channels);
            }
            for (std::int64_t c = 0; c < a.channels; ++c) {
                y[c] = static_cast<std::uint8_t>(clamp(requantize(sums[c], a.mult, a.shift) + a.head_zero, a.last));
            }
        }
    }
}

// Weights of one axis, low..high in the units of boxes.
void find_weights(std::int64_t low, std::int64_t high, std::int64_t cell, std::int64_t bins, std::int64_t size,
                  std::vector<std::int64_t>& numerators, AlignScratch::Axis& axis);

FQVIT_EVERYWHERE void align_boxes(const Alignment& a, std::int64_t begin, std::int64_t end, AlignScratch& scratch) {
    for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t* box = a.boxes + 4 * n;
        find_weights(box[1], box[3], a.cell, a.side, a.height, scratch.numerators, scratch.rows);
        find_weights(box[0], box[2], a.cell, a.side, a.width, scratch.numerators, scratch.columns);
        align_box(a, scratch, a.y + n * a.side * a.side * a.channels);
    }
}

}  // namespace fqvit
