#include "detect/mask.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fqvit {
namespace {

constexpr std::int32_t ONE = 1 << MASK_FRACTION;

// The positions of pixels first..last - 1 of an axis in a mask with a border of zeros: the cell before each pixel, and
// the weight of the next cell in units of 2^-15.
struct MaskAxis {
    std::int64_t first, last;
    std::vector<std::int32_t> cell, weight;

    // low, high: edges of the box   image: pixels of the image along this axis   side: cells of the mask
    // Pixels more than one pixel outside the box do not belong to the mask.
    MaskAxis(std::int64_t low, std::int64_t high, std::int64_t image, std::int64_t side)
        : first(std::max<std::int64_t>((low >> BOX_FRACTION) - 1, 0)),
          last(std::min<std::int64_t>(-(-high >> BOX_FRACTION) + 1, image)) {
        for (std::int64_t pixel = first; pixel < last; ++pixel) {
            // position = (pixel + 1/2 - low) * side / (high - low) - 1/2. Numerators are below
            // 2^31 * 2^8 * 2^7 * 2^15 < 2^62. If the box has length 0 along this axis, all pixels show the middle of
            // the mask, as in mmdetection.
            const std::int64_t center = (pixel << BOX_FRACTION) + (1 << (BOX_FRACTION - 1)) - low;
            std::int64_t position = high > low ? round_divide(center * (side << MASK_FRACTION), high - low) - ONE / 2
                                               : (side - 1) << (MASK_FRACTION - 1);
            position = std::clamp<std::int64_t>(position, -ONE, side << MASK_FRACTION) + ONE;
            const std::int64_t before = std::min(position >> MASK_FRACTION, side);
            cell.push_back(static_cast<std::int32_t>(before));
            weight.push_back(static_cast<std::int32_t>(position - (before << MASK_FRACTION)));
        }
    }
};

}  // namespace

void paste_mask(const std::int32_t* probabilities, std::int64_t side, const Box& box, std::int64_t threshold,
                ImageSize image, std::uint8_t* mask) {
    std::memset(mask, 0, static_cast<std::size_t>(image.height * image.width));
    const MaskAxis rows(box[1], box[3], image.height, side), columns(box[0], box[2], image.width, side);
    if (rows.cell.empty() || columns.cell.empty()) return;
    const std::int64_t wide = side + 2;
    std::vector<std::int32_t> bordered(static_cast<std::size_t>(wide * wide)), strip(static_cast<std::size_t>(wide));
    for (std::int64_t y = 0; y < side; ++y) {
        std::copy_n(probabilities + y * side, side, bordered.begin() + (y + 1) * wide + 1);
    }
    for (std::size_t i = 0; i < rows.cell.size(); ++i) {
        const std::int32_t* above = bordered.data() + rows.cell[i] * wide;
        const std::int32_t down = rows.weight[i];
        // Interpolates between rows and rounds to 2^-15, then interpolates between columns without rounding: sums are
        // at most 2^30.
        for (std::int64_t x = 0; x < wide; ++x) {
            const std::int32_t sum = above[x] * (ONE - down) + above[x + wide] * down;
            strip[static_cast<std::size_t>(x)] = static_cast<std::int32_t>(round_shift(sum, MASK_FRACTION));
        }
        std::uint8_t* to = mask + (rows.first + static_cast<std::int64_t>(i)) * image.width + columns.first;
        for (std::size_t j = 0; j < columns.cell.size(); ++j) {
            const std::int32_t* left = strip.data() + columns.cell[j];
            const std::int32_t across = columns.weight[j];
            to[j] = left[0] * (ONE - across) + left[1] * across >= threshold ? 1 : 0;
        }
    }
}

}  // namespace fqvit
