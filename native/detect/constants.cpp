#include "detect/constants.h"

#include <algorithm>
#include <bit>

#include "core/bounds.h"
#include "core/value.h"

namespace fqvit {
namespace {

void require_length(const char* name, std::size_t found, std::size_t expected) {
    require(found == expected, "between: ", name, " has ", found, " entries, expected ", expected);
}

// Requires bound < 2^bits.
void prove_between(const char* what, std::int64_t bound, int bits) {
    require(bound < std::int64_t{1} << bits, "between: ", what, " can reach ", bound, ", which does not fit ", bits,
            " bits");
}

void check_squares(const char* name, const std::vector<std::vector<Ratio>>& squares, const DetectorConstants& c) {
    require_length(name, squares.size(), c.stages());
    for (const std::vector<Ratio>& row : squares) require_length(name, row.size(), c.maps());
}

}  // namespace

void DetectorConstants::check() const {
    const std::size_t levels = strides.size();
    require_length("anchors", anchors.size(), levels);
    require_length("objectness", objectness.size(), levels);
    require_length("deltas", deltas.size(), levels);
    require_length("box_deltas", box_deltas.size(), stages());
    require_length("mask_logits", mask_logits.size(), stages());
    check_squares("box_squares", box_squares, *this);
    check_squares("mask_squares", mask_squares, *this);
    require(maps() <= levels, "between: ", maps(), " maps, but ", levels, " strides");
    std::int64_t largest_half = 0;
    for (const auto& level : anchors) {
        require(level.size() == anchors.front().size(), "between: levels have different numbers of anchors");
        for (const auto& [width, height] : level) largest_half = std::max({largest_half, width, height});
    }
    for (const std::int64_t stride : strides) {
        require(std::has_single_bit(static_cast<std::uint64_t>(stride)) && stride <= MAX_STRIDE,
                "between: a stride of ", stride, ", expected a power of two up to ", MAX_STRIDE);
    }
    require(std::is_sorted(areas.begin(), areas.end()), "between: areas are not in ascending order");

    // The same proofs as in _proofs of constants.py. Only the first one depends on more than the ranges of the fields.
    std::int64_t logits = 0;
    for (const Ratio& ratio : classes) {
        const std::int64_t reach = (ratio.mult << 31 >> ratio.shift) + 1;  // largest magnitude of a requantized int32
        logits = bound_add(logits, bound_multiply(2, reach));
    }
    const std::int64_t side = MAX_SIDE << BOX_FRACTION, size = std::max(side, 2 * largest_half);
    const std::int64_t grown = size << ((log_limit >> LOG_FRACTION) + 1) << BOX_FRACTION;
    const std::int64_t widest = *std::max_element(strides.begin(), strides.end());
    const std::int64_t finest = *std::min_element(strides.begin(), strides.end());
    const std::int64_t weights = (std::int64_t{1} << 15) + MAX_SIDE / finest + 2;
    const std::int64_t strip = (255 * weights >> 8) + 1, samples = side / (finest << BOX_FRACTION) + 1;
    prove_between("a difference of sums of class logits", logits, 62);
    prove_between("a size times its mantissa", size << 31, 62);
    prove_between("a moved edge", (std::int64_t{1} << (62 - 16)) + grown + (size << BOX_FRACTION), 62);
    prove_between("a union times its threshold", 2 * side * side << IOU_FRACTION, 62);
    prove_between("the first pass", 255 * weights, 31);
    prove_between("the second pass", strip * weights, 31);
    prove_between("a weight's numerator", 2 * (side + (widest << BOX_FRACTION) * MAX_ROI_SIDE) * samples << 15, 62);
}

}  // namespace fqvit
