// RoIAlign from codes to codes, bit-exact with src/fqvit/detect/fixed/roialign.py, which has the formulas.
#pragma once

#include <cstdint>
#include <string>

namespace fqvit {

// Pools a feature map into a grid of side x side bins for each box.
//   map: u8 [height, width, channels]   boxes: i64 [count, 4] x1, y1, x2, y2   y: u8 [count, side, side, channels]
//   zero: zero point of the map
//   cell: length of a map cell in the units of the boxes
//   mult, shift, head_zero, last: requantization to the input codes of the detector head, from sums whose unit is 2^-22
//   of the map's scale
struct RoiAlign {
    const std::uint8_t* map;
    std::int64_t height, width, channels;
    std::int32_t zero;
    const std::int64_t* boxes;
    std::int64_t count, side, cell;
    std::int64_t mult;
    int shift;
    std::int32_t head_zero, last;
    std::uint8_t* y;
    const std::int64_t* places = nullptr;  // index in y of each box's result; null: the order of the boxes

    // Limits under which no sum overflows. check_roi_align() tests them before anything runs.
    // The weights of a bin sum to 2^15 plus at most half a unit per cell, so with 8192 cells to at most 2^15 + 2^12:
    //     first pass:  255 * (2^15 + 2^12) < 2^24
    //     second pass: (2^15 + 2^12) * (255 * (2^15 + 2^12) / 2^8 + 1) < 2^31
    // With samples <= 2^25 / 2^8 + 1 and 2 * samples * bins * cell <= 2 * (2^25 + 64 * 2^18) < 2^27, the numerator of a
    // weight, 2^15 * samples * (2 * samples * bins * cell), is below 2^59.
    static constexpr std::int64_t MAX_CELLS = 8192, MAX_SIDE = 64, MAX_EDGE = 1 << 24;
    static constexpr std::int64_t MIN_CELL = 1 << 8, MAX_CELL = 1 << 18;
};

// Throws BadProgram if a limit is exceeded.
void check_roi_align(const RoiAlign& a);

// Runs on at most `threads` threads. The caller has called check_roi_align(a). instruction_set: as in Engine. The
// result depends neither on the number of threads nor on the instruction set.
void roi_align(const RoiAlign& a, int threads, const std::string& instruction_set);

class ThreadPool;
// The same on the threads of a pool.
void roi_align(const RoiAlign& a, ThreadPool& pool, const std::string& instruction_set);

}  // namespace fqvit
