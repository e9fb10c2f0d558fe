// RoIAlign from codes to codes, bit for bit as src/fqvit/detect/fixed_roialign.py, which has the formulas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/thread_pool.h"

namespace fqvit {

// map: u8 [height, width, channels]   boxes: [count, 4] x1, y1, x2, y2   y: u8 [count, side, side, channels]
// cell: a cell's length in the units of boxes   mult, shift: from sums in 2^-22 steps to the head's codes
struct Alignment {
    const std::uint8_t* map;
    std::int64_t height, width, channels;
    std::int32_t zero;
    const std::int64_t* boxes;
    std::int64_t count, side, cell;
    std::int64_t mult;
    int shift;
    std::int32_t head_zero, last;
    std::uint8_t* y;

    // Limits under which no sum overflows; they are checked before anything runs.
    // A bin's weights sum to 2^15 and half a unit a cell, so with 8192 cells to less than 2^15 + 2^12:
    //     first pass   255 (2^15 + 2^12) < 2^24;   second   (2^15 + 2^12) (255 (2^15 + 2^12) / 2^8 + 1) < 2^31
    // With samples <= 2^25 / 2^8 + 1 and 2 samples bins cell <= 2 (2^25 + 64 2^18) = 2^26, a weight's numerator is
    // below 2^59.
    static constexpr std::int64_t CELLS = 8192, SIDE = 64, EDGE = 1 << 24, SHORTEST = 1 << 8, LONGEST = 1 << 18;
};

// What one thread needs, made before threads start: tasks do not throw.
struct AlignScratch {
    explicit AlignScratch(const Alignment& a);

    // Of one axis: weights of each bin in 2^-15 [side][cells], and which cells it has.
    struct Axis {
        std::vector<std::int32_t> weights;
        std::vector<std::int64_t> begin, end;
    };
    Axis rows, columns;
    std::vector<std::int64_t> numerators;   // [cells]
    std::vector<std::int32_t> strip, sums;  // [width][channels], [channels]
};

// Boxes begin..end - 1.
void align_boxes_scalar(const Alignment& a, std::int64_t begin, std::int64_t end, AlignScratch& scratch);
void align_boxes_avx2(const Alignment& a, std::int64_t begin, std::int64_t end, AlignScratch& scratch);

// Throws BadProgram where a limit is passed.
void check_alignment(const Alignment& a);

// The bits are the same for every number of threads and with or without AVX2. The alignment was checked.
inline void roi_align(const Alignment& a, int threads, bool avx2) {
    Pool pool(static_cast<int>(std::clamp<std::int64_t>(a.count, 1, threads)));
    std::vector<AlignScratch> scratch(static_cast<std::size_t>(pool.threads()), AlignScratch(a));
    const auto align = avx2 ? align_boxes_avx2 : align_boxes_scalar;
    pool.run(a.count, 4, [&](int thread, std::int64_t begin, std::int64_t end) {
        align(a, begin, end, scratch[static_cast<std::size_t>(thread)]);
    });
}

}  // namespace fqvit
