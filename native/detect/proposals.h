// Turns the outputs of networks into boxes: proposals, refinement from stage to stage, detections. The results are the
// same as those of src/fqvit/detect/fixed/proposals.py.
#pragma once

#include <cstdint>
#include <vector>

#include "detect/boxes.h"
#include "detect/grids.h"

namespace fqvit {

// The outputs of the proposal head for one level, with A anchors per location.
struct ProposalLevel {
    Grid grid;
    const std::int32_t* objectness;  // [rows, columns, A]
    const std::int32_t* deltas;      // [rows, columns, 4 * A]
};

// Selects the proposals of an image, best first. size: the image size without padding
std::vector<Box> propose(const std::vector<ProposalLevel>& levels, ImageSize size, const DetectorConstants& c);

// The outputs of one stage's box head for many boxes.
struct BoxOutputs {
    std::int64_t classes;
    bool one_box_per_class;              // else one for all classes
    std::vector<std::int32_t> logits{};  // [n, classes + 1], the background last
    std::vector<std::int32_t> deltas{};  // [n, 4] or [n, 4 * classes]

    const std::int32_t* deltas_of(std::int64_t box, std::int64_t label) const {
        return deltas.data() + 4 * (one_box_per_class ? box * classes + label : box);
    }
};

// Refines boxes for the next stage: applies the deltas of each box's most probable class, not counting background.
void refine(std::vector<Box>& boxes, const BoxOutputs& found, std::size_t stage, ImageSize size,
            const DetectorConstants& c);

// Selects the detections of an image, best first. Candidates are all pairs of box and class with a score above c.score;
// non-maximum suppression then runs within each class.
// boxes: input of the last stage   found: outputs of the last stage
// logits: [n, classes + 1], base-2 logarithms in units of 2^-27, mean of all stages
std::vector<Candidate> select_detections(const std::vector<Box>& boxes, const std::vector<std::int64_t>& logits,
                                         const BoxOutputs& found, ImageSize size, const DetectorConstants& c);

}  // namespace fqvit
