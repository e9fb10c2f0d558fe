// AVX2: u8 x i8 products by vpmaddubsw, exact although that instruction saturates.
//
// vpmaddubsw multiplies 32 bytes and adds neighbours in int16. x <= 255, so a sum of products is exact in int16
// wherever the positive weights in it add up to at most 128 and so do the negative ones (255 * 128 < 2^15). Two
// instructions may be added in int16 before one vpmaddwd widens them, if that holds for all four weights of a lane.
// Weights of real checkpoints (largest / sigma about 3) rarely fit as they come. Packing makes them fit, for each panel
// of 8 outputs on its own:
//  - Inputs go in quads k..k+3. A block of activations holds each quad as the 8 bytes x0 x2 x1 x3 x0 x1 x2 x3: four
//  bytes from
//    offset 0, 1 or 4 on are the quad with its inputs paired in each of the three possible ways.
//  - A quad that fits in no way is cut in two: weights clipped, and what was clipped off.
//  - Quads are matched in twos whose sums fit ("doubles": 5 instructions for 64 products a lane group); what finds no
//  partner
//    stays alone ("singles": 3 for 32). A list of offsets into the block says which quads, in which pairing.
// Every quad that goes into a list has been checked against the rule above; nothing saturates for any activations.
#include "kernels/gemm.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/aligned.h"
#include "kernels/avx2/avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = 11, COLUMNS = 8;  // 11 accumulators, 2 of weights, the ones, 2 temporaries: 16 registers
constexpr int CELL = 8;                // bytes of a quad of one row
constexpr int QUAD = ROWS * CELL;      // bytes of a quad of all rows
constexpr int BLOCK = 192;             // quads whose offsets fit 16 bits and whose cells fit the first cache
constexpr int LIMIT = 128;             // 255 * 128 < 2^15
constexpr int TRIES = 40;              // partners that a quad asks before it stays alone

constexpr int WAYS = 4;
constexpr int OFFSETS[WAYS] = {0, 1, 3, 4};
// Inputs at those offsets of a cell: lane 0 adds the first two, lane 1 the others. The third way is the second with
// lanes exchanged.
constexpr int ORDER[WAYS][4] = {{0, 2, 1, 3}, {2, 1, 3, 0}, {3, 0, 1, 2}, {0, 1, 2, 3}};

// One pass over part of K: `doubles` pairs of offsets, then `singles` offsets; weights in the same order, 32 bytes a
// quad.
struct Stretch {
    std::uint32_t doubles, singles;
    std::size_t offsets, weights;  // where they start
};

template <int r>
FQVIT_INLINE void add_double(__m256i& acc, const std::uint8_t* a, const std::uint8_t* b, __m256i wa, __m256i wb,
                             __m256i ones) {
    __m256i t, u;
    // In assembly because the order of instructions decides the speed, and compilers spill here.
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
          "m"(read_by<CELL * r + 4>(a)), "m"(read_by<CELL * r + 4>(b)));
}

template <int r>
FQVIT_INLINE void add_single(__m256i& acc, const std::uint8_t* a, __m256i wa, __m256i ones) {
    __m256i t;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddubsw %[wa], %[t], %[t]\n\t"
        "vpmaddwd %[ones], %[t], %[t]\n\t"
        "vpaddd %[t], %[acc], %[acc]"
        : [acc] "+x"(acc), [t] "=&x"(t)
        : [a] "r"(a), [o] "i"(CELL * r), [wa] "x"(wa), [ones] "x"(ones), "m"(read_by<CELL * r + 4>(a)));
}

template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const Stretch* stretch, const Stretch* end,
                                const std::uint8_t* block, const std::uint16_t* offsets, const std::int8_t* weights,
                                bool add, std::int32_t* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    if (add) ((acc[r] = load(out + COLUMNS * r)), ...);
    for (; stretch != end; ++stretch, block += BLOCK * QUAD) {
        const std::uint16_t* o = offsets + stretch->offsets;
        const std::int8_t* w = weights + stretch->weights;
        for (std::uint32_t i = stretch->doubles; i > 0; --i, o += 2, w += 64) {
            const std::uint8_t *a = block + o[0], *b = block + o[1];
            const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
            const __m256i wb = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32));
            (add_double<r>(acc[r], a, b, wa, wb, ones), ...);
        }
        for (std::uint32_t i = stretch->singles; i > 0; --i, ++o, w += 32) {
            const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
            (add_single<r>(acc[r], block + o[0], wa, ones), ...);
        }
    }
    (_mm256_store_si256(reinterpret_cast<__m256i*>(out + COLUMNS * r), acc[r]), ...);
}

template <int rows>
FQVIT_AVX2 void multiply_block(const Stretch* stretch, const Stretch* end, const std::uint8_t* block,
                               const std::uint16_t* offsets, const std::int8_t* weights, bool add, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, rows>(), stretch, end, block, offsets, weights, add, out);
}

using Multiply = void (*)(const Stretch*, const Stretch*, const std::uint8_t*, const std::uint16_t*, const std::int8_t*,
                          bool, std::int32_t*);
constexpr Multiply BY_ROWS[ROWS + 1] = {nullptr,           multiply_block<1>, multiply_block<2>,  multiply_block<3>,
                                        multiply_block<4>, multiply_block<5>, multiply_block<6>,  multiply_block<7>,
                                        multiply_block<8>, multiply_block<9>, multiply_block<10>, multiply_block<11>};

// The weights of a quad for 8 outputs, and for each way to pair its inputs what the lanes add up to.
struct Quad {
    __m256i w;             // [8 outputs][4 inputs]
    __m256i sums[WAYS];    // bytes: the 16 lanes' sums of positive weights and of negative ones
    std::uint32_t size;    // sum of |w|: large ones look for a partner first
    std::uint16_t number;  // in its stretch
    std::uint8_t fits;     // bit p: way p
    bool used;
};

// The four inputs of every output in the order of a way.
FQVIT_INLINE __m256i ordered(__m256i w, int way) {
    const int* o = ORDER[way];
    const __m256i in_order = _mm256_set1_epi32(o[0] | o[1] << 8 | o[2] << 16 | o[3] << 24);
    const __m256i outputs =
        _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    return _mm256_shuffle_epi8(w, _mm256_add_epi8(in_order, outputs));
}

FQVIT_INLINE bool within_limit(__m256i sums) {
    const __m256i over = _mm256_subs_epu8(sums, _mm256_set1_epi8(static_cast<char>(LIMIT)));
    return _mm256_testz_si256(over, over) != 0;
}

FQVIT_INLINE void measure(Quad& quad) {
    const __m256i none = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1);
    quad.fits = 0;
    for (int way = 0; way < WAYS; ++way) {
        const __m256i w = ordered(quad.w, way);
        const __m256i up = _mm256_maddubs_epi16(ones, _mm256_max_epi8(w, none));
        const __m256i down = _mm256_sub_epi16(none, _mm256_maddubs_epi16(ones, _mm256_min_epi8(w, none)));
        // Sums of two are at most 256; packing saturates at 255, which is over the limit, too.
        quad.sums[way] = _mm256_packus_epi16(up, down);
        if (within_limit(quad.sums[way])) quad.fits |= static_cast<std::uint8_t>(1 << way);
    }
    const __m256i sizes = _mm256_sad_epu8(_mm256_abs_epi8(quad.w), none);
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    quad.size = static_cast<std::uint32_t>(_mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2));
}

// The ways in which both quads can be added in int16, if there are any.
FQVIT_INLINE bool match(const Quad& a, const Quad& b, int& way_a, int& way_b) {
    for (int p = 0; p < WAYS; ++p) {
        if (!(a.fits >> p & 1)) continue;
        for (int q = 0; q < WAYS; ++q) {
            if (!(b.fits >> q & 1) || !within_limit(_mm256_adds_epu8(a.sums[p], b.sums[q]))) continue;
            way_a = p, way_b = q;
            return true;
        }
    }
    return false;
}

// Takes from a quad that fits in no way what is over the limit in the last one, and returns that as a quad of its own.
FQVIT_AVX2 Quad cut(Quad& quad) {
    alignas(32) std::int8_t w[COLUMNS][4], rest[COLUMNS][4] = {};
    _mm256_store_si256(reinterpret_cast<__m256i*>(w), quad.w);
    for (int c = 0; c < COLUMNS; ++c) {
        for (int lane = 0; lane < 2; ++lane) {
            const int a = w[c][2 * lane], b = w[c][2 * lane + 1], sum = a + b;
            if ((a < 0) != (b < 0) || std::abs(sum) <= LIMIT) continue;
            const int over = sum > 0 ? sum - LIMIT : sum + LIMIT,
                      larger = 2 * lane + (std::abs(a) >= std::abs(b) ? 0 : 1);
            w[c][larger] = static_cast<std::int8_t>(w[c][larger] - over);
            rest[c][larger] = static_cast<std::int8_t>(over);
        }
    }
    Quad taken = quad;
    quad.w = load(w), taken.w = load(rest);
    measure(quad);
    measure(taken);
    return taken;
}

class PackedAvx2 final : public Packed {
public:
    PackedAvx2(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs) : inputs_(inputs) {
        const std::int64_t quads = (inputs + 3) / 4;
        stretches_ = static_cast<std::size_t>((quads + BLOCK - 1) / BLOCK);
        weights_.reserve(static_cast<std::size_t>((outputs + COLUMNS - 1) / COLUMNS * COLUMNS * quads * 4 * 9 / 8));
        for (std::int64_t first = 0; first < outputs; first += COLUMNS) {
            for (std::int64_t quad = 0; quad < quads; quad += BLOCK) {
                pack_stretch(w, outputs, first, quad, static_cast<int>(std::min<std::int64_t>(BLOCK, quads - quad)));
            }
        }
        list_.shrink_to_fit();
        offsets_.shrink_to_fit();
        weights_.shrink_to_fit();
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        const Stretch* first = list_.data() + static_cast<std::size_t>(panel) * stretches_;
        BY_ROWS[rows](first, first + stretches_, block, offsets_.data(), weights_.data(), false, acc);
    }

    int passes() const override { return static_cast<int>(stretches_); }

    void multiply_pass(int pass, std::int64_t panel, const std::uint8_t* block, int rows,
                       std::int32_t* acc) const override {
        const Stretch* one = list_.data() + static_cast<std::size_t>(panel) * stretches_ + pass;
        BY_ROWS[rows](one, one + 1, block + std::int64_t{pass} * BLOCK * QUAD, offsets_.data(), weights_.data(),
                      pass > 0, acc);
    }

    std::size_t bytes() const override {
        return weights_.size() + offsets_.size() * sizeof(std::uint16_t) + list_.size() * sizeof(Stretch);
    }

private:
    FQVIT_AVX2 void pack_stretch(const std::int8_t* w, std::int64_t outputs, std::int64_t first,
                                 std::int64_t first_quad, int count) {
        quads_.clear();
        const std::int64_t columns = std::min<std::int64_t>(COLUMNS, outputs - first);
        for (int number = 0; number < count; ++number) {
            Quad quad;
            quad.number = static_cast<std::uint16_t>(number), quad.used = false;
            const std::int64_t k = (first_quad + number) * 4, taken = std::min<std::int64_t>(4, inputs_ - k);
            alignas(32) std::int8_t bytes[COLUMNS][4] = {};
            for (std::int64_t c = 0; c < columns; ++c) {
                const std::int8_t* from = w + (first + c) * inputs_ + k;
                std::memcpy(bytes[c], from, taken == 4 ? 4 : static_cast<std::size_t>(taken));
            }
            quad.w = load(bytes);
            measure(quad);
            if (quad.fits == 0) quads_.push_back(cut(quad));
            quads_.push_back(quad);
        }
        order_.clear();  // by size, then place: one number to sort by
        for (std::size_t i = 0; i < quads_.size(); ++i)
            order_.push_back(~quads_[i].size << 16 | static_cast<std::uint32_t>(i));
        std::sort(order_.begin(), order_.end());
        Stretch stretch{0, 0, offsets_.size(), weights_.size()};
        alone_.clear();
        for (std::size_t i = 0; i < order_.size(); ++i) {
            Quad& quad = at(i);
            if (quad.used) continue;
            if (join(i)) {
                ++stretch.doubles;
            } else {
                alone_.push_back(&quad);
            }
        }
        for (const Quad* quad : alone_) {
            int way = 0;
            while (!(quad->fits >> way & 1)) ++way;
            emit(*quad, way);
            ++stretch.singles;
        }
        list_.push_back(stretch);
    }

    Quad& at(std::size_t place) { return quads_[order_[place] & 0xffff]; }

    // Finds a partner of the quad at a place, from the small ones up: they fit many, so that few are tried.
    FQVIT_AVX2 bool join(std::size_t place) {
        int tries = 0, way_a = 0, way_b = 0;
        const Quad& quad = at(place);
        while (order_.size() > place + 1 && at(order_.size() - 1).used) order_.pop_back();
        for (std::size_t j = order_.size() - 1; j > place && tries < TRIES; --j) {
            Quad& other = at(j);
            if (other.used) continue;
            ++tries;
            if (!match(quad, other, way_a, way_b)) continue;
            other.used = true;
            emit(quad, way_a);
            emit(other, way_b);
            return true;
        }
        return false;
    }

    FQVIT_AVX2 void emit(const Quad& quad, int way) {
        offsets_.push_back(static_cast<std::uint16_t>(quad.number * QUAD + OFFSETS[way]));
        weights_.resize(weights_.size() + sizeof(__m256i));
        store(weights_.data() + weights_.size() - sizeof(__m256i), ordered(quad.w, way));
    }

    std::int64_t inputs_;
    std::size_t stretches_;
    std::vector<Stretch> list_;
    std::vector<std::uint16_t> offsets_;
    AlignedVector<std::int8_t> weights_;
    AlignedVector<Quad> quads_;
    std::vector<std::uint32_t> order_;
    std::vector<const Quad*> alone_;
};

class Avx2 final : public Gemm {
public:
    constexpr Avx2() : Gemm("avx2", ROWS, COLUMNS) {}

    std::unique_ptr<Packed> pack(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs) const override {
        return std::make_unique<PackedAvx2>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return static_cast<std::size_t>((inputs + 3) / 4 * QUAD);
    }

    FQVIT_AVX2 void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                              std::uint8_t* block) const override {
        const __m128i cells = _mm_setr_epi8(0, 2, 1, 3, 0, 1, 2, 3, 4, 6, 5, 7, 4, 5, 6, 7);
        for (int r = 0; r < count; ++r) {
            const std::uint8_t* row = x + r * stride;
            std::uint8_t* out = block + r * CELL;
            std::int64_t k = 0;
            for (; k + 8 <= inputs; k += 8, out += 2 * QUAD) {
                const __m128i both =
                    _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k)), cells);
                _mm_storel_epi64(reinterpret_cast<__m128i*>(out), both);
                store_upper(out + QUAD, both);
            }
            for (; k < inputs; k += 4, out += QUAD) {
                std::uint8_t quad[8] = {};
                std::memcpy(quad, row + k, static_cast<std::size_t>(std::min<std::int64_t>(4, inputs - k)));
                const __m128i cell = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(quad)), cells);
                _mm_storel_epi64(reinterpret_cast<__m128i*>(out), cell);
            }
        }
    }
};

}  // namespace

const Gemm* gemm_avx2() {
    static constexpr Avx2 family;
    return &family;
}

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_avx2() { return nullptr; }
}  // namespace fqvit

#endif
