// The integer constants of the arithmetic between a detector's networks: ratios of scales, anchors and thresholds. The
// field `between` of a file holds them; src/fqvit/detect/fixed/constants.py defines and computes them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/fixed.h"

namespace fqvit {

constexpr int BOX_FRACTION = 8;          // boxes are in 1/256 pixel
constexpr std::int64_t MAX_SIDE = 8192;  // largest side of the network's input, in pixels
constexpr int OFFSET_FRACTION = 24;      // offsets of box centers, relative to the box's size
constexpr int LOG_FRACTION = 27;         // base-2 logarithms: logits and ratios of sizes
constexpr int SCORE_FRACTION = 24;
constexpr int IOU_FRACTION = 16;
constexpr int MASK_FRACTION = 15;  // mask probabilities; they have 30 fraction bits after interpolation
constexpr std::int64_t MAX_STRIDE = 1024;
constexpr std::int64_t MAX_ROI_SIDE = 64;  // cells per side of RoI features

// mult / 2^shift
struct Ratio {
    std::int64_t mult = 0, shift = 1;

    // x is an output of a network, |x| <= 2^31, so the product fits in int64.
    std::int64_t apply(std::int64_t x) const { return requantize(x, mult, static_cast<int>(shift)); }
};

using DeltaRatios = std::array<Ratio, 4>;

// Lengths are in 1/256 pixel, areas in the square of this unit.
struct DetectorConstants {
    std::array<std::int64_t, 3> padding{};  // color of the padding on the right and at the bottom of images
    std::vector<std::int64_t> strides{};    // per level with proposals; trailing levels have no map for RoIAlign
    std::vector<std::vector<std::array<std::int64_t, 2>>> anchors{};  // [level][ratio], half width and half height
    std::vector<std::int64_t> areas{};                                // smallest box area for maps 1, 2, ...
    std::vector<Ratio> objectness{};                                  // [level], scores to a unit that all levels share
    std::vector<DeltaRatios> deltas{}, box_deltas{};                  // [level] and [stage]
    std::int64_t log_limit = 0;                                       // log2 of the largest ratio of sizes, in 2^-27
    std::vector<Ratio> classes{}, mask_logits{};                      // [stage], logits to base-2 logarithms in 2^-27
    std::vector<std::vector<Ratio>> box_squares{}, mask_squares{};    // [stage][map], RoIAlign sums to input codes
    std::int64_t proposals_a_level = 0, proposals = 0, proposal_iou = 0, score = 0, iou = 0, detections = 0, mask = 0;

    std::size_t stages() const { return classes.size(); }
    std::size_t maps() const { return areas.size() + 1; }  // levels with a map for RoIAlign

    // Checks the lengths of lists and proves that no int64 or int32 overflows. The ranges of the
    // fields were already checked when the file was read. Throws BadProgram.
    void check() const;
};

}  // namespace fqvit
