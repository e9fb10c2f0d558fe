// Epilogues with NEON, 8 channels at a time, and the tables of NEON kernels. kernels.h has the formulas.
//
// Exact because products keep all 64 bits or their exact high half (RequantizeHigh), and the ops prove that sums fit
// in 63 bits. The last channels are computed by a vector that overlaps the one before it, which is safe because y never
// shares memory with an input.
#include "kernels/kernels.h"

#if defined(__aarch64__) && defined(__GNUC__)

#include <algorithm>

#include "kernels/neon/kernels_neon.h"
#include "kernels/neon/neon.h"
#include "kernels/scalar/row_product_scalar.h"

namespace fqvit {
namespace {

using namespace neon;

constexpr int LANES = 8;
constexpr int MAX_ROWS = 16;  // rows that one pass of look_up_shared() handles

// Requantization::HIGH_HALF: every shift is at least 32.
struct HighHalf {
    int32x4_t bias[2];
    RequantizeHigh requantize[2];

    HighHalf(const Epilogue& e, std::int64_t channel) {
        const Requantization& q = e.requantization;
        for (int i = 0; i < 2; ++i, channel += 4) {
            bias[i] = vld1q_s32(e.bias + channel);
            requantize[i] = {vld1q_s32(q.vector_mult + channel),
                             vsubq_s32(vdupq_n_s32(-1), vld1q_s32(q.vector_shift + channel))};
        }
    }
    FQVIT_NEON_INLINE int32x4_t operator()(int32x4_t acc, int i) const {
        return requantize[i](vaddq_s32(acc, bias[i]));
    }
};

// Any shift: the rounded 64-bit product, saturated to i32, which does not change the code.
struct AnyShift {
    int32x4_t bias[2], mult[2];
    int64x2_t right[4];

    AnyShift(const Epilogue& e, std::int64_t channel) {
        const Requantization& q = e.requantization;
        const int16x8_t negated = vmovl_s8(vneg_s8(vreinterpret_s8_u8(vld1_u8(q.shift + channel))));
        const int32x4_t low = vmovl_s16(vget_low_s16(negated)), high = vmovl_high_s16(negated);
        right[0] = vmovl_s32(vget_low_s32(low)), right[1] = vmovl_high_s32(low);
        right[2] = vmovl_s32(vget_low_s32(high)), right[3] = vmovl_high_s32(high);
        for (int i = 0; i < 2; ++i) {
            bias[i] = vld1q_s32(e.bias + channel + 4 * i);
            mult[i] = vreinterpretq_s32_u32(vld1q_u32(q.mult + channel + 4 * i));
        }
    }
    FQVIT_NEON_INLINE int32x4_t operator()(int32x4_t acc, int i) const {
        const int32x4_t sum = vaddq_s32(acc, bias[i]);
        return round_shift(vmull_s32(vget_low_s32(sum), vget_low_s32(mult[i])), vmull_high_s32(sum, mult[i]),
                           right[2 * i], right[2 * i + 1]);
    }
};

// The u8 codes of 8 channels.
template <class Scale>
struct ByteCodes {
    Scale scale;
    int16x8_t zero;
    uint8x8_t last;

    ByteCodes(const Epilogue& e, std::int64_t channel)
        : scale(e, channel),
          zero(vcombine_s16(vmovn_s32(vld1q_s32(e.requantization.zero + channel)),
                            vmovn_s32(vld1q_s32(e.requantization.zero + channel + 4)))),
          last(vdup_n_u8(static_cast<std::uint8_t>(e.requantization.last))) {}

    FQVIT_NEON_INLINE uint8x8_t operator()(const std::int32_t* acc) const {
        return to_u8(scale(vld1q_s32(acc), 0), scale(vld1q_s32(acc + 4), 1), zero, last);
    }
};

// CODES as u8 on 8 channels.
template <class Scale>
void store_bytes(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const ByteCodes<Scale> codes(e, channel);
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<std::uint8_t*>(y) + tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, to += stride) vst1_u8(to, codes(acc));
}

// The same on 16 channels.
template <class Scale>
void store_bytes_16(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const ByteCodes<Scale> left(e, channel), right(e, channel + LANES);
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<std::uint8_t*>(y) + tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, to += stride) {
        vst1_u8(to, left(acc));
        vst1_u8(to + LANES, right(acc + LANES));
    }
}

// The codes of 8 channels, u8 or u16.
template <class Scale>
struct WordCodes {
    Scale scale;
    int32x4_t zero[2];
    uint16x8_t last;

    WordCodes(const Epilogue& e, std::int64_t channel)
        : scale(e, channel),
          zero{vld1q_s32(e.requantization.zero + channel), vld1q_s32(e.requantization.zero + channel + 4)},
          last(vdupq_n_u16(static_cast<std::uint16_t>(e.requantization.last))) {}

    FQVIT_NEON_INLINE uint16x8_t operator()(const std::int32_t* acc) const {
        return to_u16(vqaddq_s32(scale(vld1q_s32(acc), 0), zero[0]), vqaddq_s32(scale(vld1q_s32(acc + 4), 1), zero[1]),
                      last);
    }
};

// CODES as u16 on 8 channels.
template <class Scale>
void store_words(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const WordCodes<Scale> codes(e, channel);
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<std::uint16_t*>(y) + tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, to += stride) vst1q_u16(to, codes(acc));
}

// I32 on 8 channels.
void store_i32(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const HighHalf scale(e, channel);
    auto* to = static_cast<std::int32_t*>(y) + tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; ++r, acc += tile.columns, to += tile.stride) {
        vst1q_s32(to, scale(vld1q_s32(acc), 0));
        vst1q_s32(to + 4, scale(vld1q_s32(acc + 4), 1));
    }
}

// LOOKUP on 8 channels whose tables differ or are too long for registers, by scalar loads.
template <class Scale, class Entry>
void look_up_each(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const WordCodes<Scale> codes(e, channel);
    const Entry* table[LANES];
    for (int i = 0; i < LANES; ++i) table[i] = static_cast<const Entry*>(e.tables) + e.starts[channel + i];
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<Entry*>(y) + tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, to += stride) {
        const uint16x8_t code = codes(acc);
        const Entry found[LANES] = {table[0][vgetq_lane_u16(code, 0)], table[1][vgetq_lane_u16(code, 1)],
                                    table[2][vgetq_lane_u16(code, 2)], table[3][vgetq_lane_u16(code, 3)],
                                    table[4][vgetq_lane_u16(code, 4)], table[5][vgetq_lane_u16(code, 5)],
                                    table[6][vgetq_lane_u16(code, 6)], table[7][vgetq_lane_u16(code, 7)]};
        for (int i = 0; i < LANES; ++i) to[i] = found[i];
    }
}

// LOOKUP on 16 channels that share a table of 256 bytes, which fits in 16 registers.
template <class Scale>
void look_up_shared(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const ByteCodes<Scale> left(e, channel), right(e, channel + LANES);
    const auto* table = static_cast<const std::uint8_t*>(e.tables) + e.starts[channel];
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<std::uint8_t*>(y) + tile.row * stride + channel;
    for (int first = 0; first < tile.rows; first += MAX_ROWS) {
        const int rows = std::min(MAX_ROWS, tile.rows - first);
        std::uint8_t found[MAX_ROWS * 2 * LANES];
        for (int r = 0; r < rows; ++r, acc += columns) {
            vst1_u8(found + r * 2 * LANES, left(acc));
            vst1_u8(found + r * 2 * LANES + LANES, right(acc + LANES));
        }
        const ByteTable<4> entries(table);
        for (int r = 0; r < rows; ++r, to += stride) vst1q_u8(to, entries(vld1q_u8(found + r * 2 * LANES)));
    }
}

template <Residual::Type type>
FQVIT_NEON_INLINE void load_residual(const void* x, std::int64_t at, int32x4_t (&to)[2]) {
    if constexpr (type == Residual::I16) {
        const int16x8_t words = vld1q_s16(static_cast<const std::int16_t*>(x) + at);
        to[0] = vmovl_s16(vget_low_s16(words)), to[1] = vmovl_high_s16(words);
    } else {
        widen(load_codes(x, type == Residual::U16, at), to);
    }
}

// ADD on 8 channels: round_shift((acc + bias) * mult + (x - x_zero) * 2^alpha * x_mult, shift) with sums of 64 bits.
// Requires that (x - x_zero) * 2^alpha fits in i32 (Epilogue::low_half).
template <Residual::Type type, bool wide>
void add_residual(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const Requantization& q = e.requantization;
    const Residual& x = e.residual;
    const AnyShift s(e, channel);
    int32x4_t zero[2], x_zero[2], alpha[2], x_mult[2];
    for (int i = 0; i < 2; ++i) {
        zero[i] = vld1q_s32(q.zero + channel + 4 * i);
        x_zero[i] = vld1q_s32(x.zero + channel + 4 * i);
        alpha[i] = vld1q_s32(x.alpha + channel + 4 * i);
        x_mult[i] = vld1q_s32(x.mult + channel + 4 * i);
    }
    const void* from = x.x;
    const std::int64_t columns = tile.columns, stride = tile.stride;
    const std::int32_t last = q.last;
    std::int64_t at = tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, at += stride) {
        int32x4_t codes[2], sum[2];
        load_residual<type>(from, at, codes);
        for (int i = 0; i < 2; ++i) {
            const int32x4_t a = vaddq_s32(vld1q_s32(acc + 4 * i), s.bias[i]);
            const int32x4_t v = vshlq_s32(vsubq_s32(codes[i], x_zero[i]), alpha[i]);
            const int64x2_t low = vmlal_s32(vmull_s32(vget_low_s32(a), vget_low_s32(s.mult[i])), vget_low_s32(v),
                                            vget_low_s32(x_mult[i]));
            const int64x2_t high = vmlal_high_s32(vmull_high_s32(a, s.mult[i]), v, x_mult[i]);
            sum[i] = vqaddq_s32(round_shift(low, high, s.right[2 * i], s.right[2 * i + 1]), zero[i]);
        }
        store_codes(sum[0], sum[1], last, wide, y, at);
    }
}

void add_bias(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const int32x4_t low = vld1q_s32(e.bias + channel), high = vld1q_s32(e.bias + channel + 4);
    auto* to = static_cast<std::int32_t*>(y) + tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; ++r, acc += tile.columns, to += tile.stride) {
        vst1q_s32(to, vaddq_s32(vld1q_s32(acc), low));
        vst1q_s32(to + 4, vaddq_s32(vld1q_s32(acc + 4), high));
    }
}

using Columns = void (*)(const Epilogue&, const Tile&, const std::int32_t* acc, std::int64_t channel, void* y);

Columns choose_add(const Epilogue& e) {
    switch (e.residual.type) {
        case Residual::U8: return e.wide ? add_residual<Residual::U8, true> : add_residual<Residual::U8, false>;
        case Residual::U16: return e.wide ? add_residual<Residual::U16, true> : add_residual<Residual::U16, false>;
        default: return e.wide ? add_residual<Residual::I16, true> : add_residual<Residual::I16, false>;
    }
}

// Returns the function for 8 channels, or null if there is none for these parameters.
Columns choose_columns(const Epilogue& e) {
    const bool high = e.requantization.form == Requantization::HIGH_HALF;
    switch (e.kind) {
        case Epilogue::ACC: return add_bias;
        case Epilogue::ADD: return e.low_half ? choose_add(e) : nullptr;
        case Epilogue::I32: return high ? store_i32 : nullptr;
        case Epilogue::LOOKUP:
            if (e.wide) return high ? look_up_each<HighHalf, std::uint16_t> : look_up_each<AnyShift, std::uint16_t>;
            return high ? look_up_each<HighHalf, std::uint8_t> : look_up_each<AnyShift, std::uint8_t>;
        default:
            if (e.wide) return high ? store_words<HighHalf> : store_words<AnyShift>;
            return high ? store_bytes<HighHalf> : store_bytes<AnyShift>;
    }
}

// Returns the function for 16 channels from c on, or null if there is none.
Columns choose_16_columns(const Epilogue& e, const Tile& tile, int c) {
    if (e.wide || c + 2 * LANES > tile.valid_columns) return nullptr;
    const bool high = e.requantization.form == Requantization::HIGH_HALF;
    if (e.kind == Epilogue::CODES) return high ? store_bytes_16<HighHalf> : store_bytes_16<AnyShift>;
    if (e.kind != Epilogue::LOOKUP || e.requantization.last != 255) return nullptr;
    const std::int32_t* starts = e.starts + tile.channel + c;
    const int32x4_t first = vld1q_dup_s32(starts);
    const uint32x4_t left = vandq_u32(vceqq_s32(vld1q_s32(starts), first), vceqq_s32(vld1q_s32(starts + 4), first));
    const uint32x4_t right =
        vandq_u32(vceqq_s32(vld1q_s32(starts + 8), first), vceqq_s32(vld1q_s32(starts + 12), first));
    if (vminvq_u32(vandq_u32(left, right)) == 0) return nullptr;
    return high ? look_up_shared<HighHalf> : look_up_shared<AnyShift>;
}

void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const Columns eight = tile.valid_columns < LANES ? nullptr : choose_columns(e);
    if (eight == nullptr) {
        kernels_scalar()->epilogue(e, tile, y);
        return;
    }
    for (int c = 0; c < tile.valid_columns;) {
        const Columns sixteen = choose_16_columns(e, tile, c);
        if (sixteen == nullptr) c = std::min(c, tile.valid_columns - LANES);
        (sixteen == nullptr ? eight : sixteen)(e, tile, tile.acc + c, tile.channel + c, y);
        c += sixteen == nullptr ? LANES : 2 * LANES;
    }
}

// Every AArch64 compiler vectorizes these loops, because NEON is part of the architecture.
void multiply_row(const RowProduct& product, std::int32_t* acc) { scalar::multiply_row(product, acc); }

}  // namespace

const Kernels* kernels_neon() {
    static constexpr Kernels table = {
        "neon", epilogue, layernorm_neon, attention_neon, attention_scratch_neon, multiply_row, &elementwise_neon};
    return &table;
}

const Kernels* kernels_neon_dotprod() {
    static constexpr Kernels table = {"neon_dotprod",         epilogue,     layernorm_neon,   attention_neon_dotprod,
                                      attention_scratch_neon, multiply_row, &elementwise_neon};
    return attention_tiles_neon_dotprod() == nullptr ? nullptr : &table;
}

}  // namespace fqvit

#else

namespace fqvit {
const Kernels* kernels_neon() { return nullptr; }
const Kernels* kernels_neon_dotprod() { return nullptr; }
}  // namespace fqvit

#endif
