#include "image/preprocess.h"

#include <algorithm>

#include "core/value.h"
#include "image/resample.h"
#include "image/weights.h"

namespace fqvit {
namespace {

// Above this many resized pixels, Preprocess.apply resizes only the cropped part, with slightly different weights.
constexpr std::int64_t FULL_RESIZE_LIMIT = std::int64_t{1} << 24;

void require_range(const char* name, std::int64_t value, std::int64_t lo, std::int64_t hi) {
    require(value >= lo && value <= hi, "preprocess: ", name, " is ", value, ", expected ", lo, " to ", hi);
}

void check(const Preprocess& p, const ImageView& image) {
    require_range("height", p.height, 1, Preprocess::MAX_OUTPUT_SIDE);
    require_range("width", p.width, 1, Preprocess::MAX_OUTPUT_SIDE);
    require_range("resize", p.resize, 1, Preprocess::MAX_OUTPUT_SIDE);
    require(p.channels == 1 || p.channels == 3, "preprocess: channels is ", p.channels, ", expected 1 or 3");
    require_range("height of the image", image.height, 1, Preprocess::MAX_IMAGE_SIDE);
    require_range("width of the image", image.width, 1, Preprocess::MAX_IMAGE_SIDE);
    require(image.channels == 1 || image.channels == 3 || image.channels == 4, "preprocess: the image has ",
            image.channels, " channels, expected 1, 3 or 4");
    require_range("stride of the image", image.stride, image.width * image.channels, Preprocess::MAX_IMAGE_STRIDE);
}

// Returns the length of a side after the short side is resized to `resize`. Rounded down, like
// int(resize * side / short_side) in Python: its float division cannot round up to the next integer, because the
// operands are below 2^35.
std::int64_t resized_side(std::int64_t side, std::int64_t short_side, std::int64_t resize) {
    return resize * side / short_side;
}

// One axis of the center crop.
struct Crop {
    std::int64_t begin, end;  // the resized pixels inside the crop
    std::int64_t padding;     // pixels of the crop before the first resized pixel
};

Crop center_crop(std::int64_t resized, std::int64_t crop) {
    if (crop > resized) return {0, resized, (crop - resized) / 2};
    const std::int64_t half = (resized - crop) / 2, odd = (resized - crop) % 2;
    const std::int64_t start = half + (odd & half);  // (resized - crop) / 2, rounded half to even
    return {start, start + crop, 0};
}

// Returns the order that Pillow 13 chooses when it resizes an image to `height` x `width`: it compares the numbers of
// removed rows and columns.
PassOrder pass_order(const ImageView& image, std::int64_t height, std::int64_t width) {
    const std::int64_t rows = image.height - height, columns = image.width - width;
    return rows > 0 && rows > 2 * columns ? PassOrder::vertical_first : PassOrder::horizontal_first;
}

}  // namespace

void preprocess(const Preprocess& p, const std::uint8_t* pixels, std::int64_t height, std::int64_t width,
                std::int64_t channels, std::int64_t stride, std::uint8_t* out) {
    const ImageView image{pixels, height, width, channels, stride};
    check(p, image);
    const std::int64_t shape_height = p.squash ? p.height : height, shape_width = p.squash ? p.width : width;
    const std::int64_t short_side = std::min(shape_height, shape_width);
    const std::int64_t resized_height = resized_side(shape_height, short_side, p.resize);
    const std::int64_t resized_width = resized_side(shape_width, short_side, p.resize);
    const Crop vertical = center_crop(resized_height, p.height), horizontal = center_crop(resized_width, p.width);

    const bool whole = resized_height * resized_width <= FULL_RESIZE_LIMIT;
    const auto make_axis = whole ? resize_axis : resize_part_of_axis;
    const Axis rows = make_axis(p.interpolation, height, resized_height, vertical.begin, vertical.end);
    const Axis columns = make_axis(p.interpolation, width, resized_width, horizontal.begin, horizontal.end);
    const PassOrder order = whole ? pass_order(image, resized_height, resized_width)
                                  : pass_order(image, vertical.end - vertical.begin, horizontal.end - horizontal.begin);

    const std::int64_t first = vertical.padding * p.width + horizontal.padding, count = p.height * p.width;
    std::fill_n(out, count * p.channels, std::uint8_t{0});
    if (p.channels == 1 || channels != 1) {
        resample(image, columns, rows, order, p.channels, out + first * p.channels, p.width * p.channels);
        return;
    }
    std::vector<std::uint8_t> gray(static_cast<std::size_t>(count));
    resample(image, columns, rows, order, 1, gray.data() + first, p.width);
    for (const std::uint8_t code : gray) out = std::fill_n(out, 3, code);
}

}  // namespace fqvit
