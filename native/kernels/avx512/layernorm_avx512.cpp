// LayerNorm of a multiple of 32 channels with AVX-512 and the bounds of quick_norm.h. The fallback kernels handle all
// other parameters, and the rows in which the two bounds give different codes.
//
// Computes n * 2^left modulo 2^32, with left = max(j - 6, 0). This is n' of quick_norm.h before its right shift, and is
// exact because it fits in i32. If all channels have the same zero point, it equals
// (C * 2^left) * x - 2^left * (M1 + C * offset), where x is a code.
//
// Needs neither VBMI nor IFMA, so that one compilation serves both targets of avx512.h.
#if defined(__x86_64__) && defined(__GNUC__)

#define FQVIT_AVX512_BW
#include "kernels/avx512/kernels_avx512.h"
#include "kernels/norm_row.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {
namespace {

constexpr std::int64_t LANES = 16;

FQVIT_INLINE Vector load_codes(const Norm& norm, const void* x, std::int64_t at) {
    return norm.wide_in ? load_u16_as_i32(static_cast<const std::uint16_t*>(x) + at, ALL_16)
                        : load_u8_as_i32(static_cast<const std::uint8_t*>(x) + at, ALL_16);
}

// (x - zero) * 2^alpha of 16 channels, as i32.
FQVIT_INLINE Vector shifted_codes(const Norm& norm, const void* x, std::int64_t at, std::int64_t c) {
    return shl_each_i32(sub_i32(load_codes(norm, x, at), load(norm.zero + c)), load(norm.alpha + c));
}

FQVIT_AVX512 NormMoments moments(const Norm& norm, const void* x, std::int64_t first) {
    Vector m1 = zero(), m2 = zero();
    for (std::int64_t c = 0; c < norm.channels; c += LANES) {
        const Vector v = shifted_codes(norm, x, first + c, c), odd = shr_i64(v, 32);
        m1 = add_i32(m1, v);  // fits in i32: C * |v| < 2^31
        m2 = add_i64(m2, add_i64(mul_even(v, v), mul_even(odd, odd)));
    }
    return {norm.center ? sum_i32(m1) : 0, sum_i64(m2)};
}

// Codes minus the offset fit in i16.
FQVIT_AVX512 NormMoments per_tensor_moments(const Norm& norm, const void* x, std::int64_t first) {
    const Vector ones = set_i16(1), low = set_i64(0xffffffff);
    Vector m1 = zero(), even = zero(), odd = zero();
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        const Vector codes = norm.wide_in ? load(static_cast<const std::uint16_t*>(x) + first + c)
                                          : load_u8_as_i16(static_cast<const std::uint8_t*>(x) + first + c, ALL_32);
        const Vector v = sub_i16(codes, set_i16(norm.offset));
        const Vector squares = madd_i16(v, v);  // sums of two squares: at most 2^31, read as unsigned
        m1 = dpwssd(m1, v, ones);
        even = add_i64(even, and_bits(squares, low));
        odd = add_i64(odd, shr_i64(squares, 32));
    }
    return {norm.center ? sum_i32(m1) : 0, sum_i64(add_i64(even, odd))};
}

// Normalizes one row.
class QuickRow {
public:
    FQVIT_INLINE QuickRow(const Norm& norm, const NormScale& row)
        : norm_(norm),
          right_(row.j < 6 ? static_cast<unsigned>(6 - row.j) : 0),
          left_(set_i32(row.j > 6 ? row.j - 6 : 0)),
          count_(shl_each_i32(set_i32(static_cast<std::int32_t>(norm.channels)), left_)),
          sum_(shl_each_i32(set_i32(static_cast<std::int32_t>(row.sum + offset(norm) * norm.channels)), left_)),
          rho_(set_i32(static_cast<std::int32_t>(row.rho))),
          shift_(set_i32(norm.quick_shift)),
          low_bits_(set_i32(static_cast<std::int32_t>((std::uint32_t{1} << norm.quick_shift) - 1))) {}

    // Stores the codes of 32 channels for the lower bound. c: first channel; at: its position in x and y
    template <bool per_tensor>
    FQVIT_INLINE void store_codes(const void* x, void* y, std::int64_t at, std::int64_t c) {
        alignas(64) static constexpr std::int64_t IN_ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        const Vector low = shifted_sums<per_tensor>(x, at, c);
        const Vector high = shifted_sums<per_tensor>(x, at + LANES, c + LANES);
        const Vector last = set_i16(static_cast<std::int32_t>(norm_.last));
        const Vector codes = min_u16(permute_i64(load(IN_ORDER), pack_i32_as_u16(low, high)), last);
        if (norm_.wide_out) {
            store(static_cast<std::uint16_t*>(y) + at, codes);
        } else {
            store_i16_as_u8(static_cast<std::uint8_t*>(y) + at, ALL_32, codes);
        }
    }

    // Whether the upper bound gives the same codes.
    FQVIT_INLINE bool is_exact() const { return equal_i32(largest_rest_, low_bits_) == 0; }

private:
    // Returns the number that is subtracted from codes. 32768 does not fit in i16, and is stored as -32768.
    static std::int64_t offset(const Norm& norm) {
        return norm.per_tensor ? static_cast<std::uint16_t>(norm.offset) : 0;
    }

    template <bool per_tensor>
    FQVIT_INLINE Vector shifted_sums(const void* x, std::int64_t at, std::int64_t c) {
        const Vector v = per_tensor ? load_codes(norm_, x, at) : shifted_codes(norm_, x, at, c);
        Vector n = sub_i32(mul_i32(v, count_), sum_);
        if (right_ != 0) n = sar_i32(n, right_);
        const Vector t_even = shr_i64(mul_even(n, rho_), 32), t_odd = shr_i64(mul_even(shr_i64(n, 32), rho_), 32);
        const Vector even = add_i64(mul_even(t_even, load(norm_.quick_g + c)), load(norm_.quick_b + c));
        const Vector odd = add_i64(mul_even(t_odd, load(norm_.quick_g + c + 1)), load(norm_.quick_b + c + 8));
        const Vector halves = high_halves(even, odd);
        // The upper bound gives a different code if and only if all bits that the shift drops are 1.
        largest_rest_ = max_u32(largest_rest_, and_bits(halves, low_bits_));
        return sar_each_i32(halves, shift_);
    }

    const Norm& norm_;
    unsigned right_;
    Vector left_, count_, sum_, rho_, shift_, low_bits_, largest_rest_ = zero();
};

// Returns whether the results are exact.
template <bool per_tensor>
FQVIT_AVX512 bool normalize(const Norm& norm, const NormScale& scale, const void* x, void* y, std::int64_t first) {
    QuickRow row(norm, scale);
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        row.template store_codes<per_tensor>(x, y, first + c, c);
    }
    return row.is_exact();
}

}  // namespace

FQVIT_AVX512 void layernorm(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    if (norm.quick_g == nullptr || norm.channels % (2 * LANES) != 0) {
        fallback()->layernorm(norm, x, y, rows);
        return;
    }
    // Square roots and divisions of several rows overlap, which hides their latency.
    constexpr std::int64_t GROUP = 8;
    for (std::int64_t r = 0; r < rows; r += GROUP) {
        NormScale scales[GROUP];
        const std::int64_t count = rows - r < GROUP ? rows - r : GROUP;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t first = (r + i) * norm.channels;
            scales[i] =
                norm_scale(norm, norm.per_tensor ? per_tensor_moments(norm, x, first) : moments(norm, x, first));
        }
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t first = (r + i) * norm.channels;
            if ((norm.per_tensor ? normalize<true> : normalize<false>)(norm, scales[i], x, y, first)) continue;
            fallback()->layernorm(norm, static_cast<const std::uint8_t*>(x) + (norm.wide_in ? 2 : 1) * first,
                                  static_cast<std::uint8_t*>(y) + (norm.wide_out ? 2 : 1) * first, 1);
        }
    }
}

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE

#endif
