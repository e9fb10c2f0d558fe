#include "core/peak.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "core/aligned.h"
#include "core/dispatch.h"

namespace fqvit {
namespace {

constexpr std::size_t CACHE_BYTES = 24 << 10;  // less than any L1 data cache of a supported CPU
constexpr std::chrono::microseconds MOMENT{200}, TOTAL{30000};

}  // namespace

Peak measure_peak(const std::string& instruction_set) {
    using Clock = std::chrono::steady_clock;
    const KernelSet set = select_kernels(instruction_set);
    const Gemm& gemm = *set.gemm;
    std::int64_t inputs = 1024;
    std::unique_ptr<PackedWeights> weights;
    for (;; inputs /= 2) {
        // Small weights: no sum of products can saturate 16 bits, so the AVX2 kernel uses its fastest instructions.
        std::vector<std::int8_t> w(static_cast<std::size_t>(gemm.columns * inputs));
        for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<std::int8_t>(static_cast<int>(i * 7 % 31) - 15);
        weights = gemm.pack_weights(w.data(), gemm.columns, inputs);
        if (inputs <= 64 || weights->bytes() + gemm.block_bytes(inputs) <= CACHE_BYTES) break;
    }
    std::vector<std::uint8_t> x(static_cast<std::size_t>(gemm.rows * inputs));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint8_t>(i * 37);
    AlignedVector<std::uint8_t> block(gemm.block_bytes(inputs) + 64);
    AlignedVector<std::int32_t> acc(MAX_TILE);
    gemm.pack_rows(x.data(), inputs, gemm.rows, inputs, block.data());
    const std::int64_t macs = std::int64_t{gemm.rows} * gemm.columns * inputs;
    std::int64_t best = 0;   // products per second
    std::int64_t calls = 1;  // per measurement; doubled until a measurement takes at least MOMENT
    for (const auto end = Clock::now() + TOTAL; best == 0 || Clock::now() < end;) {
        const auto start = Clock::now();
        for (std::int64_t i = 0; i < calls; ++i) weights->multiply(0, block.data(), gemm.rows, acc.data());
        const auto taken = Clock::now() - start;
        if (taken < MOMENT) {
            calls *= 2;
        } else {
            const std::int64_t nanoseconds = std::chrono::nanoseconds(taken).count();
            best = std::max(best, calls * macs * 1'000'000'000 / nanoseconds);  // fits: calls * macs is about 10^8
        }
    }
    return {set.name, best};
}

}  // namespace fqvit
