// Pastes a box's mask probabilities into the image. The results are the same as those of
// src/fqvit/detect/fixed/masks.py.
#pragma once

#include <cstdint>

#include "detect/boxes.h"

namespace fqvit {

// probabilities: i32 [side, side] in units of 2^-15   box: in 1/256 pixel of the image   threshold: in units of 2^-30
// mask: u8 [height, width], 1 for pixels whose interpolated probability is at least the threshold, else 0
void paste_mask(const std::int32_t* probabilities, std::int64_t side, const Box& box, std::int64_t threshold,
                ImageSize image, std::uint8_t* mask);

}  // namespace fqvit
