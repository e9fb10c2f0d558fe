#include "detect/boxes.h"

#include <algorithm>

#include "detect/exp.h"

namespace fqvit {
namespace {

constexpr int FINE_FRACTION = 16;  // decode computes edges in 2^-16 pixels and rounds them once to 1/256 pixel
constexpr std::int64_t MAX_PRODUCT = std::int64_t{1} << 61;  // largest magnitude of offset times side

struct Edges {
    std::int64_t low, high;
};

// One axis: center' = center + offset * side, half = side * 2^log / 2, edges = center' -+ half.
Edges decode_axis(std::int64_t low, std::int64_t high, std::int64_t offset, std::int64_t log, std::int64_t log_limit,
                  std::int64_t image) {
    const std::int64_t side = high - low;
    // A product of 2^61 corresponds to 2^29 pixels: the limit only affects boxes far outside every image.
    const std::int64_t farthest = MAX_PRODUCT / std::max<std::int64_t>(side, 1);
    const std::int64_t distance =
        round_shift(std::clamp(offset, -farthest, farthest) * side, BOX_FRACTION + OFFSET_FRACTION - FINE_FRACTION);
    const Power power = power_of_two(std::clamp(log, -log_limit, log_limit));
    // side < 2^23 and mantissa < 2^31; log_limit <= 8 * 2^27 keeps the shift within 15..31.
    const int shift = MANTISSA_FRACTION + 1 + BOX_FRACTION - FINE_FRACTION - static_cast<int>(power.exponent);
    const std::int64_t half = round_shift(side * power.mantissa, shift);
    const std::int64_t center = (low + high) * (1 << (FINE_FRACTION - BOX_FRACTION - 1)) + distance;
    const auto edge = [&](std::int64_t x) { return clamp(round_shift(x, FINE_FRACTION - BOX_FRACTION), image); };
    return {edge(center - half), edge(center + half)};
}

// Returns whether intersection * 2^16 > iou * union. Unions are at most 2^43, so the products stay below 2^60.
bool overlaps(const Box& a, std::int64_t a_area, const Box& b, std::int64_t b_area, std::int64_t iou) {
    const std::int64_t width = std::min(a[2], b[2]) - std::max(a[0], b[0]);
    const std::int64_t height = std::min(a[3], b[3]) - std::max(a[1], b[1]);
    if (width <= 0 || height <= 0) return false;
    const std::int64_t common = width * height;
    return common << IOU_FRACTION > iou * (a_area + b_area - common);
}

}  // namespace

Box decode(const Box& box, const std::int32_t* deltas, const DeltaRatios& ratios, std::int64_t log_limit,
           ImageSize size) {
    const Edges x = decode_axis(box[0], box[2], ratios[0].apply(deltas[0]), ratios[2].apply(deltas[2]), log_limit,
                                size.width << BOX_FRACTION);
    const Edges y = decode_axis(box[1], box[3], ratios[1].apply(deltas[1]), ratios[3].apply(deltas[3]), log_limit,
                                size.height << BOX_FRACTION);
    return {x.low, y.low, x.high, y.high};
}

std::int64_t area(const Box& box) {
    return std::max<std::int64_t>(box[2] - box[0], 0) * std::max<std::int64_t>(box[3] - box[1], 0);
}

void suppress(std::vector<Candidate>& candidates, std::int64_t iou, std::vector<Candidate>& kept) {
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.is_better(b); });
    const std::size_t first = kept.size();
    std::vector<std::int64_t> areas;
    for (const Candidate& one : candidates) {
        const std::int64_t own = area(one.box);
        bool stays = true;
        for (std::size_t i = first; stays && i < kept.size(); ++i) {
            stays = !overlaps(one.box, own, kept[i].box, areas[i - first], iou);
        }
        if (stays) kept.push_back(one), areas.push_back(own);
    }
}

Box rescale(const Box& box, ImageSize from, ImageSize to) {
    const auto x = [&](std::int64_t edge) { return round_divide(edge * to.width, from.width); };
    const auto y = [&](std::int64_t edge) { return round_divide(edge * to.height, from.height); };
    return {x(box[0]), y(box[1]), x(box[2]), y(box[3])};
}

}  // namespace fqvit
