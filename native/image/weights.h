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

// One window per output pixel. A weighted sum of pixels fits in int32: in units of 2^-22, the magnitudes of the weights
// of a window sum to less than 1.5 * 2^22 (bicubic at a border). Rounding adds at most 1/2 per weight, which is at most
// 2^21 for MAX_IMAGE_SIDE = 2^22 weights. Another 2^21 is added to round the sum:
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
