// acc[m, o] = sum_k x[m, k] * w[o, k] with AVX2's vpmaddubsw. Exact, although this instruction saturates.
//
// vpmaddubsw multiplies 32 pairs of bytes and adds adjacent products in i16, saturating. Activations are at most 255,
// so the sum in a lane is exact if its positive weights add up to at most 128 and its negative ones to at least -128,
// because 255 * 128 < 2^15. If the weights that two or three instructions put into a lane meet this limit together,
// vpaddw can add their results in i16 before one vpmaddwd widens them to i32. Trained weights rarely meet the limit in
// their original order, so packing rearranges them for each panel of 8 outputs:
//  - Inputs are packed in quads k..k+3. The block of activations stores each quad in a cell of 16 bytes, which holds
//    every input several times, as x or as its complement 255 - x. At 11 offsets, four adjacent bytes, called a window,
//    hold all inputs of the quad. Windows differ in how they pair the inputs, and in which of them are complemented.
//  - A complement changes the sign of a weight, because w * x = 255 * w - w * (255 - x). Two large weights of the same
//    sign in a lane exceed the limit, but not if one of them is negated. The terms 255 * w are added up while packing,
//    and accumulators start with them.
//  - A quad that meets the limit in no window is split into two quads: weights clipped to the limit, and the rest.
//  - Quads that meet the limit together form a group: a triple (per row 7 arithmetic instructions for 96 products) or a
//    double (5 for 64 products); a quad without a partner is a single (3 for 32 products). Multiplications limit the
//    speed: a triple has 4, a double 3 and a single 2.
//    A list of offsets tells the micro-kernel which four bytes to broadcast.
// Packing checks every group against the limit, so nothing saturates for any activations.
//
// Tile: 11 rows x 8 columns. 11 accumulators, 2 vectors of weights, 1 of ones, 2 temporaries: all 16 registers.
// K-block: 96 quads (384 inputs), 16.5 KiB of packed activations.
#include "kernels/gemm.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/aligned.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/gemm_tile_avx2.h"
#include "kernels/avx2/quads_avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = TILE_ROWS, COLUMNS = TILE_COLUMNS;
constexpr int MAX_THIRDS = 24;  // quads that are tried as the third of a group, the smallest ones
static_assert(ROWS * COLUMNS <= MAX_TILE && K_BLOCK * QUAD <= 65536);

// For each byte of a cell: the number of its input, and 255 if the complement 255 - x is stored, otherwise 0.
constexpr std::uint8_t CELL_INPUTS[CELL] = {3, 0, 1, 2, 3, 0, 1, 3, 2, 0, 1, 3, 0, 2, 1, 3};
constexpr std::uint8_t CELL_COMPLEMENTS[CELL] = {255, 0, 0, 0, 0, 0, 255, 0, 255, 0, 0, 0, 255, 255, 0, 255};
// A window: four adjacent bytes of a cell that hold all inputs of the quad.
struct Window {
    int offset;
    std::uint32_t inputs, complements;  // one byte each: the number of the input; 255 for a complement, else 0

    constexpr explicit Window(int o) : offset(o), inputs(0), complements(0) {
        for (int i = 3; i >= 0; --i) {
            inputs = inputs << 8 | CELL_INPUTS[o + i];
            complements = complements << 8 | CELL_COMPLEMENTS[o + i];
        }
    }
};
// A search found this cell: its windows contain 11 of the 12 ways to pair the inputs and to choose, for each pair,
// whether one of the two is complemented.
constexpr Window WINDOWS[] = {Window(0), Window(1), Window(2),  Window(3),  Window(5), Window(6),
                              Window(7), Window(8), Window(10), Window(11), Window(12)};
constexpr int WINDOW_COUNT = sizeof WINDOWS / sizeof WINDOWS[0];
constexpr int IN_ORDER_WINDOW = 1;
static_assert(WINDOWS[IN_ORDER_WINDOW].offset == IN_ORDER && WINDOWS[IN_ORDER_WINDOW].complements == 0);

// ---- packing ----

// The weights of one quad for 8 outputs and, for each window, the sums of the weights in every lane.
struct Quad {
    __m256i w;                   // [8 outputs][4 inputs]
    __m256i sums[WINDOW_COUNT];  // lane_sums
    std::uint32_t size;          // sum of |w|; large quads look for a partner first
    std::uint16_t number;        // index in its K-block
    std::uint16_t fits;          // bit i: window i meets the limit
};

FQVIT_INLINE __m256i set_quads(std::uint32_t bytes) { return _mm256_set1_epi32(static_cast<int>(bytes)); }

// Returns the weights that belong to the bytes of a window: the four inputs of every output in its order, negated where
// the window has the complement.
FQVIT_INLINE __m256i arranged(__m256i w, int window) {
    const Window& bytes = WINDOWS[window];
    const __m256i outputs =
        _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const __m256i order = _mm256_add_epi8(set_quads(bytes.inputs), outputs);
    // vpsignb negates where the last operand is negative; a complement is the byte -1.
    const __m256i signs = _mm256_or_si256(set_quads(bytes.complements), _mm256_set1_epi8(1));
    return _mm256_sign_epi8(_mm256_shuffle_epi8(w, order), signs);
}

// Returns whether a window can be used for these weights: -128 has no negative.
FQVIT_INLINE bool representable(__m256i w, int window) {
    const __m256i least = _mm256_cmpeq_epi8(w, _mm256_set1_epi8(-128));
    return window == IN_ORDER_WINDOW || _mm256_testz_si256(least, least) != 0;
}

// Fills in sums, fits and size.
FQVIT_AVX2 void measure(Quad& quad) {
    quad.fits = 0;
    for (int window = 0; window < WINDOW_COUNT; ++window) {
        quad.sums[window] = lane_sums(arranged(quad.w, window));
        if (within_limit(quad.sums[window]) && representable(quad.w, window)) {
            quad.fits |= static_cast<std::uint16_t>(1 << window);
        }
    }
    const __m256i sizes = _mm256_sad_epu8(_mm256_abs_epi8(quad.w), _mm256_setzero_si256());
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    quad.size = static_cast<std::uint32_t>(_mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2));
}

// Quads that are added in i16, and the sums of their lanes.
struct Group {
    const Quad* quads[3];
    int windows[3], size;
    __m256i sums;
};

// Adds a quad to a group of one, if there are windows in which both meet the limit. Takes the windows with the smallest
// largest sum, because these are most likely to leave room for a third quad.
FQVIT_AVX2 bool add_second(Group& group, const Quad& second) {
    const Quad& first = *group.quads[0];
    __m256i limit = _mm256_set1_epi8(static_cast<char>(LIMIT));
    for (unsigned left = first.fits; left != 0; left &= left - 1) {
        const int i = __builtin_ctz(left);
        for (unsigned right = second.fits; right != 0; right &= right - 1) {
            const int j = __builtin_ctz(right);
            const __m256i sums = _mm256_adds_epu8(first.sums[i], second.sums[j]), over = _mm256_subs_epu8(sums, limit);
            if (_mm256_testz_si256(over, over) == 0) continue;
            group = {{&first, &second, nullptr}, {i, j, 0}, 2, sums};
            limit = _mm256_subs_epu8(_mm256_set1_epi8(static_cast<char>(maximum(sums))), _mm256_set1_epi8(1));
        }
    }
    return group.size == 2;
}

// Adds a quad to a group of two if the three meet the limit.
FQVIT_AVX2 bool add_third(Group& group, const Quad& third) {
    for (unsigned windows = third.fits; windows != 0; windows &= windows - 1) {
        const int window = __builtin_ctz(windows);
        if (!within_limit(_mm256_adds_epu8(group.sums, third.sums[window]))) continue;
        group.quads[2] = &third, group.windows[2] = window, group.size = 3;
        return true;
    }
    return false;
}

// Splits a quad that meets the limit in no window: clips it to the limit of the window in order and returns the rest as
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
        start_.resize(panels_ * COLUMNS);
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
        for (int k_block = 0; k_block < k_blocks(); ++k_block) {
            multiply_k_block(k_block, panel, panel + 1, block, rows, acc, 0);
        }
    }

    int k_blocks() const override { return static_cast<int>(k_blocks_); }

    void multiply_k_block(int k_block, std::int64_t first, std::int64_t last, const std::uint8_t* block, int rows,
                          std::int32_t* acc, std::int64_t stride) const override {
        const KBlock* one =
            list_.data() + static_cast<std::size_t>(k_block) * panels_ + static_cast<std::size_t>(first);
        const std::int32_t* start = k_block > 0 ? nullptr : start_.data() + first * COLUMNS;
        const MicroKernel kernel = MULTIPLY_QUADS[rows];
        block += std::int64_t{k_block} * K_BLOCK * QUAD;
        for (; first < last; ++first, ++one, acc += stride) {
            kernel(*one, block, offsets_.data() + one->offsets, weights_.data() + one->weights, start, rows, acc);
            if (start != nullptr) start += COLUMNS;
        }
    }

    std::size_t bytes() const override {
        return weights_.size() + offsets_.size() * sizeof(std::uint16_t) + list_.size() * sizeof(KBlock) +
               start_.size() * sizeof(std::int32_t);
    }

private:
    FQVIT_AVX2 void pack_k_block(const std::int8_t* w, std::int64_t outputs, std::int64_t first,
                                 std::int64_t first_quad, int count) {
        quads_.clear();
        const std::int64_t columns = std::min<std::int64_t>(COLUMNS, outputs - first);
        for (int number = 0; number < count; ++number) {
            Quad quad;
            quad.number = static_cast<std::uint16_t>(number);
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
        group_quads();
        panel_start_ = start_.data() + first;
        KBlock k_block{0, 0, 0, static_cast<std::uint32_t>(offsets_.size()), weights_.size()};
        const auto emit_groups = [&](int size) FQVIT_AVX2 {
            std::uint32_t count = 0;
            for (const Group& group : groups_) {
                if (group.size != size) continue;
                for (int i = 0; i < size; ++i) emit(*group.quads[i], group.windows[i]);
                ++count;
            }
            return count;
        };
        k_block.triples = emit_groups(3), k_block.doubles = emit_groups(2), k_block.singles = emit_groups(1);
        list_.push_back(k_block);
    }

    // Finds a quad for which add(quad) succeeds, in order_ from `start` on, and removes it from order_.
    template <class Add>
    FQVIT_INLINE void take(std::ptrdiff_t start, Add&& add) {
        for (auto at = order_.begin() + start; at != order_.end(); ++at) {
            if (!add(quads_[*at & 0xffff])) continue;
            order_.erase(at);
            return;
        }
    }

    // Makes groups of quads that meet the limit together. The largest quads come first, because few others match them,
    // and take the largest one that matches, because small quads match most others and are needed last.
    FQVIT_AVX2 void group_quads() {
        groups_.clear();
        while (!order_.empty()) {
            const Quad& quad = quads_[order_[0] & 0xffff];
            order_.erase(order_.begin());
            Group group = {{&quad}, {__builtin_ctz(quad.fits)}, 1, {}};
            take(0, [&](const Quad& second) FQVIT_AVX2 { return add_second(group, second); });
            const auto start = static_cast<std::ptrdiff_t>(order_.size()) - MAX_THIRDS;
            if (group.size == 2) {
                take(std::max<std::ptrdiff_t>(start, 0),
                     [&](const Quad& third) FQVIT_AVX2 { return add_third(group, third); });
            }
            groups_.push_back(group);
        }
    }

    FQVIT_AVX2 void emit(const Quad& quad, int window) {
        offsets_.push_back(static_cast<std::uint16_t>(quad.number * QUAD + WINDOWS[window].offset));
        const __m256i weights = arranged(quad.w, window);
        weights_.resize(weights_.size() + sizeof weights);
        store(weights_.data() + weights_.size() - sizeof weights, weights);
        // w * x = 255 * w - w * (255 - x): `weights` has -w where the window has 255 - x.
        const __m256i complements = set_quads(WINDOWS[window].complements);
        const __m256i products = _mm256_maddubs_epi16(complements, weights);
        const __m256i sums = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
        store(panel_start_, _mm256_sub_epi32(load(panel_start_), sums));
    }

    std::int64_t inputs_;
    std::size_t k_blocks_, panels_;
    std::vector<KBlock> list_;         // [k_blocks_][panels_]
    std::vector<std::int32_t> start_;  // [panels_][8]: 255 * the weights whose inputs are complemented
    std::vector<std::uint16_t> offsets_;
    AlignedVector<std::int8_t> weights_;
    // Used while packing.
    std::int32_t* panel_start_ = nullptr;
    AlignedVector<Quad> quads_;
    std::vector<std::uint32_t> order_;
    AlignedVector<Group> groups_;
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
        const __m128i first_quad = _mm_loadu_si128(reinterpret_cast<const __m128i*>(CELL_INPUTS));
        const __m128i flips = _mm_loadu_si128(reinterpret_cast<const __m128i*>(CELL_COMPLEMENTS));
        const auto store_cell = [&](__m128i codes, int quad, std::uint8_t* out) FQVIT_AVX2 {
            const __m128i inputs_of_quad = _mm_add_epi8(first_quad, _mm_set1_epi8(static_cast<char>(4 * quad)));
            const __m128i cell = _mm_xor_si128(_mm_shuffle_epi8(codes, inputs_of_quad), flips);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + quad * QUAD), cell);
        };
        // By K-block, so that the cells of all rows stay in the L1 cache.
        for (std::int64_t first = 0; first < inputs; first += K_BLOCK * 4) {
            const std::int64_t end = std::min<std::int64_t>(inputs, first + K_BLOCK * 4);
            for (int r = 0; r < count; ++r) {
                const std::uint8_t* row = x + r * stride;
                std::uint8_t* out = block + first / 4 * QUAD + r * CELL;
                std::int64_t k = first;
                for (; k + 16 <= end; k += 16, out += 4 * QUAD) {
                    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k));
                    store_cell(codes, 0, out);
                    store_cell(codes, 1, out);
                    store_cell(codes, 2, out);
                    store_cell(codes, 3, out);
                }
                for (; k < end; k += 4, out += QUAD) {
                    std::uint8_t quad[16] = {};
                    std::memcpy(quad, row + k, static_cast<std::size_t>(std::min<std::int64_t>(4, end - k)));
                    store_cell(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quad)), 0, out);
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
