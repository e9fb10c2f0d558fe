// Compares fused attention with plain loops: every kind of softmax, odd sizes, extreme codes and zero points, with and
// without bias and regions. Prints one line per instruction set and exits with 1 if any case differs.
//
//   attention_test [NAME]...      only these instruction sets; without arguments all that are available
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "core/cpu.h"
#include "kernels/attention_bytes.h"
#include "kernels/kernels.h"
#include "kernels/scalar/attention_scalar.h"
#include "test/random.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FQVIT_AVX512_SHIM
#include "kernels/avx512/kernels_avx512.h"
#endif

namespace {

using namespace fqvit;

constexpr std::uint8_t POISON = 0xa5;

template <class T>
T one_of(Random& random, std::initializer_list<T> values) {
    return values.begin()[random.within(0, static_cast<std::int64_t>(values.size()) - 1)];
}

// A head with its operands. Nothing follows the last element of an operand, so that sanitizers see a read past it.
struct Case {
    Attention head{};
    std::vector<std::int32_t> table, bias;
    std::vector<std::int16_t> weight;
    std::vector<std::uint8_t> q, k, v, region, y;
    std::uint8_t code_by_distance[256] = {}, weight_low[16] = {}, weight_high[16] = {};
    AttentionBytes bytes;
};

std::vector<std::uint8_t> draw_codes(Random& random, std::int64_t rows, std::int64_t width, std::int64_t stride) {
    std::vector<std::uint8_t> x(static_cast<std::size_t>((rows - 1) * stride + width), POISON);
    const auto kind = random.within(0, 4);
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < width; ++c) {
            const std::int64_t code = kind == 0   ? one_of<std::int64_t>(random, {0, 255})
                                      : kind == 1 ? 255
                                      : kind == 2 ? 128 + random.within(-3, 3)
                                                  : random.within(0, 255);
            x[static_cast<std::size_t>(r * stride + c)] = static_cast<std::uint8_t>(code);
        }
    }
    return x;
}

// Sets a table of exponentials, or of codes, and the weights of the codes.
void draw_softmax(Case& c, Random& random) {
    Attention& head = c.head;
    head.kind = one_of(random, {Attention::LOG, Attention::UNIFORM, Attention::RELATIVE});
    const std::int64_t length = one_of<std::int64_t>(random, {1, 2, 16, 63, 64, 65, 128, 129, 200, 255, 256, 257});
    const int decay = static_cast<int>(random.within(1, 60));
    std::vector<std::int32_t> weight;
    if (head.kind == Attention::RELATIVE) {
        const bool sixteen = random.within(0, 3) != 0;
        const std::int32_t codes = sixteen ? 16 : 256;
        for (std::int64_t d = 0; d < length; ++d) {
            c.table.push_back(static_cast<std::int32_t>(
                random.within(0, 3) == 0 ? random.within(0, codes - 1) : std::min<std::int64_t>(d / decay, codes - 1)));
        }
        const std::int32_t most = one_of(random, {255, 256, 4096, 32767, 32768});
        for (std::int32_t code = 0; code < codes; ++code)
            weight.push_back(static_cast<std::int32_t>(random.within(0, most)));
        weight[static_cast<std::size_t>(c.table[0])] = most;
        weight[static_cast<std::size_t>(c.table.back())] = c.table.back() == c.table[0] ? most : 0;
        head.largest_weight = most;
        head.softmax_last = codes - 1;
    } else {
        const std::int64_t one = one_of<std::int64_t>(random, {1, 100, 1 << 12, 1 << 20, 1 << 24}),
                           odd = random.within(0, 1);
        for (std::int64_t d = 0; d < length; ++d) {
            const std::int64_t e =
                static_cast<std::int64_t>(static_cast<double>(one) * std::exp(-static_cast<double>(d) / decay));
            c.table.push_back(static_cast<std::int32_t>(d == 0 ? one : e - (e > 2 ? odd : 0)));
        }
        if (head.kind == Attention::LOG) {
            if (random.within(0, 3) == 0) {
                for (std::size_t d = 1; d < c.table.size(); ++d)
                    c.table[d] = static_cast<std::int32_t>(random.within(0, one));
            }
            head.softmax_last = one_of(random, {3, 7, 15});
        } else {
            head.softmax_last = one_of(random, {1, 15, 255});
            head.softmax_shift = static_cast<int>(random.within(1, 52));
            head.softmax_mult =
                std::min((std::int64_t{1} << head.softmax_shift) * head.softmax_last + random.within(0, 100),
                         (std::int64_t{1} << 58) - 1);
        }
        const std::int32_t zero = one_of(random, {0, 0, 1, head.softmax_last});
        const bool powers = head.softmax_last <= 15 && random.within(0, 2) != 0, zero_code = random.within(0, 1) == 0;
        for (std::int32_t code = 0; code <= head.softmax_last; ++code) {
            weight.push_back(!powers                                  ? code - zero
                             : code == head.softmax_last && zero_code ? 0
                                                                      : 1 << (head.softmax_last - code));
        }
    }
    head.sign = *std::max_element(weight.begin(), weight.end()) == 32768 ? -1 : 1;
    for (const std::int32_t w : weight) c.weight.push_back(static_cast<std::int16_t>(head.sign * w));
    head.masked_code = head.kind == Attention::LOG       ? head.softmax_last
                       : head.kind == Attention::UNIFORM ? 0
                                                         : c.table.back();
}

// Prepares the data that kernels need, as FusedAttention does.
void prepare(Case& c) {
    Attention& head = c.head;
    head.table = c.table.data(), head.table_length = static_cast<std::int64_t>(c.table.size());
    head.table_decreases = std::is_sorted(c.table.rbegin(), c.table.rend());
    head.weight = c.weight.data();
    head.sixteen_codes = head.softmax_last < 16;
    for (std::size_t d = 0; d < std::min<std::size_t>(c.table.size(), 256); ++d) {
        c.code_by_distance[d] = static_cast<std::uint8_t>(c.table[d]);
    }
    for (std::size_t code = 0; code < std::min<std::size_t>(c.weight.size(), 16); ++code) {
        c.weight_low[code] = static_cast<std::uint8_t>(c.weight[code]);
        c.weight_high[code] = static_cast<std::uint8_t>(static_cast<std::uint16_t>(c.weight[code]) >> 8);
    }
    head.code_by_distance = c.code_by_distance, head.weight_low = c.weight_low, head.weight_high = c.weight_high;
    c.bytes = AttentionBytes(head, static_cast<std::int64_t>(c.weight.size()));
    head.bytes = &c.bytes;
}

// Computes the scores of all rows, the codes of the softmax, then the output. Returns an empty vector if a sum does not
// fit in i32, which the checks of the ops rule out.
std::vector<std::uint8_t> expected(const Case& c) {
    const Attention& head = c.head;
    const auto at = [](const std::vector<std::uint8_t>& x, std::int64_t i) {
        return std::int64_t{x[static_cast<std::size_t>(i)]};
    };
    std::vector<std::uint8_t> y = c.y, scores(static_cast<std::size_t>(head.queries * head.tokens)), codes = scores;
    for (std::int64_t m = 0; m < head.queries; ++m) {
        for (std::int64_t t = 0; t < head.tokens; ++t) {
            std::int64_t acc =
                c.bias.empty() ? 0 : c.bias[static_cast<std::size_t>(m * round_up(head.tokens, std::int64_t{16}) + t)];
            for (std::int64_t d = 0; d < head.width; ++d) {
                acc += (at(c.q, m * head.q_stride + d) - head.q_zero) * (at(c.k, t * head.k_stride + d) - head.k_zero);
            }
            scores[static_cast<std::size_t>(m * head.tokens + t)] = static_cast<std::uint8_t>(
                clamp(requantize(acc, head.score_mult, head.score_shift) + head.score_zero, head.score_last));
        }
        const scalar::SoftmaxRows rows{head.tokens, head.tokens, c.region.empty() ? nullptr : c.region.data(),
                                       head.table, head.table_length};
        const Codes x{scores.data(), false};
        if (head.kind == Attention::LOG) {
            scalar::log_softmax_row(rows, x, codes.data(), m, head.softmax_last);
        } else if (head.kind == Attention::UNIFORM) {
            scalar::softmax_row(rows, x, codes.data(), false, m, head.softmax_mult, head.softmax_shift,
                                head.softmax_last);
        } else {
            scalar::row_codes_row(rows, x, codes.data(), m);
        }
        const auto weight = [&](std::int64_t t) {
            return std::int64_t{head.sign * head.weight[codes[static_cast<std::size_t>(m * head.tokens + t)]]};
        };
        std::int64_t sum = 0, mult = head.mult;
        for (std::int64_t t = 0; t < head.tokens; ++t) sum += weight(t);
        if (head.kind == Attention::RELATIVE) mult = round_divide(head.mult * head.largest_weight, sum);
        for (std::int64_t d = 0; d < head.value_width; ++d) {
            std::int64_t acc = 0;
            for (std::int64_t t = 0; t < head.tokens; ++t)
                acc += weight(t) * (at(c.v, t * head.v_stride + d) - head.v_zero);
            if (std::abs(acc) >= std::int64_t{1} << 31) return {};
            y[static_cast<std::size_t>(m * head.y_stride + d)] =
                static_cast<std::uint8_t>(clamp(requantize(acc, mult, head.shift) + head.y_zero, head.y_last));
        }
    }
    return y;
}

// Returns a shift that scales products of up to most * mult to about 8 bits, varied at random by a few bits.
int draw_shift(Random& random, std::int64_t most, std::int64_t mult) {
    int shift = 1;
    for (std::int64_t reach = most * mult; reach > 200; reach /= 2) ++shift;
    return static_cast<int>(std::clamp<std::int64_t>(shift + random.within(-4, 2), 1, 62));
}

// Draws a head with log2 codes similar to those of real networks: rows with equal scores have small weights, other rows
// have large and small ones.
void draw_log2(Case& c, Random& random) {
    Attention& head = c.head;
    head.kind = Attention::LOG;
    head.tokens = one_of<std::int64_t>(random, {130, 197, 257});
    head.queries = random.within(1, 40), head.width = 32, head.value_width = 32;
    head.q_stride = head.k_stride = head.v_stride = head.y_stride = 32;
    head.q_zero = 120, head.k_zero = 130, head.v_zero = static_cast<std::int32_t>(random.within(100, 160));
    head.score_zero = head.y_zero = 128, head.score_last = head.y_last = 255, head.softmax_last = 15, head.sign = -1;
    head.masked_code = 15;
    for (int d = 0; d < 256; ++d) c.table.push_back(static_cast<std::int32_t>(std::exp(20 * std::log(2.0) - d * 0.1)));
    for (int code = 0; code < 16; ++code)
        c.weight.push_back(static_cast<std::int16_t>(code == 15 ? 0 : -(32768 >> code)));
    const auto codes = [&](std::int64_t rows) {
        std::vector<std::uint8_t> x(static_cast<std::size_t>(rows * 32));
        for (std::uint8_t& code : x) code = static_cast<std::uint8_t>(random.within(0, 255));
        return x;
    };
    c.q = codes(head.queries), c.k = codes(head.tokens), c.v = codes(head.tokens);
    for (std::int64_t m = 0; m < head.queries; ++m) {
        if (random.within(0, 1) == 0) std::fill_n(c.q.begin() + m * 32, 32, std::uint8_t{120});
    }
    c.y.assign(c.q.size(), POISON);
    head.score_mult = 1 << 30, head.score_shift = 40, head.mult = 1 << 30, head.shift = 44;
    prepare(c);
}

void draw(Case& c, Random& random) {
    Attention& head = c.head;
    head.tokens = one_of<std::int64_t>(random, {1, 2, 3, 15, 16, 17, 33, 47, 49, 63, 64, 65, 100, 129, 197, 300});
    head.queries = random.within(0, 1) == 0 ? head.tokens : random.within(1, 20);
    head.width = one_of<std::int64_t>(random, {1, 3, 4, 15, 16, 17, 32, 33, 63, 64, 65, 80, 130});
    head.value_width = one_of<std::int64_t>(random, {1, 7, 16, 17, 31, 32, 33, 48, 64, 65, 96, 130});
    head.q_stride = head.width + random.within(0, 9), head.k_stride = head.width + random.within(0, 9);
    head.v_stride = head.value_width + random.within(0, 9), head.y_stride = head.value_width + random.within(0, 9);
    const auto zero = [&] {
        return static_cast<std::int32_t>(one_of<std::int64_t>(random, {0, 255, 128, random.within(0, 255)}));
    };
    head.q_zero = zero(), head.k_zero = zero(), head.v_zero = zero(), head.score_zero = zero(), head.y_zero = zero();
    head.score_last = one_of(random, {255, 255, 255, 127, 1}), head.y_last = one_of(random, {255, 255, 63});
    head.score_zero = std::min(head.score_zero, head.score_last), head.y_zero = std::min(head.y_zero, head.y_last);
    draw_softmax(c, random);
    c.q = draw_codes(random, head.queries, head.width, head.q_stride);
    c.k = draw_codes(random, head.tokens, head.width, head.k_stride);
    c.v = draw_codes(random, head.tokens, head.value_width, head.v_stride);
    c.y.assign(static_cast<std::size_t>((head.queries - 1) * head.y_stride + head.value_width), POISON);
    std::int64_t most = head.width * 9000;
    if (random.within(0, 1) == 0) {
        const std::int64_t bias = one_of<std::int64_t>(random, {100, 1 << 16, 2'000'000'000});
        for (std::int64_t i = 0; i < head.queries * round_up(head.tokens, std::int64_t{16}); ++i) {
            c.bias.push_back(static_cast<std::int32_t>(random.within(-bias, bias)));
        }
        most = std::max(most, bias);
    }
    // RELATIVE: the weight of masked tokens is 0, as the ops require.
    const bool maskable = head.kind != Attention::RELATIVE || c.weight[static_cast<std::size_t>(head.masked_code)] == 0;
    if (head.queries == head.tokens && maskable && random.within(0, 1) == 0) {
        const std::int64_t regions = random.within(0, 3);
        for (std::int64_t t = 0; t < head.tokens; ++t)
            c.region.push_back(static_cast<std::uint8_t>(random.within(0, regions)));
    }
    head.score_mult =
        one_of<std::int64_t>(random, {random.within(1 << 30, 2147483647), random.within(1, 1 << 16), 1, 0});
    head.score_shift = draw_shift(random, most, std::max<std::int64_t>(head.score_mult, 1));
    std::int64_t largest = 1;
    for (const std::int16_t w : c.weight) largest = std::max<std::int64_t>(largest, std::abs(w));
    head.mult = one_of<std::int64_t>(random, {random.within(1 << 28, (1 << 29) - 1), random.within(1, 1 << 16)});
    head.shift = draw_shift(random, 100 * largest * (head.kind == Attention::RELATIVE ? 1 : 3), head.mult);
    prepare(c);
}

std::string describe(const Attention& head) {
    const char* kinds[] = {"log", "uniform", "relative"};
    return std::string(kinds[head.kind]) + ", M " + std::to_string(head.queries) + ", T " +
           std::to_string(head.tokens) + ", D " + std::to_string(head.width) + ", D of V " +
           std::to_string(head.value_width) + ", table " + std::to_string(head.table_length) + ", shifts " +
           std::to_string(head.score_shift) + " and " + std::to_string(head.shift);
}

struct Tally {
    long passed = 0, failed = 0;
};

Tally check(const char* label, const Kernels& kernels, int cases) {
    Random random(0x9e3779b97f4a7c15ull);
    Tally tally;
    for (int i = 0; i < cases; ++i) {
        Case c;
        i % 10 == 0 ? draw_log2(c, random) : draw(c, random);
        const std::size_t bytes = kernels.attention_scratch(c.head);
        if (bytes == 0) continue;
        AlignedVector<std::uint8_t> scratch(bytes, POISON);
        // The second time with other queries: the kernel may use the keys and values that it packed before.
        for (const bool same_keys : {false, true}) {
            if (same_keys) {
                c.q = draw_codes(random, c.head.queries, c.head.width, c.head.q_stride);
                std::fill(c.y.begin(), c.y.end(), POISON);
            }
            c.head.same_keys = same_keys;
            const std::vector<std::uint8_t> wanted = expected(c);
            if (wanted.empty()) break;
            kernels.attention(c.head, c.q.data(), c.k.data(), c.v.data(), c.bias.empty() ? nullptr : c.bias.data(),
                              c.region.empty() ? nullptr : c.region.data(), c.y.data(), scratch.data());
            if (c.y == wanted) {
                ++tally.passed;
                continue;
            }
            const auto at = std::mismatch(c.y.begin(), c.y.end(), wanted.begin());
            if (++tally.failed > 10) continue;
            std::printf("%s: case %d: %s%s%s%s: y[%d] is %d, expected %d\n", label, i, describe(c.head).c_str(),
                        c.bias.empty() ? "" : ", bias", c.region.empty() ? "" : ", regions",
                        same_keys ? ", same keys" : "", static_cast<int>(at.first - c.y.begin()), *at.first,
                        *at.second);
        }
    }
    return tally;
}

struct Entry {
    const char* label;
    const Kernels* kernels;
    bool runs;
    int cases;
};

}  // namespace

int main(int argc, char** argv) {
    const CpuFeatures cpu = cpu_features();
    const Entry entries[] = {
        {"avx2", kernels_avx2(), cpu.avx2, 4000},
        {"avx512", kernels_avx512(), cpu.avx512_vbmi && cpu.avx512_vnni, 4000},
        {"avx512bw", kernels_avx512bw(), cpu.avx512_vnni, 4000},
        {"neon", kernels_neon(), cpu.neon, 1000},
        {"neon_dotprod", kernels_neon_dotprod(), cpu.neon_dotprod, 1000},
#if defined(__wasm__)
        {"simd128", kernels_simd128(), true, 1000},
#endif
#ifdef FQVIT_AVX512_SHIM
        {"avx512_shim", kernels_avx512_shim(), true, 1000},
        {"avx512bw_shim", kernels_avx512bw_shim(), true, 1000},
#endif
    };
    Tally all;
    for (const Entry& entry : entries) {
        if (argc > 1 &&
            std::none_of(argv + 1, argv + argc, [&](const char* name) { return std::strcmp(name, entry.label) == 0; }))
            continue;
        if (entry.kernels == nullptr || !entry.runs) {
            std::printf("%s: not run, %s\n", entry.label,
                        entry.kernels == nullptr ? "not in this build" : "not on this CPU");
            continue;
        }
        const Tally tally = check(entry.label, *entry.kernels, entry.cases);
        std::printf("%s: %ld passed, %ld failed\n", entry.label, tally.passed, tally.failed);
        all.passed += tally.passed, all.failed += tally.failed;
    }
    std::printf("%ld passed, %ld failed\n", all.passed, all.failed);
    return all.failed == 0 ? 0 : 1;
}
