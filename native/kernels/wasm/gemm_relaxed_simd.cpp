// acc[m, o] = sum_k x[m, k] * w[o, k] with relaxed SIMD, for layers whose weights span at most 7 bits.
//
// The dot products of relaxed SIMD multiply i8 by i7. Implementations may read the second operand as signed or
// unsigned, and may saturate sums of two products to i16. All implementations agree if the second operand is within
// 0..127, because 2 * 128 * 127 < 2^15. So the first operand is a = x - 128 and the second is b = w - low, where low is
// the smallest weight of the layer, and
//     sum_k x * w = sum_k a * b + 128 * sum_k b + low * sum_k x.
// The second term is a constant per output, the third is computed once per row. Sums wrap around in i32, which is exact
// because Linear proves that the result fits.
//
// Two forms, which give the same bits:
//  - i32x4.relaxed_dot_i8x16_i7x16_add_s: one instruction on ARM and on x86 with AVX-VNNI.
//  - i16x8.relaxed_dot_i8x16_i7x16_s, several of which are added in i16 before they are widened: faster on x86 without
//    AVX-VNNI if the weights span at most 6 bits (two sums fit) or 5 bits (four sums fit).
#include "kernels/gemm.h"

#if defined(__wasm_relaxed_simd__)

#include <algorithm>
#include <utility>

#include "core/aligned.h"
#include "core/memory_size.h"
#include "kernels/wasm/simd128.h"

namespace fqvit {
namespace {

using namespace simd128;

constexpr int TILE_ROWS = 4, TILE_COLUMNS = 8, QUAD = 4;
constexpr int ROWS = 4 * TILE_ROWS, COLUMNS = 2 * TILE_COLUMNS;
constexpr int K_STEP = 16;              // inputs are padded to a multiple of this, so that all groups have 4 quads
constexpr int SUM_BYTES = ROWS * 4;     // the sums of the rows, at the start of a block
constexpr std::int32_t MAX_SPAN = 127;  // largest weight - smallest weight
static_assert(ROWS * COLUMNS <= MAX_TILE);

FQVIT_SIMD_INLINE v128_t dot_add(v128_t a, v128_t b, v128_t sum) {
    return wasm_i32x4_relaxed_dot_i8x16_i7x16_add(a, b, sum);
}

// How the WebAssembly engine implements dot_add. probe() infers this from results, also for operands outside the
// specified range.
enum Form { INEXACT, SINGLE_INSTRUCTION, SATURATING };

// Compares both instructions with plain arithmetic for the extreme operands.
Form probe() {
    alignas(16) volatile std::int8_t a[16], b[16];
    const auto load = [](const volatile std::int8_t* p) {
        std::int8_t copy[16];
        for (int i = 0; i < 16; ++i) copy[i] = p[i];
        return wasm_v128_load(copy);
    };
    constexpr int FIRST[] = {-128, -127, -1, 0, 1, 127}, SECOND[] = {0, 1, 63, 64, 126, 127};
    for (int i = 0; i < 36 * 36; ++i) {
        const int a0 = FIRST[i % 6], b0 = SECOND[i / 6 % 6], a1 = FIRST[i / 36 % 6], b1 = SECOND[i / 216];
        for (int k = 0; k < 16; ++k) {
            a[k] = static_cast<std::int8_t>(k % 2 == 0 ? a0 : a1);
            b[k] = static_cast<std::int8_t>(k % 2 == 0 ? b0 : b1);
        }
        const int pair = a0 * b0 + a1 * b1;
        alignas(16) std::int16_t pairs[8];
        alignas(16) std::int32_t sums[4];
        wasm_v128_store(pairs, wasm_i16x8_relaxed_dot_i8x16_i7x16(load(a), load(b)));
        wasm_v128_store(sums, dot_add(load(a), load(b), wasm_i32x4_const(0, 1, -1, 1 << 30)));
        const bool exact = std::all_of(pairs, pairs + 8, [&](std::int16_t found) { return found == pair; }) &&
                           sums[0] == 2 * pair && sums[1] == 2 * pair + 1 && sums[2] == 2 * pair - 1 &&
                           sums[3] == 2 * pair + (1 << 30);
        if (!exact) return INEXACT;
    }
    for (int k = 0; k < 16; ++k) {
        a[k] = 127;
        b[k] = -1;  // 255 if it is read as unsigned
    }
    const std::int32_t found = wasm_i32x4_extract_lane(dot_add(load(a), load(b), wasm_i32x4_const_splat(0)), 0);
    return found == 2 * 32767 ? SATURATING : SINGLE_INSTRUCTION;
}

Form form() {
    static const Form found = probe();
    return found;
}

std::int64_t padded(std::int64_t inputs) { return round_up(inputs, K_STEP); }

// One quad of one row times 8 columns. group: quads per sum in i16, or 1 to add each quad in i32.
template <int group, int i>
FQVIT_SIMD_INLINE void add_quad(v128_t (&acc)[2], v128_t (&sum)[2], const std::uint8_t* a, v128_t b_left,
                                v128_t b_right) {
    const v128_t quad = wasm_v128_load32_splat(a);
    if constexpr (group == 1) {
        acc[0] = dot_add(quad, b_left, acc[0]);
        acc[1] = dot_add(quad, b_right, acc[1]);
    } else {
        const v128_t left = wasm_i16x8_relaxed_dot_i8x16_i7x16(quad, b_left);
        const v128_t right = wasm_i16x8_relaxed_dot_i8x16_i7x16(quad, b_right);
        sum[0] = i == 0 ? left : wasm_i16x8_add(sum[0], left);
        sum[1] = i == 0 ? right : wasm_i16x8_add(sum[1], right);
        if constexpr (i == group - 1) {
            acc[0] = wasm_i32x4_add(acc[0], wasm_i32x4_extadd_pairwise_i16x8(sum[0]));
            acc[1] = wasm_i32x4_add(acc[1], wasm_i32x4_extadd_pairwise_i16x8(sum[1]));
        }
    }
    // As in pairs_simd128.h: keeps the loads of different rows apart, which needs fewer registers.
    asm volatile("" ::: "memory");
}

template <int group, int i, int... r>
FQVIT_SIMD_INLINE void add_quads(v128_t (&acc)[sizeof...(r)][2], v128_t (&sum)[sizeof...(r)][2], const std::uint8_t* a,
                                 const std::uint8_t* b) {
    const v128_t b_left = wasm_v128_load(b), b_right = wasm_v128_load(b + 16);
    (add_quad<group, i>(acc[r], sum[r], a + QUAD * r, b_left, b_right), ...);
}

// a: i8 [quads][4 rows][4]   b: i7 [quads][8][4]   start: first value per column   row_start: per row
template <int group, int... r, int... i>
FQVIT_SIMD_INLINE void multiply_rows(std::integer_sequence<int, r...>, std::integer_sequence<int, i...>,
                                     const std::uint8_t* a, const std::uint8_t* b, std::int64_t quads,
                                     const std::int32_t* start, const std::int32_t* row_start, std::int32_t* out) {
    v128_t acc[sizeof...(r)][2], sum[sizeof...(r)][2];
    ((acc[r][0] = wasm_i32x4_add(wasm_v128_load(start), wasm_i32x4_splat(row_start[r])),
      acc[r][1] = wasm_i32x4_add(wasm_v128_load(start + 4), wasm_i32x4_splat(row_start[r]))),
     ...);
    for (auto remaining = static_cast<std::int32_t>(quads); remaining > 0; remaining -= group) {
        (add_quads<group, i, r...>(acc, sum, a + i * QUAD * TILE_ROWS, b + i * QUAD * TILE_COLUMNS), ...);
        a += group * QUAD * TILE_ROWS, b += group * QUAD * TILE_COLUMNS;
    }
    ((wasm_v128_store(out + r * COLUMNS, acc[r][0]), wasm_v128_store(out + r * COLUMNS + 4, acc[r][1])), ...);
}

template <int group, int rows>
void multiply_tile(const std::uint8_t* a, const std::uint8_t* b, std::int64_t quads, const std::int32_t* start,
                   const std::int32_t* row_start, std::int32_t* out) {
    multiply_rows<group>(std::make_integer_sequence<int, rows>(), std::make_integer_sequence<int, group>(), a, b, quads,
                         start, row_start, out);
}

using MicroKernel = void (*)(const std::uint8_t*, const std::uint8_t*, std::int64_t, const std::int32_t*,
                             const std::int32_t*, std::int32_t*);
template <int group>
constexpr MicroKernel BY_ROWS[TILE_ROWS + 1] = {nullptr, multiply_tile<group, 1>, multiply_tile<group, 2>,
                                                multiply_tile<group, 3>, multiply_tile<group, 4>};

struct Range {
    std::int32_t low, span;  // low <= 0, because outputs are padded with weights 0
};

Range range_of(const std::int8_t* w, std::int64_t count) {
    const auto [low, high] = std::minmax_element(w, w + count);
    const std::int32_t least = std::min<std::int32_t>(*low, 0);
    return {least, std::max<std::int32_t>(*high, 0) - least};
}

class PackedRelaxedSimd final : public PackedWeights {
public:
    // Panels of 8 outputs, [K / 4][8][4] each. Outputs are padded with w = 0, inputs with b = 0.
    PackedRelaxedSimd(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : range_(range_of(w, outputs * inputs)),
          inputs_(padded(inputs)),
          start_(memory_size(round_up(outputs, COLUMNS))),
          weights_(memory_size(round_up(outputs, COLUMNS) * inputs_)) {
        // A sum of n pairs of products is at most n * 2 * 128 * span, which must be below 2^15.
        const bool adds_in_i16 = form() == SATURATING && range_.span <= 63;
        group_ = !adds_in_i16 ? 1 : range_.span <= 31 ? 4 : 2;
        by_rows_ = group_ == 1 ? BY_ROWS<1> : group_ == 2 ? BY_ROWS<2> : BY_ROWS<4>;
        quads_ = round_up((inputs + QUAD - 1) / QUAD, group_);
        for (std::int64_t o = 0; o < round_up(outputs, COLUMNS); ++o) {
            std::uint8_t* to = weights_.data() + o / TILE_COLUMNS * TILE_COLUMNS * inputs_ + o % TILE_COLUMNS * QUAD;
            std::int64_t sum = 0;
            for (std::int64_t k = 0; k < inputs; ++k) {
                const std::int32_t b = (o < outputs ? w[o * inputs + k] : 0) - range_.low;
                to[k / QUAD * QUAD * TILE_COLUMNS + k % QUAD] = static_cast<std::uint8_t>(b);
                sum += b;
            }
            start_[static_cast<std::size_t>(o)] = static_cast<std::int32_t>(128 * sum);
        }
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        const auto* sums = reinterpret_cast<const std::int32_t*>(block);
        std::int32_t row_start[ROWS];
        for (int r = 0; r < rows; ++r) row_start[r] = range_.low * sums[r];
        for (int half = 0; half < COLUMNS / TILE_COLUMNS; ++half) {
            const std::int64_t output = panel * COLUMNS + half * TILE_COLUMNS;
            const std::uint8_t* b = weights_.data() + output * inputs_;
            for (int r = 0; r < rows; r += TILE_ROWS) {
                by_rows_[std::min(TILE_ROWS, rows - r)](block + SUM_BYTES + r * inputs_, b, quads_,
                                                        start_.data() + output, row_start + r,
                                                        acc + r * COLUMNS + half * TILE_COLUMNS);
            }
        }
    }

    std::size_t bytes() const override { return weights_.size() + start_.size() * sizeof(std::int32_t); }

private:
    Range range_;
    std::int64_t inputs_, quads_;
    int group_;
    const MicroKernel* by_rows_;
    AlignedVector<std::int32_t> start_;
    AlignedVector<std::uint8_t> weights_;
};

class GemmRelaxedSimd final : public Gemm {
public:
    constexpr GemmRelaxedSimd() : Gemm("relaxed_simd", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedRelaxedSimd>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return memory_size(SUM_BYTES + padded(inputs) * ROWS);
    }

    // The sums of the rows, then tiles of 4 rows, [K / 4][4][4] each. Rows past `count` are not written.
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        constexpr int NEXT = QUAD * TILE_ROWS;  // bytes from one quad of a row to the next
        auto* sums = reinterpret_cast<std::int32_t*>(block);
        for (int r = 0; r < count; ++r) {
            const std::uint8_t* row = x + r * stride;
            std::uint8_t* out = block + SUM_BYTES + r / TILE_ROWS * TILE_ROWS * padded(inputs) + r % TILE_ROWS * QUAD;
            v128_t sum = wasm_i32x4_const_splat(0);
            for (std::int64_t k = 0; k < inputs; k += 16, out += 4 * NEXT) {
                const v128_t codes = load_some(row + k, inputs - k);
                sum = wasm_i32x4_add(sum, wasm_u32x4_extadd_pairwise_u16x8(wasm_u16x8_extadd_pairwise_u8x16(codes)));
                const v128_t a = wasm_v128_xor(codes, wasm_u8x16_const_splat(0x80));  // x - 128
                wasm_v128_store32_lane(out, a, 0);
                wasm_v128_store32_lane(out + NEXT, a, 1);
                wasm_v128_store32_lane(out + 2 * NEXT, a, 2);
                wasm_v128_store32_lane(out + 3 * NEXT, a, 3);
            }
            sums[r] = wasm_i32x4_extract_lane(sum, 0) + wasm_i32x4_extract_lane(sum, 1) +
                      wasm_i32x4_extract_lane(sum, 2) + wasm_i32x4_extract_lane(sum, 3);
        }
    }
};

constexpr GemmRelaxedSimd GEMM;

}  // namespace

const Gemm* gemm_relaxed_simd() { return form() == INEXACT ? nullptr : &GEMM; }

const Gemm* gemm_for_weights(const Gemm* gemm, const std::int8_t* w, std::int64_t count) {
    return gemm == &GEMM && range_of(w, count).span > MAX_SPAN ? gemm_simd128() : gemm;
}

}  // namespace fqvit

#elif defined(__wasm__)

namespace fqvit {
const Gemm* gemm_relaxed_simd() { return nullptr; }
const Gemm* gemm_for_weights(const Gemm* gemm, const std::int8_t*, std::int64_t) { return gemm; }
}  // namespace fqvit

#endif
