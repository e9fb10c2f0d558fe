// Resizes 8-bit images with integer arithmetic: one pass per axis, each rounded to u8, as in Pillow.
#pragma once

#include <cstdint>

#include "image/weights.h"

namespace fqvit {

// u8 rows of interleaved pixels: 1 channel (gray), 3 (RGB) or 4 (RGBA, whose alpha is ignored).
struct ImageView {
    const std::uint8_t* pixels;
    std::int64_t height, width, channels;
    std::int64_t stride;  // bytes from row to row

    const std::uint8_t* row(std::int64_t y) const { return pixels + y * stride; }
};

// The output depends on the order of the passes, because the result of the first pass is rounded.
enum class PassOrder { horizontal_first, vertical_first };

// Computes one output pixel per pair of windows, one of `rows` and one of `columns`. bands: channels of the output, 1
// or 3. With 1, a color image is converted to gray before the resize; 3 requires a color image. out: u8 [rows, columns,
// bands], with `out_stride` bytes from row to row.
void resample(const ImageView& image, Axis columns, Axis rows, PassOrder order, std::int64_t bands, std::uint8_t* out,
              std::int64_t out_stride);

}  // namespace fqvit
