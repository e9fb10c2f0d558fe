// One box of RoIAlign: a separable weighted sum over cells, first over the rows of the map, then over its columns.
//
//     strip[x, c] = (sum_y wy[y] * (map[y, x, c] - zero) + 2^7) >> 8
//     y[c] = clamp(requantize(sum_x wx[x] * strip[x, c]) + head_zero)
//
// Exact because the limits in core/roialign.h keep every sum below 2^31. Compilers vectorize the plain loops over
// channels: core/roialign.cpp compiles them for every CPU, avx2/roialign_avx2.cpp for AVX2. neon/roialign_neon.cpp has
// its own loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/fixed.h"
#include "core/roialign.h"

#if defined(__GNUC__)
#define FQVIT_ALWAYS_INLINE __attribute__((always_inline)) inline
#else
#define FQVIT_ALWAYS_INLINE inline
#endif

namespace fqvit {

// Memory of one thread, allocated before the threads start because tasks must not throw.
struct RoiAlignScratch {
    explicit RoiAlignScratch(const RoiAlign& a);

    // The weights of one axis: bin b is the sum of cells begin[b]..end[b] - 1 with weights [b][cell] in units of 2^-15.
    struct Axis {
        std::vector<std::int32_t> weights;  // [side][cells]
        std::vector<std::int64_t> begin, end;
    };
    Axis rows, columns;
    std::vector<std::int64_t> numerators;  // [cells]
    // strip: [width][channels] plus 16 elements that vector code may read and write; sums: [channels]
    std::vector<std::int32_t> strip, sums;
};

// Computes boxes begin..end - 1.
void align_boxes_scalar(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch);
void align_boxes_avx2(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch);
void align_boxes_neon(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch);

// Computes the weights of one axis of a box that spans low..high, in the units of boxes.
void find_weights(std::int64_t low, std::int64_t high, std::int64_t cell, std::int64_t bins, std::int64_t size,
                  std::vector<std::int64_t>& numerators, RoiAlignScratch::Axis& axis);

// y[i] += weight * (x[i] - zero)
FQVIT_ALWAYS_INLINE void add_codes(std::int32_t* y, const std::uint8_t* x, std::int32_t weight, std::int32_t zero,
                                   std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) y[i] += weight * (x[i] - zero);
}

// y[i] += weight * x[i]
FQVIT_ALWAYS_INLINE void add_scaled(std::int32_t* y, const std::int32_t* x, std::int32_t weight, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) y[i] += weight * x[i];
}

// Finds the range of cells that covers all bins. Bins are in ascending order, but some can be empty.
FQVIT_ALWAYS_INLINE void cell_range(const RoiAlignScratch::Axis& axis, std::int64_t bins, std::int64_t& begin,
                                    std::int64_t& end) {
    begin = end = 0;
    for (std::int64_t bin = 0; bin < bins; ++bin) {
        if (axis.begin[bin] == axis.end[bin]) continue;
        if (end == 0) begin = axis.begin[bin];
        end = axis.end[bin];
    }
}

// Pools one box, whose weights are in scratch.rows and scratch.columns. y: u8 [side, side, channels]
FQVIT_ALWAYS_INLINE void align_box(const RoiAlign& a, RoiAlignScratch& scratch, std::uint8_t* y) {
    std::int64_t left = 0, right = 0;
    cell_range(scratch.columns, a.side, left, right);
    const std::int64_t length = (right - left) * a.channels;
    std::int32_t* strip = scratch.strip.data();
    std::int32_t* sums = scratch.sums.data();
    for (std::int64_t bin_y = 0; bin_y < a.side; ++bin_y) {
        const std::int32_t* row_weights = scratch.rows.weights.data() + bin_y * a.height;
        std::fill(strip, strip + length, 0);
        for (std::int64_t row = scratch.rows.begin[bin_y]; row < scratch.rows.end[bin_y]; ++row) {
            add_codes(strip, a.map + (row * a.width + left) * a.channels, row_weights[row], a.zero, length);
        }
        for (std::int64_t i = 0; i < length; ++i) strip[i] = (strip[i] + 128) >> 8;
        for (std::int64_t bin_x = 0; bin_x < a.side; ++bin_x, y += a.channels) {
            const std::int32_t* column_weights = scratch.columns.weights.data() + bin_x * a.width;
            std::fill(sums, sums + a.channels, 0);
            for (std::int64_t column = scratch.columns.begin[bin_x]; column < scratch.columns.end[bin_x]; ++column) {
                add_scaled(sums, strip + (column - left) * a.channels, column_weights[column], a.channels);
            }
            for (std::int64_t c = 0; c < a.channels; ++c) {
                y[c] = static_cast<std::uint8_t>(clamp(requantize(sums[c], a.mult, a.shift) + a.head_zero, a.last));
            }
        }
    }
}

struct AlignBox {
    FQVIT_ALWAYS_INLINE void operator()(const RoiAlign& a, RoiAlignScratch& scratch, std::uint8_t* y) const {
        align_box(a, scratch, y);
    }
};

// Calls align(a, scratch, y) for every box after its weights are computed.
template <class Align = AlignBox>
FQVIT_ALWAYS_INLINE void align_boxes(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch,
                                     const Align& align = {}) {
    for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t* box = a.boxes + 4 * n;
        find_weights(box[1], box[3], a.cell, a.side, a.height, scratch.numerators, scratch.rows);
        find_weights(box[0], box[2], a.cell, a.side, a.width, scratch.numerators, scratch.columns);
        const std::int64_t place = a.places == nullptr ? n : a.places[n];
        align(a, scratch, a.y + place * a.side * a.side * a.channels);
    }
}

}  // namespace fqvit
