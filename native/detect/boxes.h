// Integer boxes: decoding, non-maximum suppression and scaling. The results are the same as those of
// src/fqvit/detect/nms.py and fixed/boxes.py.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "detect/constants.h"

namespace fqvit {

// x1, y1, x2, y2 in 1/256 pixel. Edges are in 0..2^21 after clipping; sides of anchors are at most 2^22.
using Box = std::array<std::int64_t, 4>;

struct ImageSize {
    std::int64_t height = 0, width = 0;  // in pixels
    bool operator==(const ImageSize&) const = default;
};

// Applies four deltas of a network to a box and clips the result to the image.
Box decode(const Box& box, const std::int32_t* deltas, const DeltaRatios& ratios, std::int64_t log_limit,
           ImageSize size);

std::int64_t area(const Box& box);

// A box that competes in non-maximum suppression. `order` breaks ties between equal scores: the lower value wins.
struct Candidate {
    Box box;
    std::int64_t score, order, label;

    bool is_better(const Candidate& other) const {
        return score != other.score ? score > other.score : order < other.order;
    }
};

// Greedy non-maximum suppression: sorts the candidates, best first, and appends a candidate to `kept` if its IoU
// (intersection over union) with each candidate that this call has already kept is at most iou / 2^16.
void suppress(std::vector<Candidate>& candidates, std::int64_t iou, std::vector<Candidate>& kept);

// Scales a box from an image of size `from` to size `to` and rounds. Sides of images are below 2^31.
Box rescale(const Box& box, ImageSize from, ImageSize to);

}  // namespace fqvit
