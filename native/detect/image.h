// Prepares an image for a detector: resizes it with its aspect ratio kept and pads it to multiples of 32. The results
// are the same as those of src/fqvit/detect/images.py and opencv.py.
#pragma once

#include <cstdint>

#include "detect/boxes.h"

namespace fqvit {

// How an image is interpolated: with one rounding, or bit-identically to OpenCV.
enum class ResizeRule : std::uint8_t { rounded, opencv };

// A decoded, upright RGB image: u8 [height, width, 3] with `stride` bytes from row to row.
struct Image {
    const std::uint8_t* pixels;
    ImageSize size;
    std::int64_t stride;

    static constexpr std::int64_t MAX_IMAGE_SIDE = (std::int64_t{1} << 31) - 1;  // so that no product overflows
};

// Rounds the sides up to multiples of 32.
ImageSize padded_size(ImageSize size);

// The largest size of the same aspect ratio within short_side and long_side, at least 1 x 1.
ImageSize resized_size(ImageSize size, std::int64_t short_side, std::int64_t long_side);

// Writes the image, resized to `size`, to out: u8 [size.height, size.width, 3] with `stride` bytes from row to row.
void resize_image(const Image& image, ResizeRule rule, ImageSize size, std::uint8_t* out, std::int64_t stride);

// Fills out, u8 [whole.height, whole.width, 3], with a color to the right of its `used` part and below it.
void pad_image(std::uint8_t* out, ImageSize used, ImageSize whole, const std::array<std::int64_t, 3>& color);

}  // namespace fqvit
