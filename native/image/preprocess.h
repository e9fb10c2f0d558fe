// Turns a decoded image into the input of a model: resize, then crop the center. Gives the same bits as
// Preprocess.apply in src/fqvit/data/preprocess.py (with the pass order of Pillow 13) on every platform.
#pragma once

#include <cstdint>
#include <vector>

namespace fqvit {

enum class Interpolation { bilinear, bicubic };

// Resize the short side to `resize` (antialiased), then center-crop to height x width, padded with 0 if the resized
// image is smaller. The output has 1 channel (gray) or 3 (RGB). mean, std: one value per channel, for pixels scaled to
// 0..1; preprocess() does not use them, because the first linear op of a program includes them. squash: resize to the
// aspect ratio of height x width instead of keeping that of the image; the short side becomes `resize` in both cases.
struct Preprocess {
    std::int64_t height, width, channels, resize;
    Interpolation interpolation;
    std::vector<double> mean, std;
    bool squash = false;

    // Within these limits, no size and no sum overflows. preprocess() checks them.
    static constexpr std::int64_t MAX_OUTPUT_SIDE = 8192;                    // for height, width and resize
    static constexpr std::int64_t MAX_IMAGE_SIDE = std::int64_t{1} << 22;    // weights.h gives the reason
    static constexpr std::int64_t MAX_IMAGE_STRIDE = std::int64_t{1} << 40;  // so that stride * height < 2^63
};

// pixels: u8, `height` rows of `width` interleaved pixels with 1 channel (gray), 3 (RGB) or 4 (RGBA, whose alpha is
// dropped), and `stride` bytes from row to row. The image is upright: its EXIF orientation has been applied.
// out: u8 [p.height, p.width, p.channels].
// Allocates at most about twice the size of the image or of the output, whichever is larger, plus about 50 bytes per
// row and per column. Throws BadProgram if an argument is out of range.
void preprocess(const Preprocess& p, const std::uint8_t* pixels, std::int64_t height, std::int64_t width,
                std::int64_t channels, std::int64_t stride, std::uint8_t* out);

}  // namespace fqvit
