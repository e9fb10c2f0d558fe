#include "detect/proposals.h"

#include <algorithm>
#include <numeric>

#include "detect/exp.h"

namespace fqvit {
namespace {

// Returns the indices of the `count` highest scores, best first; equal scores keep their order.
std::vector<std::int64_t> best_of(const std::vector<std::int64_t>& scores, std::int64_t count) {
    std::vector<std::int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    const auto is_better = [&](std::int64_t a, std::int64_t b) {
        const std::int64_t left = scores[static_cast<std::size_t>(a)], right = scores[static_cast<std::size_t>(b)];
        return left != right ? left > right : a < b;
    };
    const auto end = order.begin() + std::min(count, static_cast<std::int64_t>(order.size()));
    if (end != order.end()) std::nth_element(order.begin(), end, order.end(), is_better);
    std::sort(order.begin(), end, is_better);
    order.erase(end, order.end());
    return order;
}

Box anchor(std::int64_t index, Grid grid, std::int64_t stride, const std::vector<std::array<std::int64_t, 2>>& halves) {
    const auto count = static_cast<std::int64_t>(halves.size());
    const auto& [half_width, half_height] = halves[static_cast<std::size_t>(index % count)];
    const std::int64_t step = stride << BOX_FRACTION, cell = index / count;
    const std::int64_t x = cell % grid.columns * step, y = cell / grid.columns * step;
    return {x - half_width, y - half_height, x + half_width, y + half_height};
}

// Sorts the candidates by score and keeps the `count` best ones.
void keep_best(std::vector<Candidate>& kept, std::int64_t count) {
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.is_better(b); });
    if (static_cast<std::int64_t>(kept.size()) > count) kept.resize(static_cast<std::size_t>(count));
}

}  // namespace

std::vector<Box> propose(const std::vector<ProposalLevel>& levels, ImageSize size, const DetectorConstants& c) {
    std::vector<Candidate> kept, candidates;
    std::vector<std::int64_t> scores;
    std::int64_t order = 0;  // counts the candidates of all levels
    for (std::size_t level = 0; level < levels.size(); ++level) {
        const ProposalLevel& one = levels[level];
        const std::int64_t count = one.grid.count() * static_cast<std::int64_t>(c.anchors[level].size());
        scores.resize(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) {
            scores[static_cast<std::size_t>(i)] = c.objectness[level].apply(one.objectness[i]);
        }
        candidates.clear();
        for (const std::int64_t i : best_of(scores, c.proposals_a_level)) {
            const Box start = anchor(i, one.grid, c.strides[level], c.anchors[level]);
            const Box box = decode(start, one.deltas + 4 * i, c.deltas[level], c.log_limit, size);
            const bool solid = box[2] > box[0] && box[3] > box[1];  // clipping leaves some boxes without area
            if (solid) candidates.push_back({box, scores[static_cast<std::size_t>(i)], order, 0});
            ++order;
        }
        suppress(candidates, c.proposal_iou, kept);
    }
    keep_best(kept, c.proposals);
    std::vector<Box> boxes;
    for (const Candidate& one : kept) boxes.push_back(one.box);
    return boxes;
}

void refine(std::vector<Box>& boxes, const BoxOutputs& found, std::size_t stage, ImageSize size,
            const DetectorConstants& c) {
    for (std::size_t n = 0; n < boxes.size(); ++n) {
        const auto box = static_cast<std::int64_t>(n);
        const std::int32_t* logits = found.logits.data() + box * (found.classes + 1);
        const std::int64_t label = std::max_element(logits, logits + found.classes) - logits;
        boxes[n] = decode(boxes[n], found.deltas_of(box, label), c.box_deltas[stage], c.log_limit, size);
    }
}

std::vector<Candidate> select_detections(const std::vector<Box>& boxes, const std::vector<std::int64_t>& logits,
                                         const BoxOutputs& found, ImageSize size, const DetectorConstants& c) {
    const auto count = static_cast<std::int64_t>(boxes.size()), row = found.classes + 1;
    std::vector<std::int32_t> scores(static_cast<std::size_t>(count * row));
    std::vector<std::int64_t> powers(static_cast<std::size_t>(row));
    for (std::int64_t n = 0; n < count; ++n) {
        softmax(logits.data() + n * row, row, powers.data(), scores.data() + n * row);
    }
    std::vector<Candidate> kept, candidates;
    for (std::int64_t label = 0; label < found.classes; ++label) {
        candidates.clear();
        for (std::int64_t n = 0; n < count; ++n) {
            const std::int64_t score = scores[static_cast<std::size_t>(n * row + label)];
            if (score <= c.score) continue;
            const Box box = decode(boxes[static_cast<std::size_t>(n)], found.deltas_of(n, label), c.box_deltas.back(),
                                   c.log_limit, size);
            candidates.push_back({box, score, n * found.classes + label, label});
        }
        suppress(candidates, c.iou, kept);
    }
    keep_best(kept, c.detections);
    return kept;
}

}  // namespace fqvit
