// Operations that differ between the two targets of avx512.h, for CPUs with VBMI and IFMA. avx512_bw.h has the others.
#pragma once

#include "kernels/avx512/avx512.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {

// A table of bytes for indices below `length`.
struct ByteTable {
    Vector a, b, c, d;
    std::int64_t length;

    FQVIT_INLINE ByteTable(const std::uint8_t* bytes, std::int64_t length_)
        : a(load(bytes)), b(load(bytes + 64)), c(load(bytes + 128)), d(load(bytes + 192)), length(length_) {}

    FQVIT_INLINE Vector operator[](Vector index) const {
        if (length <= 64) return permute_i8(index, a);
        const Vector first = permute2_i8(a, index, b);
        if (length <= 128) return first;
        return select_i8(top_bits_i8(index), first, permute2_i8(c, index, d));
    }
};

// Element i is table[index[i] % 64].
FQVIT_INLINE Vector look_up_64(Vector index, const std::uint8_t* table) { return permute_i8(index, load(table)); }

// A table of 256 or 1024 u8 entries, read from memory, because the whole table does not fit in the registers.
template <int parts>
struct LargeTable {
    const std::uint8_t* entries;

    // The entries at 64 indices of 16 bits, in two vectors; packed like pack_i16_as_u8.
    FQVIT_INLINE Vector operator()(Vector first, Vector second) const {
        const Vector low_byte = set_i16(0xff);
        const Vector low = pack_i16_as_u8(and_bits(first, low_byte), and_bits(second, low_byte));
        const Vector high = pack_i16_as_u8(shr_i16(first, 8), shr_i16(second, 8));
        const std::uint64_t upper_half = top_bits_i8(low);
        Vector found[parts];
        for (int i = 0; i < parts; ++i) {
            const std::uint8_t* part = entries + 256 * i;
            found[i] = select_i8(upper_half, permute2_i8(load(part), low, load(part + 64)),
                                 permute2_i8(load(part + 128), low, load(part + 192)));
        }
        if constexpr (parts == 1) return found[0];
        const std::uint64_t odd = test_i8(high, set_i8(1)), second_half = test_i8(high, set_i8(2));
        return select_i8(second_half, select_i8(odd, found[0], found[1]), select_i8(odd, found[2], found[3]));
    }
};

// Transposes 4 rows of 16 bytes, one row per lane.
FQVIT_INLINE Vector transpose_quads(Vector rows) {
    alignas(64) static constexpr std::uint8_t TRANSPOSE[64] = {
        0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
        37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
        11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
    return permute_i8(load(TRANSPOSE), rows);
}

// The multipliers mult * 2^scale of the second operand of a sum, for 16 columns: mult < 2^30 and scale <= 6, thus
// products with u16 fit in 52 bits. even, odd: the same as 8 x u64.
struct Factors {
    Vector even, odd;

    FQVIT_INLINE void set(Vector, Vector, Vector even_, Vector odd_) { even = even_, odd = odd_; }
};

// The codes of the second operand of a sum: 32 columns, starting at element `at`.
struct ResidualCodes {
    Vector words;

    FQVIT_INLINE ResidualCodes(const void* x, bool wide, std::int64_t at, std::uint32_t mask)
        : words(wide ? load_i16(static_cast<const std::uint16_t*>(x) + at, mask)
                     : load_u8_as_i16(static_cast<const std::uint8_t*>(x) + at, mask)) {}

    // Adds the products of the first (half = 0) or the last 16 columns.
    template <int half>
    FQVIT_INLINE void add_products(const Factors& factors, Vector& even, Vector& odd) const {
        alignas(64) static constexpr std::int64_t EVEN[8] = {0, 2, 4, 6, 8, 10, 12, 14};
        constexpr std::uint32_t LOWEST_WORDS = 0x11111111;
        const Vector at = add_i64(load(EVEN), set_i64(16 * half));
        even = madd52(even, permute_i16(LOWEST_WORDS, at, words), factors.even);
        odd = madd52(odd, permute_i16(LOWEST_WORDS, add_i64(at, set_i64(1)), words), factors.odd);
    }
};

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
