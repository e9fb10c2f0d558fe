// Operations that differ between the two targets of avx512.h, for CPUs without VBMI and IFMA, such as Cascade Lake.
// avx512_vbmi.h has the others.
//
// Bytes are looked up as 16-bit words: vpermi2w finds the word that contains the byte in 128 bytes of table, and the
// lowest bit of the index selects the byte. Chains of vpshufb, which looks up 16 bytes, need three times as many
// instructions for 256 entries.
#pragma once

#include "kernels/avx512/avx512.h"
#include "kernels/table_lines.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {

// even, odd: the words that contain the bytes of the even and of the odd positions. The lowest bit of each index
// selects the byte of its word.
FQVIT_INLINE Vector select_bytes(Vector index, Vector even, Vector odd) {
    alignas(64) static constexpr std::uint8_t WORDS[64] = {
        0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14,
        0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    const Vector chosen = or_bits(and_bits(index, set_i8(1)), load(WORDS));
    return select_i8(0xaaaaaaaaaaaaaaaa, shuffle_i8(chosen, even), shuffle_i8(chosen, odd));
}

// A table of bytes for indices below `length`.
struct ByteTable {
    Vector a, b, c, d;
    std::int64_t length;

    FQVIT_INLINE ByteTable(const std::uint8_t* bytes, std::int64_t length_)
        : a(load(bytes)), b(load(bytes + 64)), c(load(bytes + 128)), d(load(bytes + 192)), length(length_) {}

    FQVIT_INLINE Vector operator[](Vector index) const {
        return select_bytes(index, words(shr_i16(and_bits(index, set_i16(0xff)), 1)), words(shr_i16(index, 9)));
    }

private:
    // index: 32 x i16 below 128
    FQVIT_INLINE Vector words(Vector index) const {
        const Vector first = permute2_i16(a, index, b);
        if (length <= 128) return first;
        return select_i16(test_i16(index, set_i16(64)), first, permute2_i16(c, index, d));
    }
};

// Element i is table[index[i]]; indices are below 64.
FQVIT_INLINE Vector look_up_64(Vector index, const std::uint8_t* table) {
    const Vector words = load(table);
    return select_bytes(index, permute_i16(shr_i16(and_bits(index, set_i16(0xff)), 1), words),
                        permute_i16(shr_i16(index, 9), words));
}

// A table of 256 or 1024 u8 entries, read from memory, because the whole table does not fit in the registers.
template <int parts>
struct LargeTable {
    const std::uint8_t* entries;

    // The entries at 64 indices of 16 bits, in two vectors; packed like pack_i16_as_u8.
    FQVIT_INLINE Vector operator()(Vector first, Vector second) const {
        return pack_i16_as_u8(bytes(first), bytes(second));
    }

private:
    FQVIT_INLINE Vector bytes(Vector index) const {
        const Vector at = shr_i16(index, 1);
        const std::uint32_t upper_half = test_i16(index, set_i16(128));
        Vector found[parts];
        for (int i = 0; i < parts; ++i) {
            const std::uint8_t* part = entries + 256 * i;
            found[i] = select_i16(upper_half, permute2_i16(load(part), at, load(part + 64)),
                                  permute2_i16(load(part + 128), at, load(part + 192)));
        }
        Vector word = found[0];
        if constexpr (parts == 4) {
            const std::uint32_t odd = test_i16(index, set_i16(256)), second_half = test_i16(index, set_i16(512));
            word = select_i16(second_half, select_i16(odd, found[0], found[1]), select_i16(odd, found[2], found[3]));
        }
        return and_bits(shr_each_i16(word, shl_i16(and_bits(index, set_i16(1)), 3)), set_i16(0xff));
    }
};

// A table of 1024 entries in the form of table_lines.h, which fits in four registers.
class LineTable {
public:
    FQVIT_INLINE explicit LineTable(const TableLines& table)
        : line_{load(table.line), load(table.line + 32)}, bits_{load(table.bits), load(table.bits + 32)} {}

    // The entries at 64 indices of 16 bits, in two vectors; packed like pack_i16_as_u8.
    FQVIT_INLINE Vector operator()(Vector first, Vector second) const {
        return pack_i16_as_u8(bytes(first), bytes(second));
    }

private:
    FQVIT_INLINE Vector bytes(Vector index) const {
        const Vector segment = shr_i16(index, 4), i = and_bits(index, set_i16(15));
        const Vector line = permute2_i16(line_[0], segment, line_[1]);
        const Vector bits = permute2_i16(bits_[0], segment, bits_[1]);
        const Vector rise = sar_i16(mul_i16(sar_i16(line, TableLines::BASE_BITS), i), 4);
        const Vector base = and_bits(line, set_i16((1 << TableLines::BASE_BITS) - 1));
        const Vector bit = and_bits(shr_each_i16(bits, i), set_i16(1));
        return add_i16(add_i16(add_i16(base, set_i16(TableLines::LEAST_BASE)), rise), bit);
    }

    Vector line_[2], bits_[2];
};

// Transposes 4 rows of 16 bytes, one row per lane.
FQVIT_INLINE Vector transpose_quads(Vector rows) {
    alignas(64) static constexpr std::int32_t LANES[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    alignas(64) static constexpr std::uint8_t TRANSPOSE[64] = {
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return shuffle_i8(load(TRANSPOSE), permute_i32(load(LANES), rows));
}

// The multipliers mult * 2^scale of the second operand of a sum, for 16 columns: mult < 2^31 and scale <= 6, thus
// u16 * 2^scale fits in i32. odd: mult of the odd columns, in the even elements.
struct Factors {
    Vector mult, odd, scale;

    FQVIT_INLINE void set(Vector mult_, Vector scale_, Vector, Vector) {
        mult = mult_, odd = shr_i64(mult_, 32), scale = scale_;
    }
};

// The codes of the second operand of a sum: 32 columns, starting at element `at`.
struct ResidualCodes {
    Vector halves[2];

    FQVIT_INLINE ResidualCodes(const void* x, bool wide, std::int64_t at, std::uint32_t mask) {
        const auto low = static_cast<std::uint16_t>(mask), high = static_cast<std::uint16_t>(mask >> 16);
        if (wide) {
            const std::uint16_t* from = static_cast<const std::uint16_t*>(x) + at;
            halves[0] = load_u16_as_i32(from, low), halves[1] = load_u16_as_i32(from + 16, high);
        } else {
            const std::uint8_t* from = static_cast<const std::uint8_t*>(x) + at;
            halves[0] = load_u8_as_i32(from, low), halves[1] = load_u8_as_i32(from + 16, high);
        }
    }

    // Adds the products of the first (half = 0) or the last 16 columns.
    template <int half>
    FQVIT_INLINE void add_products(const Factors& factors, Vector& even, Vector& odd) const {
        const Vector x = shl_each_i32(halves[half], factors.scale);
        even = add_i64(even, mul_even(x, factors.mult));
        odd = add_i64(odd, mul_even(shr_i64(x, 32), factors.odd));
    }
};

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
