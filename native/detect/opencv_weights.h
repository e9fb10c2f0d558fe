// The interpolation weights of one axis as OpenCV computes them, see src/fqvit/detect/opencv.py.
#pragma once

#include <cstdint>
#include <vector>

namespace fqvit {

// New pixel i lies between the old pixels first[i] and first[i] + 1, which may be outside the image, and gives them the
// weights before[i] and after[i], in units of 2^-11.
struct OpencvWeights {
    std::vector<std::int64_t> first;
    std::vector<std::int32_t> before, after;
};

OpencvWeights opencv_weights(std::int64_t old_side, std::int64_t new_side);

}  // namespace fqvit
