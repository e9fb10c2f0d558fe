// acc[m, o] = sum_k x[m, k] * w[o, k] with AVX2's vpmaddubsw. Exact, although this instruction saturates.
//
// vpmaddubsw multiplies 32 pairs of bytes and adds adjacent products in i16, saturating. Activations are at most 255,
// so the sum in a lane is exact if its positive weights add up to at most 128 and its negative ones to at least -128,
// because 255 * 128 < 2^15. If the four weights that two instructions put into a lane meet this limit together, vpaddw
// can add the two results in i16 before one vpmaddwd widens them to i32. Trained weights rarely meet the limit in their
// original order, so packing rearranges them for each panel of 8 outputs:
//  - Inputs are packed in quads k..k+3. The block of activations stores each quad as 8 bytes, x0 x2 x1 x3 x0 x1 x2 x3.
//    The four bytes that start at offset 0, 1 or 4 are the three ways to pair the inputs of the quad; those that start
//    at offset 3 are the pairing of offset 1 with its two lanes swapped.
//  - A quad that meets the limit in no pairing is split into two quads: weights clipped to the limit, and the rest.
//  - Two quads that meet the limit together form a double (per row 5 arithmetic instructions for 64 products);
//    a quad without a partner is a single (3 instructions for 32 products).
//    A list of offsets tells the micro-kernel which four bytes to broadcast.
// Packing checks every single and double against the limit, so nothing saturates for any activations.
//
// Tile: 11 rows x 8 columns. 11 accumulators, 2 vectors of weights, 1 of ones, 2 temporaries: all 16 registers.
// K-block: 192 quads (768 inputs), 16.5 KiB of packed activations.
#include "kernels/gemm.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/aligned.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/quads_avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = TILE_ROWS, COLUMNS = TILE_COLUMNS;
constexpr int K_BLOCK = 192;        // quads; their cells fit in the L1 cache and their offsets in u16
constexpr int MAX_CANDIDATES = 40;  // partners tried per quad
constexpr int PREFETCH = 1024;      // prefetch distance, in bytes of weights
static_assert(ROWS * COLUMNS <= MAX_TILE && K_BLOCK * QUAD <= 65536);

constexpr int PAIRINGS = 4;
constexpr int OFFSETS[PAIRINGS] = {0, 1, 3, IN_ORDER};
// The inputs at each offset of a cell. Lane 0 adds the products of the first two, lane 1 those of the last two.
constexpr int ORDER[PAIRINGS][4] = {{0, 2, 1, 3}, {2, 1, 3, 0}, {3, 0, 1, 2}, {0, 1, 2, 3}};

// acc += two quads of row r. In assembly, because the order of instructions decides the speed and compilers spill
// registers here.
template <int r>
FQVIT_INLINE void add_double(__m256i& acc, const std::uint8_t* a, const std::uint8_t* b, __m256i wa, __m256i wb,
                             __m256i ones) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddubsw %[wa], %[t], %[t]\n\t"
        "vpbroadcastd %c[o](%[b]), %[u]\n\t"
        "vpmaddubsw %[wb], %[u], %[u]\n\t"
        "vpaddw %[u], %[t], %[t]\n\t"
        "vpmaddwd %[ones], %[t], %[t]\n\t"
        "vpaddd %[t], %[acc], %[acc]"
        : [acc] "+x"(acc), [t] "=&x"(t), [u] "=&x"(u)
        : [a] "r"(a), [b] "r"(b), [o] "i"(CELL * r), [wa] "x"(wa), [wb] "x"(wb), [ones] "x"(ones),
          "m"(asm_input<CELL * r + 4>(a)), "m"(asm_input<CELL * r + 4>(b)));
}

// acc += one quad of row r.
template <int r>
FQVIT_INLINE void add_single(__m256i& acc, const std::uint8_t* a, __m256i wa, __m256i ones) {
    __m256i t;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddubsw %[wa], %[t], %[t]\n\t"
        "vpmaddwd %[ones], %[t], %[t]\n\t"
        "vpaddd %[t], %[acc], %[acc]"
        : [acc] "+x"(acc), [t] "=&x"(t)
        : [a] "r"(a), [o] "i"(CELL * r), [wa] "x"(wa), [ones] "x"(ones), "m"(asm_input<CELL * r + 4>(a)));
}

// The micro-kernel. accumulate: start from the values in `out` instead of 0. rows: the number of rows to store, either
// all rows or all but the last.
template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const KBlock& k_block, const std::uint8_t* block,
                                const std::uint16_t* o, const std::int8_t* w, bool accumulate, int rows,
                                std::int32_t* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    if (accumulate) ((acc[r] = load(out + COLUMNS * r)), ...);
    for (std::uint32_t i = k_block.doubles; i > 0; --i, o += 2, w += 64) {
        const std::uint8_t *a = block + o[0], *b = block + o[1];
        const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
        const __m256i wb = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32));
        _mm_prefetch(reinterpret_cast<const char*>(w) + PREFETCH, _MM_HINT_T0);
        (add_double<r>(acc[r], a, b, wa, wb, ones), ...);
    }
    for (std::uint32_t i = k_block.singles; i > 0; --i, ++o, w += 32) {
        const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
        (add_single<r>(acc[r], block + o[0], wa, ones), ...);
    }
    constexpr int LAST = sizeof...(r) - 1;
    ((r < LAST || rows > LAST ? _mm256_store_si256(reinterpret_cast<__m256i*>(out + COLUMNS * r), acc[r]) : (void)0),
     ...);
}

template <int most_rows>
FQVIT_AVX2 void multiply_tile(const KBlock& k_block, const std::uint8_t* block, const std::uint16_t* offsets,
                              const std::int8_t* weights, bool accumulate, int rows, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, most_rows>(), k_block, block, offsets, weights, accumulate, rows,
                  out);
}

// ---- packing ----

// The weights of one quad for 8 outputs and, for each pairing, the sums of the weights in every lane.
struct Quad {
    __m256i w;               // [8 outputs][4 inputs]
    __m256i sums[PAIRINGS];  // lane_sums
    std::uint32_t size;      // sum of |w|; large quads look for a partner first
    std::uint16_t number;    // index in its K-block
    std::uint8_t fits;       // bit p: pairing p meets the limit
    bool used;
};

// Returns the four inputs of every output in the order of a pairing.
FQVIT_INLINE __m256i reordered(__m256i w, int pairing) {
    const int* o = ORDER[pairing];
    const __m256i inputs = _mm256_set1_epi32(o[0] | o[1] << 8 | o[2] << 16 | o[3] << 24);
    const __m256i outputs =
        _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    return _mm256_shuffle_epi8(w, _mm256_add_epi8(inputs, outputs));
}

// Fills in sums, fits and size.
FQVIT_INLINE void measure(Quad& quad) {
    quad.fits = 0;
    for (int pairing = 0; pairing < PAIRINGS; ++pairing) {
        quad.sums[pairing] = lane_sums(reordered(quad.w, pairing));
        if (within_limit(quad.sums[pairing])) quad.fits |= static_cast<std::uint8_t>(1 << pairing);
    }
    const __m256i sizes = _mm256_sad_epu8(_mm256_abs_epi8(quad.w), _mm256_setzero_si256());
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    quad.size = static_cast<std::uint32_t>(_mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2));
}

// Finds pairings in which both quads can be added in i16.
FQVIT_INLINE bool match(const Quad& a, const Quad& b, int& pairing_a, int& pairing_b) {
    for (int p = 0; p < PAIRINGS; ++p) {
        if (!(a.fits >> p & 1)) continue;
        for (int q = 0; q < PAIRINGS; ++q) {
            if (!(b.fits >> q & 1) || !within_limit(_mm256_adds_epu8(a.sums[p], b.sums[q]))) continue;
            pairing_a = p, pairing_b = q;
            return true;
        }
    }
    return false;
}

// Splits a quad that meets the limit in no pairing: clips it to the limit of the last pairing and returns the rest as
// another quad.
FQVIT_AVX2 Quad split(Quad& quad) {
    Quad remainder = quad;
    remainder.w = clip_to_limit(quad.w);
    measure(quad);
    measure(remainder);
    return remainder;
}

class PackedAvx2 final : public PackedWeights {
public:
    PackedAvx2(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs) : inputs_(inputs) {
        const std::int64_t quads = (inputs + 3) / 4;
        k_blocks_ = static_cast<std::size_t>((quads + K_BLOCK - 1) / K_BLOCK);
        // An eighth more than the weights, for quads that are split.
        weights_.reserve(static_cast<std::size_t>((outputs + COLUMNS - 1) / COLUMNS * COLUMNS * quads * 4 * 9 / 8));
        panels_ = static_cast<std::size_t>((outputs + COLUMNS - 1) / COLUMNS);
        // Pack the K-blocks in the order in which a product reads them.
        for (std::int64_t quad = 0; quad < quads; quad += K_BLOCK) {
            for (std::int64_t first = 0; first < outputs; first += COLUMNS) {
                pack_k_block(w, outputs, first, quad, static_cast<int>(std::min<std::int64_t>(K_BLOCK, quads - quad)));
            }
        }
        list_.shrink_to_fit();
        offsets_.shrink_to_fit();
        weights_.shrink_to_fit();
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        for (int k_block = 0; k_block < k_blocks(); ++k_block) multiply_k_block(k_block, panel, block, rows, acc);
    }

    int k_blocks() const override { return static_cast<int>(k_blocks_); }

    void multiply_k_block(int k_block, std::int64_t panel, const std::uint8_t* block, int rows,
                          std::int32_t* acc) const override {
        const KBlock& one = list_[static_cast<std::size_t>(k_block) * panels_ + static_cast<std::size_t>(panel)];
        MULTIPLY_QUADS[rows](one, block + std::int64_t{k_block} * K_BLOCK * QUAD, offsets_.data() + one.offsets,
                             weights_.data() + one.weights, k_block > 0, rows, acc);
    }

    std::size_t bytes() const override {
        return weights_.size() + offsets_.size() * sizeof(std::uint16_t) + list_.size() * sizeof(KBlock);
    }

private:
    FQVIT_AVX2 void pack_k_block(const std::int8_t* w, std::int64_t outputs, std::int64_t first,
                                 std::int64_t first_quad, int count) {
        quads_.clear();
        const std::int64_t columns = std::min<std::int64_t>(COLUMNS, outputs - first);
        for (int number = 0; number < count; ++number) {
            Quad quad;
            quad.number = static_cast<std::uint16_t>(number), quad.used = false;
            const std::int64_t k = (first_quad + number) * 4, length = std::min<std::int64_t>(4, inputs_ - k);
            alignas(32) std::int8_t bytes[COLUMNS][4] = {};
            for (std::int64_t c = 0; c < columns; ++c) {
                const std::int8_t* from = w + (first + c) * inputs_ + k;
                std::memcpy(bytes[c], from, length == 4 ? 4 : static_cast<std::size_t>(length));
            }
            quad.w = load(bytes);
            measure(quad);
            if (quad.fits == 0) quads_.push_back(split(quad));
            quads_.push_back(quad);
        }
        // Sort by descending size, then by index; one integer holds both sort keys.
        order_.clear();
        for (std::size_t i = 0; i < quads_.size(); ++i) {
            order_.push_back(~quads_[i].size << 16 | static_cast<std::uint32_t>(i));
        }
        std::sort(order_.begin(), order_.end());
        KBlock k_block{0, 0, offsets_.size(), weights_.size()};
        singles_.clear();
        for (std::size_t i = 0; i < order_.size(); ++i) {
            Quad& quad = at(i);
            if (quad.used) continue;
            if (emit_double(i)) {
                ++k_block.doubles;
            } else {
                singles_.push_back(&quad);
            }
        }
        for (const Quad* quad : singles_) {
            int pairing = 0;
            while (!(quad->fits >> pairing & 1)) ++pairing;
            emit(*quad, pairing);
            ++k_block.singles;
        }
        list_.push_back(k_block);
    }

    Quad& at(std::size_t i) { return quads_[order_[i] & 0xffff]; }

    // Looks for a partner of the i-th quad, smallest first: small quads match most others, so few candidates are tried.
    FQVIT_AVX2 bool emit_double(std::size_t i) {
        int candidates = 0, pairing = 0, other_pairing = 0;
        const Quad& quad = at(i);
        while (order_.size() > i + 1 && at(order_.size() - 1).used) order_.pop_back();
        for (std::size_t j = order_.size() - 1; j > i && candidates < MAX_CANDIDATES; --j) {
            Quad& other = at(j);
            if (other.used) continue;
            ++candidates;
            if (!match(quad, other, pairing, other_pairing)) continue;
            other.used = true;
            emit(quad, pairing);
            emit(other, other_pairing);
            return true;
        }
        return false;
    }

    FQVIT_AVX2 void emit(const Quad& quad, int pairing) {
        offsets_.push_back(static_cast<std::uint16_t>(quad.number * QUAD + OFFSETS[pairing]));
        weights_.resize(weights_.size() + sizeof(__m256i));
        store(weights_.data() + weights_.size() - sizeof(__m256i), reordered(quad.w, pairing));
    }

    std::int64_t inputs_;
    std::size_t k_blocks_, panels_;
    std::vector<KBlock> list_;  // [k_blocks_][panels_]
    std::vector<std::uint16_t> offsets_;
    AlignedVector<std::int8_t> weights_;
    // Used while packing.
    AlignedVector<Quad> quads_;
    std::vector<std::uint32_t> order_;
    std::vector<const Quad*> singles_;
};

class GemmAvx2 final : public Gemm {
public:
    constexpr GemmAvx2() : Gemm("avx2", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedAvx2>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return static_cast<std::size_t>((inputs + 3) / 4 * QUAD);
    }

    FQVIT_AVX2 void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                              std::uint8_t* block) const override {
        const __m128i cells = _mm_setr_epi8(0, 2, 1, 3, 0, 1, 2, 3, 4, 6, 5, 7, 4, 5, 6, 7);
        // By K-block, so that the cells of all rows stay in the L1 cache.
        for (std::int64_t first = 0; first < inputs; first += K_BLOCK * 4) {
            const std::int64_t end = std::min<std::int64_t>(inputs, first + K_BLOCK * 4);
            for (int r = 0; r < count; ++r) {
                const std::uint8_t* row = x + r * stride;
                std::uint8_t* out = block + first / 4 * QUAD + r * CELL;
                std::int64_t k = first;
                for (; k + 8 <= end; k += 8, out += 2 * QUAD) {
                    const __m128i both =
                        _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k)), cells);
                    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), both);
                    store_upper(out + QUAD, both);
                }
                for (; k < end; k += 4, out += QUAD) {
                    std::uint8_t quad[8] = {};
                    std::memcpy(quad, row + k, static_cast<std::size_t>(std::min<std::int64_t>(4, end - k)));
                    const __m128i cell =
                        _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(quad)), cells);
                    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), cell);
                }
            }
        }
    }
};

}  // namespace

// To keep the library small, not every number of rows has a kernel: 3 rows are computed as 4 rows of which the last one
// is not stored, and so on.
const MicroKernel avx2::MULTIPLY_QUADS[TILE_ROWS + 1] = {
    nullptr,          multiply_tile<1>, multiply_tile<2>, multiply_tile<4>,  multiply_tile<4>,  multiply_tile<6>,
    multiply_tile<6>, multiply_tile<8>, multiply_tile<8>, multiply_tile<10>, multiply_tile<10>, multiply_tile<11>};

const Gemm* gemm_avx2() {
    static constexpr GemmAvx2 gemm;
    return &gemm;
}

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_avx2() { return nullptr; }
}  // namespace fqvit

#endif
