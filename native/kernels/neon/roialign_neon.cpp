// RoIAlign with NEON, 16 codes at a time. kernels/roialign.h has the formula.
//
// Exact because the limits in core/roialign.h keep every sum below 2^31. The first pass does not subtract the zero
// point from the codes: it adds modulo 2^32 and starts each sum at 2^7 - zero * (sum of weights).
#include "kernels/roialign.h"

#if defined(__aarch64__) && defined(__GNUC__)

#include "kernels/neon/neon.h"

namespace fqvit {
namespace {

using namespace neon;

// Adds rows of the map, multiplied by their weights, to 16 sums, as in the first formula of kernels/roialign.h.
// x: the codes in the first row
FQVIT_NEON_INLINE void add_rows(const std::uint8_t* x, std::int64_t stride, const std::int32_t* weights,
                                std::int64_t rows, std::int64_t count, uint32x4_t (&sum)[4]) {
    for (std::int64_t row = 0; row < rows; ++row, x += stride) {
        const uint8x16_t codes = load_some(x, count);
        const uint16x8_t low = vmovl_u8(vget_low_u8(codes)), high = vmovl_high_u8(codes);
        const auto weight = static_cast<std::uint16_t>(weights[row]);  // 0..2^15
        sum[0] = vmlal_n_u16(sum[0], vget_low_u16(low), weight);
        sum[1] = vmlal_high_n_u16(sum[1], low, weight);
        sum[2] = vmlal_n_u16(sum[2], vget_low_u16(high), weight);
        sum[3] = vmlal_high_n_u16(sum[3], high, weight);
    }
}

// strip[i] = (sum_y wy[y] * (map[y, i] - zero) + 2^7) >> 8. The strip has room for 16 elements more than `length`.
void pool_rows(const RoiAlign& a, const std::uint8_t* x, const std::int32_t* weights, std::int64_t rows,
               std::int64_t length, std::int32_t* strip) {
    std::int32_t total = 0;
    for (std::int64_t row = 0; row < rows; ++row) total += weights[row];
    const uint32x4_t start = vdupq_n_u32(static_cast<std::uint32_t>(128 - a.zero * total));
    for (std::int64_t i = 0; i < length; i += 16) {
        uint32x4_t sum[4] = {start, start, start, start};
        add_rows(x + i, a.width * a.channels, weights, rows, length - i, sum);
        for (int part = 0; part < 4; ++part) {
            vst1q_s32(strip + i + 4 * part, vshrq_n_s32(vreinterpretq_s32_u32(sum[part]), 8));
        }
    }
}

// The codes of 8 channels: clamp(requantize(sum_x wx[x] * strip[x, c]) + head_zero)
FQVIT_NEON_INLINE uint8x8_t pool_columns(const RoiAlign& a, const std::int32_t* strip, const std::int32_t* weights,
                                         std::int64_t columns) {
    int32x4_t low = vdupq_n_s32(0), high = low;
    for (std::int64_t column = 0; column < columns; ++column, strip += a.channels) {
        low = vmlaq_n_s32(low, vld1q_s32(strip), weights[column]);
        high = vmlaq_n_s32(high, vld1q_s32(strip + 4), weights[column]);
    }
    const int32x4_t mult = vdupq_n_s32(static_cast<std::int32_t>(a.mult));
    const int64x2_t right = vdupq_n_s64(-a.shift);
    const auto scale = [&](int32x4_t sum) __attribute__((always_inline)) {
        return neon::round_shift(vmull_s32(vget_low_s32(sum), vget_low_s32(mult)), vmull_high_s32(sum, mult), right,
                                 right);
    };
    return to_u8(scale(low), scale(high), vdupq_n_s16(static_cast<std::int16_t>(a.head_zero)),
                 vdup_n_u8(static_cast<std::uint8_t>(a.last)));
}

struct AlignBoxNeon {
    void operator()(const RoiAlign& a, RoiAlignScratch& scratch, std::uint8_t* y) const {
        std::int64_t left = 0, right = 0;
        cell_range(scratch.columns, a.side, left, right);
        const std::int64_t length = (right - left) * a.channels;
        std::int32_t* strip = scratch.strip.data();
        for (std::int64_t bin_y = 0; bin_y < a.side; ++bin_y) {
            const std::int64_t top = scratch.rows.begin[bin_y], bottom = scratch.rows.end[bin_y];
            pool_rows(a, a.map + (top * a.width + left) * a.channels,
                      scratch.rows.weights.data() + bin_y * a.height + top, bottom - top, length, strip);
            for (std::int64_t bin_x = 0; bin_x < a.side; ++bin_x, y += a.channels) {
                const std::int64_t first = scratch.columns.begin[bin_x], columns = scratch.columns.end[bin_x] - first;
                const std::int32_t* weights = scratch.columns.weights.data() + bin_x * a.width + first;
                const std::int32_t* from = strip + (columns == 0 ? 0 : first - left) * a.channels;
                for (std::int64_t c = 0; c < a.channels; c += 8) {
                    const uint8x8_t codes = pool_columns(a, from + c, weights, columns);
                    if (c + 8 <= a.channels) {
                        vst1_u8(y + c, codes);
                    } else {
                        std::uint8_t copy[8];
                        vst1_u8(copy, codes);
                        std::memcpy(y + c, copy, static_cast<std::size_t>(a.channels - c));
                    }
                }
            }
        }
    }
};

}  // namespace

void align_boxes_neon(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch) {
    align_boxes(a, begin, end, scratch, AlignBoxNeon());
}

}  // namespace fqvit

#else

namespace fqvit {
void align_boxes_neon(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch) {
    align_boxes_scalar(a, begin, end, scratch);
}
}  // namespace fqvit

#endif
