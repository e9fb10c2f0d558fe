#include "detect/image.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/aligned.h"
#include "detect/opencv_weights.h"

namespace fqvit {
namespace {

constexpr std::int64_t STRIDE = 32;  // sides of network inputs are multiples of this
constexpr int WEIGHT_FRACTION = 11;  // interpolation weights are in 2^-11
constexpr std::int32_t ONE = 1 << WEIGHT_FRACTION;
constexpr std::int64_t CHANNELS = 3;

// Per new pixel of an axis: the old pixels before and after it, and their weights in units of 2^-11.
struct PixelAxis {
    std::vector<std::int64_t> first, second;
    std::vector<std::int32_t> before, after;
};

// Positions are exact fractions; each weight is rounded once.
PixelAxis rounded_axis(std::int64_t old_side, std::int64_t new_side) {
    PixelAxis out;
    for (std::int64_t i = 0; i < new_side; ++i) {
        // In units of 1 / (2 * new_side) old pixels.
        const std::int64_t unit = 2 * new_side;
        const std::int64_t at = std::clamp<std::int64_t>((2 * i + 1) * old_side - new_side, 0, (old_side - 1) * unit);
        const std::int64_t first = at / unit;
        const auto share = static_cast<std::int32_t>(round_divide((at - first * unit) << WEIGHT_FRACTION, unit));
        out.first.push_back(first), out.second.push_back(std::min(first + 1, old_side - 1));
        out.before.push_back(ONE - share), out.after.push_back(share);
    }
    return out;
}

PixelAxis opencv_axis(std::int64_t old_side, std::int64_t new_side, bool horizontal) {
    OpencvWeights weights = opencv_weights(old_side, new_side);
    PixelAxis out{std::move(weights.first), {}, std::move(weights.before), std::move(weights.after)};
    for (std::size_t i = 0; i < out.first.size(); ++i) {
        const std::int64_t first = out.first[i], last = old_side - 1;
        if (horizontal && (first < 0 || first >= last)) out.before[i] = ONE, out.after[i] = 0;
        out.first[i] = std::clamp<std::int64_t>(first, 0, last);
        out.second.push_back(std::clamp<std::int64_t>(first + 1, 0, last));
    }
    return out;
}

PixelAxis axis_of(ResizeRule rule, std::int64_t old_side, std::int64_t new_side, bool horizontal) {
    return rule == ResizeRule::rounded ? rounded_axis(old_side, new_side) : opencv_axis(old_side, new_side, horizontal);
}

// Interpolates one row horizontally. sums: in units of 2^-11
void interpolate_row(const std::uint8_t* row, const PixelAxis& axis, std::int32_t* sums) {
    for (std::size_t x = 0; x < axis.first.size(); ++x, sums += CHANNELS) {
        const std::uint8_t* first = row + CHANNELS * axis.first[x];
        const std::uint8_t* second = row + CHANNELS * axis.second[x];
        const std::int32_t before = axis.before[x], after = axis.after[x];
        for (std::int64_t c = 0; c < CHANNELS; ++c) sums[c] = before * first[c] + after * second[c];
    }
}

// Rounds only once: sums are at most 255 * 2^22, which fits in int32 even with the rounding term.
void blend_rounded(const std::int32_t* above, const std::int32_t* below, std::int32_t before, std::int32_t after,
                   std::int64_t count, std::uint8_t* out) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t sum = above[i] * before + below[i] * after;
        out[i] = static_cast<std::uint8_t>((sum + (1 << (2 * WEIGHT_FRACTION - 1))) >> (2 * WEIGHT_FRACTION));
    }
}

void blend_opencv(const std::int32_t* above, const std::int32_t* below, std::int32_t before, std::int32_t after,
                  std::int64_t count, std::uint8_t* out) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t quarters = (before * (above[i] >> 4) >> 16) + (after * (below[i] >> 4) >> 16);
        out[i] = static_cast<std::uint8_t>((quarters + 2) >> 2);
    }
}

}  // namespace

ImageSize padded_size(ImageSize size) { return {round_up(size.height, STRIDE), round_up(size.width, STRIDE)}; }

ImageSize resized_size(ImageSize size, std::int64_t short_side, std::int64_t long_side) {
    const std::int64_t low = std::min(size.height, size.width), high = std::max(size.height, size.width);
    const bool long_limits = long_side * low < short_side * high;
    const std::int64_t to = long_limits ? long_side : short_side, from = long_limits ? high : low;
    const auto resized = [&](std::int64_t side) { return std::max<std::int64_t>(round_divide(side * to, from), 1); };
    return {resized(size.height), resized(size.width)};
}

void resize_image(const Image& image, ResizeRule rule, ImageSize size, std::uint8_t* out, std::int64_t stride) {
    const std::int64_t length = CHANNELS * size.width;
    if (image.size == size) {
        for (std::int64_t y = 0; y < size.height; ++y) {
            std::memcpy(out + y * stride, image.pixels + y * image.stride, static_cast<std::size_t>(length));
        }
        return;
    }
    const PixelAxis rows = axis_of(rule, image.size.height, size.height, false);
    const PixelAxis columns = axis_of(rule, image.size.width, size.width, true);
    const auto blend = rule == ResizeRule::rounded ? blend_rounded : blend_opencv;
    // The horizontally interpolated rows that the current output row needs; neighbouring output rows share them.
    struct Line {
        std::int64_t row = -1;
        std::vector<std::int32_t> sums;
    } above, below;
    above.sums.resize(static_cast<std::size_t>(length)), below.sums.resize(static_cast<std::size_t>(length));
    const auto fill = [&](Line& line, std::int64_t row) {
        if (line.row == row) return;
        interpolate_row(image.pixels + row * image.stride, columns, line.sums.data());
        line.row = row;
    };
    for (std::size_t y = 0; y < rows.first.size(); ++y, out += stride) {
        if (below.row == rows.first[y]) std::swap(above, below);
        fill(above, rows.first[y]);
        fill(below, rows.second[y]);
        blend(above.sums.data(), below.sums.data(), rows.before[y], rows.after[y], length, out);
    }
}

void pad_image(std::uint8_t* out, ImageSize used, ImageSize whole, const std::array<std::int64_t, 3>& color) {
    for (std::int64_t y = 0; y < whole.height; ++y) {
        std::uint8_t* at = out + CHANNELS * (y * whole.width + (y < used.height ? used.width : 0));
        for (std::uint8_t* const end = out + CHANNELS * (y + 1) * whole.width; at < end; at += CHANNELS) {
            for (std::size_t c = 0; c < color.size(); ++c) at[c] = static_cast<std::uint8_t>(color[c]);
        }
    }
}

}  // namespace fqvit
