// Epilogue with AVX-512, 32 columns at a time. kernels.h has the formulas.
//
// Exact because vpmuldq multiplies i32 to full 64-bit products, sums wrap modulo 2^64 and the ops prove that the result
// fits in 63 bits. The AVX2 kernel handles parameters that are not supported here.
#if defined(__x86_64__) && defined(__GNUC__)

#include <cstring>

#include "kernels/avx512/kernels_avx512.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {
namespace {

constexpr std::int64_t LANES = 16, COLUMNS = 2 * LANES;

// Per-channel constants of 16 columns: (acc * mult + half) >> shift, where half is the sum of all terms that are added.
struct Columns {
    Vector mult, mult_odd, half_even, half_odd, shift;

    FQVIT_INLINE Vector operator()(Vector acc) const {
        const Vector even = add_i64(mul_even(acc, mult), half_even);
        const Vector odd = add_i64(mul_even(shr_i64(acc, 32), mult_odd), half_odd);
        return sar_each_i32(high_halves(even, odd), shift);
    }
};

// count: number of channels that exist. vector_half is padded to a multiple of 8 channels; within each group of 8, the
// even channels precede the odd ones.
FQVIT_INLINE Columns load_columns(const Requantization& q, std::int64_t channel, std::int64_t count) {
    const std::uint16_t mask = first_16(count > 0 ? count : 0);
    const Vector low = load_i64(q.vector_half + channel, count > 0 ? 0xff : 0);
    const Vector high = load_i64(q.vector_half + channel + 8, count > 8 ? 0xff : 0);
    const Vector mult = load_i32(q.vector_mult + channel, mask);
    return {mult, shr_i64(mult, 32), FQVIT_SHUFFLE_LANES(low, high, 0x44), FQVIT_SHUFFLE_LANES(low, high, 0xee),
            load_i32(q.vector_shift + channel, mask)};
}

// After 32 columns of two rows are packed twice, groups of four columns are in the order 0 16 0' 16' 4 20 4' 20' ...,
// where ' marks the second row. This permutation of 16 x i32 restores the order of the columns, row by row.
alignas(64) constexpr std::int32_t BY_ROW[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// Stores the lower 32 bytes to one row and, if `both`, the upper ones to the next.
FQVIT_INLINE void store_rows(std::uint8_t* y, std::int64_t stride, std::uint32_t mask, bool both, Vector codes) {
    if (mask == first_32(COLUMNS)) {
        store_32_bytes(y, codes);
        if (both) store_upper_32_bytes(y + stride, codes);
    } else {
        store_i8(y, mask, codes);
        if (both) store_i8(y + stride, mask, FQVIT_SHUFFLE_LANES(codes, codes, 0xee));
    }
}

// CODES with u8 codes, on up to 32 columns of all rows.
FQVIT_AVX512 void store_codes(const Epilogue& e, const Tile& tile, std::int64_t c, std::uint8_t* y) {
    const Requantization& q = e.requantization;
    const std::int64_t channel = tile.channel + c, count = tile.valid_columns - c;
    const Columns low = load_columns(q, channel, count), high = load_columns(q, channel + LANES, count - LANES);
    const std::uint32_t mask = first_32(count);
    const auto valid = static_cast<std::uint16_t>(mask), valid_high = static_cast<std::uint16_t>(mask >> LANES);
    const Vector last = set_i8(q.last), by_row = load(BY_ROW);
    const std::int32_t* acc = tile.acc + c;
    y += tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; r += 2, y += 2 * tile.stride, acc += 2 * tile.columns) {
        const bool both = r + 1 < tile.rows;
        const std::int32_t* next = both ? acc + tile.columns : acc;
        const Vector first = pack_i32_as_i16(low(load_i32(acc, valid)), high(load_i32(acc + LANES, valid_high)));
        const Vector second = pack_i32_as_i16(low(load_i32(next, valid)), high(load_i32(next + LANES, valid_high)));
        store_rows(y, tile.stride, mask, both, permute_i32(by_row, min_u8(pack_i16_as_u8(first, second), last)));
    }
}

// The constants of a LOOKUP for up to 32 columns.
struct LookupColumns {
    Columns low, high;
    Vector last;
    std::uint16_t valid, valid_high;

    // The codes of one row, which pack_i32_as_u16 orders.
    FQVIT_INLINE Vector operator()(const std::int32_t* acc) const {
        return min_u16(pack_i32_as_u16(low(load_i32(acc, valid)), high(load_i32(acc + LANES, valid_high))), last);
    }
};

// Looks up the columns of the mask in one table, in all rows.
template <class Table>
FQVIT_INLINE void look_up(const Epilogue& e, const Tile& tile, std::int64_t c, std::uint32_t mask, const Table& table,
                          std::uint8_t* y) {
    const Requantization& q = e.requantization;
    const std::int64_t channel = tile.channel + c, count = tile.valid_columns - c;
    const std::uint32_t valid = first_32(count);
    const LookupColumns columns = {load_columns(q, channel, count), load_columns(q, channel + LANES, count - LANES),
                                   set_i16(q.last), static_cast<std::uint16_t>(valid),
                                   static_cast<std::uint16_t>(valid >> LANES)};
    const Vector by_row = load(BY_ROW);
    const std::int32_t* acc = tile.acc + c;
    y += tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; r += 2, y += 2 * tile.stride, acc += 2 * tile.columns) {
        const bool both = r + 1 < tile.rows;
        const Vector found = table(columns(acc), columns(both ? acc + tile.columns : acc));
        store_rows(y, tile.stride, mask, both, permute_i32(by_row, found));
    }
}

template <int parts>
FQVIT_AVX512 void look_up_large(const Epilogue& e, const Tile& tile, std::int64_t c, std::int32_t start,
                                std::uint32_t mask, std::uint8_t* y) {
    LargeTable<parts> table{static_cast<const std::uint8_t*>(e.tables) + start};
    const std::int32_t last = e.requantization.last;
    alignas(64) std::uint8_t padded[256 * parts];
    if (last + 1 < 256 * parts) {
        std::memcpy(padded, table.entries, static_cast<std::size_t>(last) + 1);
        table.entries = padded;
    }
    look_up(e, tile, c, mask, table, y);
}

#ifdef FQVIT_AVX512_BW
FQVIT_AVX512 void look_up_lines(const Epilogue& e, const Tile& tile, std::int64_t c, std::int32_t start,
                                std::uint32_t mask, std::uint8_t* y) {
    look_up(e, tile, c, mask, LineTable(e.lines[start / TableLines::LENGTH]), y);
}
#endif

// LOOKUP of up to 1024 u8 entries, on up to 32 columns of all rows: runs once per distinct table, which stays in
// registers. Linear sorts channels by table, so that most tiles use only one table (Kernels::groups_tables).
FQVIT_AVX512 void store_looked_up(const Epilogue& e, const Tile& tile, std::int64_t c, std::uint8_t* y) {
    const std::uint32_t valid = first_32(tile.valid_columns - c);
    const std::int32_t* starts = e.starts + tile.channel + c;
    const Vector low = load_i32(starts, static_cast<std::uint16_t>(valid));
    const Vector high = load_i32(starts + LANES, static_cast<std::uint16_t>(valid >> LANES));
    auto* const look_up_columns = [&] {
#ifdef FQVIT_AVX512_BW
        if (e.lines != nullptr) return look_up_lines;
#endif
        return e.requantization.last < 256 ? look_up_large<1> : look_up_large<4>;
    }();
    for (std::uint32_t rest = valid; rest != 0;) {
        const std::int32_t start = starts[__builtin_ctz(rest)];
        const Vector wanted = set_i32(start);
        const std::uint32_t mask =
            rest & (equal_i32(low, wanted) | static_cast<std::uint32_t>(equal_i32(high, wanted)) << LANES);
        look_up_columns(e, tile, c, start, mask, y);
        rest &= ~mask;
    }
}

// ACC, I32 and u16 codes: 16 columns of all rows.
FQVIT_AVX512 void store_wide(const Epilogue& e, const Tile& tile, std::int64_t c, void* y) {
    const std::int64_t channel = tile.channel + c;
    const std::uint16_t mask = first_16(tile.valid_columns - c);
    Columns columns{};
    if (e.kind != Epilogue::ACC) columns = load_columns(e.requantization, channel, tile.valid_columns - c);
    const Vector bias = load_i32(e.bias + channel, mask), last = set_i32(e.requantization.last);
    std::int64_t at = tile.row * tile.stride + channel;
    const std::int32_t* acc = tile.acc + c;
    for (int r = 0; r < tile.rows; ++r, at += tile.stride, acc += tile.columns) {
        const Vector sum = load_i32(acc, mask);
        if (e.kind == Epilogue::ACC) {
            store_i32(static_cast<std::int32_t*>(y) + at, mask, add_i32(sum, bias));
        } else if (e.kind == Epilogue::I32) {
            store_i32(static_cast<std::int32_t*>(y) + at, mask, columns(sum));
        } else {
            store_u32_as_u16(static_cast<std::uint16_t*>(y) + at, mask, min_i32(max_i32(columns(sum), zero()), last));
        }
    }
}

// Folds bias and residual into the constants: (acc + bias) * m * 2^j + (x - x_zero) * 2^alpha * x_mult * 2^j, where
// shift + j is the raised shift of `columns`. Returns whether alpha + j <= 6, as Factors require. Nothing overflows:
// low_half means that the sum before its shift is below 2^(30 + shift), thus below 2^62 with a shift of 32, and zero *
// 2^32 is below 2^48.
FQVIT_INLINE bool fold_residual(const Epilogue& e, std::int64_t channel, std::int64_t count, Columns& columns,
                                Factors& factors) {
    const std::uint16_t mask = first_16(count > 0 ? count : 0);
    const Vector bias = load_i32(e.bias + channel, mask), x_mult = load_i32(e.residual.mult + channel, mask);
    const Vector x_zero = load_i32(e.residual.zero + channel, mask), low = set_i64(0xffffffff);
    const Vector shift = load_u8_as_i32(e.requantization.shift + channel, mask);
    const Vector raised = sub_i32(add_i32(columns.shift, set_i32(32)), shift);
    const Vector scale = add_i32(load_i32(e.residual.alpha + channel, mask), raised);
    if ((greater_i32(scale, set_i32(6)) & mask) != 0) return false;
    const Vector even = shl_each_i64(and_bits(x_mult, low), and_bits(scale, low));
    const Vector odd = shl_each_i64(shr_i64(x_mult, 32), shr_i64(scale, 32));
    factors.set(x_mult, scale, even, odd);
    columns.half_even =
        sub_i64(add_i64(columns.half_even, mul_even(bias, columns.mult)), mul_i64(and_bits(x_zero, low), even));
    columns.half_odd = sub_i64(add_i64(columns.half_odd, mul_even(shr_i64(bias, 32), columns.mult_odd)),
                               mul_i64(shr_i64(x_zero, 32), odd));
    return true;
}

// Returns the sums of 16 columns, not yet saturated: the first (half = 0) or the last ones of x.
template <int half>
FQVIT_INLINE Vector add_residual(const Columns& columns, const Factors& factors, Vector acc, const ResidualCodes& x) {
    Vector even = columns.half_even, odd = columns.half_odd;
    x.add_products<half>(factors, even, odd);
    const Vector sum_even = add_i64(mul_even(acc, columns.mult), even);
    const Vector sum_odd = add_i64(mul_even(shr_i64(acc, 32), columns.mult_odd), odd);
    return sar_each_i32(high_halves(sum_even, sum_odd), columns.shift);
}

// ADD of u8 or u16 codes, on up to 32 columns of all rows. Returns false and stores nothing if a multiplier is too
// large.
FQVIT_AVX512 bool store_sums(const Epilogue& e, const Tile& tile, std::int64_t c, void* y) {
    alignas(64) static constexpr std::int64_t IN_ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    const Requantization& q = e.requantization;
    const std::int64_t channel = tile.channel + c, count = tile.valid_columns - c;
    Columns low = load_columns(q, channel, count), high = load_columns(q, channel + LANES, count - LANES);
    Factors x_low, x_high;
    if (!fold_residual(e, channel, count, low, x_low)) return false;
    if (!fold_residual(e, channel + LANES, count - LANES, high, x_high)) return false;
    const std::uint32_t mask = first_32(count);
    const auto valid = static_cast<std::uint16_t>(mask), valid_high = static_cast<std::uint16_t>(mask >> LANES);
    const Vector last = set_i16(q.last), in_order = load(IN_ORDER);
    const bool wide_x = e.residual.type == Residual::U16;
    const std::int32_t* acc = tile.acc + c;
    std::int64_t at = tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; ++r, acc += tile.columns, at += tile.stride) {
        const ResidualCodes x(e.residual.x, wide_x, at, mask);
        const Vector sums = add_residual<0>(low, x_low, load_i32(acc, valid), x);
        const Vector sums_high = add_residual<1>(high, x_high, load_i32(acc + LANES, valid_high), x);
        const Vector codes = min_u16(permute_i64(in_order, pack_i32_as_u16(sums, sums_high)), last);
        if (e.wide) {
            store_i16(static_cast<std::uint16_t*>(y) + at, mask, codes);
        } else {
            store_i16_as_u8(static_cast<std::uint8_t*>(y) + at, mask, codes);
        }
    }
    return true;
}

}  // namespace

FQVIT_AVX512 void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const bool is_high = e.requantization.form == Requantization::HIGH_HALF;
    const bool is_u8 = !e.wide && e.requantization.last < (e.kind == Epilogue::LOOKUP ? 1024 : 256);
    const bool sums = e.kind == Epilogue::ADD && e.low_half && e.residual.type != Residual::I16;
    auto* bytes = static_cast<std::uint8_t*>(y);
    if (e.kind == Epilogue::ACC || (is_high && (e.kind == Epilogue::I32 || (e.kind == Epilogue::CODES && e.wide)))) {
        for (std::int64_t c = 0; c < tile.valid_columns; c += LANES) store_wide(e, tile, c, y);
        return;
    }
    if (is_high && (sums || (is_u8 && e.kind != Epilogue::ADD))) {
        std::int64_t c = 0;
        for (; c < tile.valid_columns; c += COLUMNS) {
            if (e.kind == Epilogue::CODES) {
                store_codes(e, tile, c, bytes);
            } else if (e.kind == Epilogue::LOOKUP) {
                store_looked_up(e, tile, c, bytes);
            } else if (!store_sums(e, tile, c, y)) {
                break;
            }
        }
        if (c >= tile.valid_columns) return;
        // The columns before c are already stored. The other kernel stores them once more, with the same codes.
    }
    fallback()->epilogue(e, tile, y);
}

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE

#endif
