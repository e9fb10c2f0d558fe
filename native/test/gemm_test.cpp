// Compares every GEMM with three nested loops: many shapes, weights whose sums overflow i16, and every number of
// rows. Prints one line per instruction set and exits with 1 if a result differs.
//
//   gemm_test [NAME]...      only these instruction sets; without arguments all that are available
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "core/cpu.h"
#include "kernels/gemm.h"
#include "kernels/vnni/gemm_vnni_shim.h"
#include "test/random.h"

namespace {

using namespace fqvit;

// Approximately normal: the sum of twelve uniform numbers of variance 256^2 / 12 each.
int normal(Random& random, int sigma) {
    int sum = -12 * 128;
    for (int i = 0; i < 12; ++i) sum += static_cast<int>(random.within(0, 256));
    return sum * sigma / 256;
}

enum Weights { UNIFORM, HIGHEST, LOWEST, ALTERNATING, NORMAL, SPARSE, BITS_7, EXTREMES_7, BITS_6, BITS_4, KINDS };
constexpr const char* NAMES[KINDS] = {"uniform", "all 127", "all -128",  "alternating", "normal",
                                      "sparse",  "7 bits",  "-64 or 63", "6 bits",      "4 bits"};

std::vector<std::int8_t> make_weights(Weights kind, std::int64_t outputs, std::int64_t inputs, Random& random) {
    std::vector<std::int8_t> w(static_cast<std::size_t>(outputs * inputs));
    for (std::size_t i = 0; i < w.size(); ++i) {
        std::int64_t value = 0;
        switch (kind) {
            case UNIFORM: value = random.within(-128, 127); break;
            case HIGHEST: value = 127; break;
            case LOWEST: value = -128; break;
            case ALTERNATING: value = i % 2 == 0 ? 127 : -128; break;
            case NORMAL: value = std::clamp(normal(random, 42), -127, 127); break;  // like trained weights
            case SPARSE: value = random.within(0, 7) == 0 ? random.within(-128, 127) : 0; break;
            case BITS_7: value = random.within(-64, 63); break;
            case EXTREMES_7: value = random.within(0, 1) == 0 ? -64 : 63; break;
            case BITS_6: value = random.within(0, 1) == 0 ? -32 : 31; break;
            default: value = random.within(-8, 7);
        }
        w[i] = static_cast<std::int8_t>(value);
    }
    return w;
}

constexpr std::uint8_t POISON = 0xa5;
constexpr std::int32_t POISON_ACC = 0x5a5a5a5a;

struct Tally {
    long passed = 0, failed = 0;
};

void report(const Gemm& gemm, Weights kind, std::int64_t outputs, std::int64_t inputs, int rows,
            const std::string& what, Tally& tally) {
    if (++tally.failed > 20) return;
    std::printf("%s: K %lld, O %lld, weights %s, %d rows: %s\n", gemm.name, static_cast<long long>(inputs),
                static_cast<long long>(outputs), NAMES[kind], rows, what.c_str());
}

// Checks one weight matrix with several numbers of rows.
void check(const Gemm& any, Weights kind, std::int64_t outputs, std::int64_t inputs, const std::vector<int>& counts,
           Random& random, Tally& tally) {
    const std::vector<std::int8_t> w = make_weights(kind, outputs, inputs, random);
    const Gemm& gemm = *gemm_for_weights(&any, w.data(), outputs * inputs);
    // Random, all-255 and all-0 rows in one block. Nothing follows the last row, so that sanitizers see a read past it.
    const std::int64_t stride = inputs + random.within(0, 3), rows = gemm.rows;
    std::vector<std::uint8_t> x(static_cast<std::size_t>((rows - 1) * stride + inputs), POISON);
    const std::int64_t turn = random.within(0, 2);
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t which = (r + turn) % 3;
        for (std::int64_t k = 0; k < inputs; ++k) {
            const std::int64_t value = which == 0 ? random.within(0, 255) : which == 1 ? 255 : 0;
            x[static_cast<std::size_t>(r * stride + k)] = static_cast<std::uint8_t>(value);
        }
    }
    const std::int64_t panels = (outputs + gemm.columns - 1) / gemm.columns, padded = panels * gemm.columns;
    std::vector<std::int32_t> expected(static_cast<std::size_t>(rows * padded));
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t o = 0; o < outputs; ++o) {
            std::int32_t sum = 0;
            for (std::int64_t k = 0; k < inputs; ++k) {
                sum += std::int32_t{x[static_cast<std::size_t>(r * stride + k)]} *
                       w[static_cast<std::size_t>(o * inputs + k)];
            }
            expected[static_cast<std::size_t>(r * padded + o)] = sum;
        }
    }

    const std::unique_ptr<PackedWeights> packed = gemm.pack_weights(w.data(), outputs, inputs);
    const std::size_t bytes = gemm.block_bytes(inputs);
    constexpr std::size_t GUARD = 64;
    AlignedVector<std::uint8_t> block(bytes + GUARD);
    AlignedVector<std::int32_t> acc(MAX_TILE + GUARD);
    for (const int count : counts) {
        std::fill(block.begin(), block.end(), POISON);
        gemm.pack_rows(x.data(), stride, count, inputs, block.data());
        if (std::any_of(block.begin() + static_cast<std::ptrdiff_t>(bytes), block.end(),
                        [](std::uint8_t b) { return b != POISON; })) {
            report(gemm, kind, outputs, inputs, count, "pack_rows wrote past block_bytes", tally);
            continue;
        }
        std::string problem;
        for (std::int64_t panel = 0; panel < panels && problem.empty(); ++panel) {
            std::fill(acc.begin(), acc.end(), POISON_ACC);
            packed->multiply(panel, block.data(), count, acc.data());
            const std::int64_t tile = std::int64_t{count} * gemm.columns;
            for (std::int64_t i = 0; i < tile && problem.empty(); ++i) {
                const std::int64_t r = i / gemm.columns, c = panel * gemm.columns + i % gemm.columns;
                const std::int32_t found = acc[static_cast<std::size_t>(i)],
                                   wanted = expected[static_cast<std::size_t>(r * padded + c)];
                if (found == wanted) continue;
                problem = "row " + std::to_string(r) + ", column " + std::to_string(c) + ": found " +
                          std::to_string(found) + ", expected " + std::to_string(wanted);
            }
            if (problem.empty() &&
                std::any_of(acc.begin() + tile, acc.end(), [](std::int32_t a) { return a != POISON_ACC; })) {
                problem = "multiply wrote past its tile";
            }
        }
        if (problem.empty()) {
            ++tally.passed;
        } else {
            report(gemm, kind, outputs, inputs, count, problem, tally);
        }
    }
}

Tally check_gemm(const Gemm& gemm) {
    Tally tally;
    if (gemm.rows * gemm.columns > MAX_TILE) {
        std::printf("%s: the tile is larger than MAX_TILE\n", gemm.name);
        ++tally.failed;
        return tally;
    }
    Random random(0x9e3779b97f4a7c15ull);
    std::vector<int> every, some = {1, 2, gemm.rows - 1, gemm.rows};
    for (int count = 1; count <= gemm.rows; ++count) every.push_back(count);
    some.erase(std::unique(some.begin(), some.end()), some.end());
    std::vector<std::int64_t> outputs = {33, 64};
    for (std::int64_t o = 1; o <= 20; ++o) outputs.push_back(o);
    for (const std::int64_t o : outputs) {
        for (int kind = 0; kind < KINDS; ++kind) {
            for (std::int64_t k = 1; k <= 40; ++k) check(gemm, static_cast<Weights>(kind), o, k, every, random, tally);
            for (const std::int64_t k : {63, 64, 192, 193, 768, 769, 1536, 3072, 3080}) {
                check(gemm, static_cast<Weights>(kind), o, k, some, random, tally);
            }
        }
    }
    return tally;
}

struct Entry {
    const char* label;
    const Gemm* gemm;
    bool runs;
};

}  // namespace

int main(int argc, char** argv) {
    const CpuFeatures cpu = cpu_features();
    const Entry entries[] = {
        {"scalar", gemm_scalar(), true},
        {"avx2", gemm_avx2(), cpu.avx2},
        {"avx_vnni", gemm_avx_vnni(), cpu.avx_vnni},
        {"avx512_vnni", gemm_avx512_vnni(), cpu.avx512_vnni},
        {"avx512_vnni_prefetch", gemm_avx512_vnni_prefetch(), cpu.avx512_vnni},
#if !defined(__wasm__)
        {"avx_vnni_shim", gemm_avx_vnni_shim(), true},
        {"avx512_vnni_shim", gemm_avx512_vnni_shim(), true},
        {"avx512_vnni_prefetch_shim", gemm_avx512_vnni_prefetch_shim(), true},
#endif
        {"neon", gemm_neon(), cpu.neon},
        {"neon_dotprod", gemm_neon_dotprod(), cpu.neon_dotprod},
        {"neon_i8mm", gemm_neon_i8mm(), cpu.neon_i8mm},
#if defined(__wasm__)
        {"simd128", gemm_simd128(), true},
        {"relaxed_simd", gemm_relaxed_simd(), true},
#endif
    };
    Tally all;
    for (const Entry& entry : entries) {
        if (argc > 1 &&
            std::none_of(argv + 1, argv + argc, [&](const char* name) { return std::strcmp(name, entry.label) == 0; }))
            continue;
        if (entry.gemm == nullptr || !entry.runs) {
            std::printf("%s: not run, %s\n", entry.label,
                        entry.gemm == nullptr ? "not in this build" : "not on this CPU");
            continue;
        }
        const Tally tally = check_gemm(*entry.gemm);
        std::printf("%s: %ld passed, %ld failed\n", entry.label, tally.passed, tally.failed);
        all.passed += tally.passed, all.failed += tally.failed;
    }
    std::printf("%ld passed, %ld failed\n", all.passed, all.failed);
    return all.failed == 0 && all.passed > 0 ? 0 : 1;
}
