// The weights of an antialiased resize along one axis, in fixed point, bit-identical to Pillow's Resample.c.
#pragma once

#include <cstdint>
#include <vector>

#include "image/preprocess.h"

namespace fqvit {

constexpr int WEIGHT_BITS = 22;  // a weight of 1.0 is 2^22

// An output pixel is the sum over i < count of weights[offset + i] * input[first + i], rounded to an integer.
struct Window {
    std::int64_t first, count, offset;
};

// One window per output pixel. A sum of pixels fits in int32: the weights of a window sum to 1, their magnitudes to
// less than 1.5 (bicubic at a border), and rounding adds at most half a unit per weight, with at most
// MAX_IMAGE_SIDE = 2^22 weights. Half a unit of the result is added for rounding:
//     255 * (1.5 * 2^22 + 2^21) + 2^21 < 2^31
struct Axis {
    std::vector<Window> windows;
    std::vector<std::int32_t> weights;
};

// Returns the windows of the output pixels begin..end-1 of an axis that is resized from `size` to `resized` pixels.
Axis resize_axis(Interpolation interpolation, std::int64_t size, std::int64_t resized, std::int64_t begin,
                 std::int64_t end);

// The same for Pillow's resize with `box`, which computes only this part of the output. Pillow rounds the edges of the
// box to float32, so the weights differ slightly from those of resize_axis().
Axis resize_part_of_axis(Interpolation interpolation, std::int64_t size, std::int64_t resized, std::int64_t begin,
                         std::int64_t end);

}  // namespace fqvit
