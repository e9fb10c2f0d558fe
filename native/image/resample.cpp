#include "image/resample.h"

#include <algorithm>
#include <vector>

#include "core/memory_size.h"

namespace fqvit {
namespace {

constexpr std::int32_t HALF = 1 << (WEIGHT_BITS - 1);

std::uint8_t to_byte(std::int32_t sum) {
    return static_cast<std::uint8_t>(std::clamp<std::int32_t>(sum >> WEIGHT_BITS, 0, 255));
}

std::int64_t count_of(const Axis& axis) { return static_cast<std::int64_t>(axis.windows.size()); }

// A range of pixels along an axis.
struct Range {
    std::int64_t begin, end;
};

// Returns the range of inputs that the windows read, and makes the windows relative to it.
Range take_inputs(Axis& axis) {
    const Window& front = axis.windows.front();
    Range range{front.first, front.first + front.count};
    for (const Window& window : axis.windows) {
        range.begin = std::min(range.begin, window.first);
        range.end = std::max(range.end, window.first + window.count);
    }
    for (Window& window : axis.windows) window.first -= range.begin;
    return range;
}

ImageView part_of(const ImageView& image, Range rows, Range columns) {
    return {image.row(rows.begin) + columns.begin * image.channels, rows.end - rows.begin, columns.end - columns.begin,
            image.channels, image.stride};
}

// Luma of ITU-R BT.601 in units of 2^-16, as in Pillow's convert("L"). y: u8 [height, width].
void to_gray(const ImageView& image, std::uint8_t* y) {
    for (std::int64_t row = 0; row < image.height; ++row) {
        const std::uint8_t* rgb = image.row(row);
        for (std::int64_t column = 0; column < image.width; ++column, rgb += image.channels) {
            *y++ = static_cast<std::uint8_t>((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
        }
    }
}

// Resizes a row whose pixels are CHANNELS bytes apart. y: u8 [columns, BANDS].
template <int CHANNELS, int BANDS>
void resize_row(const std::uint8_t* x, const Axis& columns, std::uint8_t* y) {
    for (const Window& window : columns.windows) {
        const std::int32_t* weights = columns.weights.data() + window.offset;
        const std::uint8_t* pixel = x + window.first * CHANNELS;
        std::int32_t sums[BANDS];
        std::fill_n(sums, BANDS, HALF);
        for (std::int64_t i = 0; i < window.count; ++i, pixel += CHANNELS) {
            for (int band = 0; band < BANDS; ++band) sums[band] += weights[i] * pixel[band];
        }
        for (const std::int32_t sum : sums) *y++ = to_byte(sum);
    }
}

// y: u8 [height, columns, bands], with 1 band for gray images and 3 for RGB and RGBA
void resize_horizontally(const ImageView& image, const Axis& columns, std::uint8_t* y, std::int64_t y_stride) {
    const auto resize = image.channels == 1   ? resize_row<1, 1>
                        : image.channels == 3 ? resize_row<3, 3>
                                              : resize_row<4, 3>;
    for (std::int64_t row = 0; row < image.height; ++row) resize(image.row(row), columns, y + row * y_stride);
}

// Computes `size` adjacent bytes of an output row. x: the bytes at the same position in the first input row.
void combine_rows(const std::uint8_t* x, std::int64_t stride, const std::int32_t* weights, std::int64_t count,
                  std::int64_t size, std::int32_t* sums, std::uint8_t* y) {
    std::fill_n(sums, size, HALF);
    for (std::int64_t i = 0; i < count; ++i, x += stride) {
        for (std::int64_t j = 0; j < size; ++j) sums[j] += weights[i] * x[j];
    }
    for (std::int64_t j = 0; j < size; ++j) y[j] = to_byte(sums[j]);
}

// y: u8 [rows, width, channels]
void resize_vertically(const ImageView& image, const Axis& rows, std::uint8_t* y, std::int64_t y_stride) {
    constexpr std::int64_t BLOCK = 16;  // a constant size, so that the compiler keeps the sums in registers
    const std::int64_t size = image.width * image.channels, whole = size - size % BLOCK;
    std::int32_t sums[BLOCK];
    for (const Window& window : rows.windows) {
        const std::int32_t* weights = rows.weights.data() + window.offset;
        const std::uint8_t* x = image.row(window.first);
        for (std::int64_t at = 0; at < whole; at += BLOCK) {
            combine_rows(x + at, image.stride, weights, window.count, BLOCK, sums, y + at);
        }
        combine_rows(x + whole, image.stride, weights, window.count, size - whole, sums, y + whole);
        y += y_stride;
    }
}

}  // namespace

void resample(const ImageView& image, Axis columns, Axis rows, PassOrder order, std::int64_t bands, std::uint8_t* out,
              std::int64_t out_stride) {
    ImageView part = part_of(image, take_inputs(rows), take_inputs(columns));
    std::vector<std::uint8_t> gray, between;
    if (bands == 1 && image.channels != 1) {
        gray.resize(memory_size(part.height * part.width));
        to_gray(part, gray.data());
        part = {gray.data(), part.height, part.width, 1, part.width};
    }
    if (order == PassOrder::horizontal_first) {
        const std::int64_t stride = count_of(columns) * bands;
        between.resize(memory_size(part.height * stride));
        resize_horizontally(part, columns, between.data(), stride);
        resize_vertically({between.data(), part.height, count_of(columns), bands, stride}, rows, out, out_stride);
    } else {
        const std::int64_t stride = part.width * part.channels;
        between.resize(memory_size(count_of(rows) * stride));
        resize_vertically(part, rows, between.data(), stride);
        resize_horizontally({between.data(), count_of(rows), part.width, part.channels, stride}, columns, out,
                            out_stride);
    }
}

}  // namespace fqvit
