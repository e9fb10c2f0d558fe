// RoIAlign on random and extreme boxes, scalar on one thread beside AVX2 on several: made for sanitizers, which see
// every access and overflow. Bits are compared with numpy's in tests/detect. Exits with 1 where something differs.
#include "fqvit/roialign.h"

#include <cstdio>
#include <random>

#include "fqvit/cpu.h"

namespace {

using namespace fqvit;

class Random {
public:
    std::int64_t within(std::int64_t lo, std::int64_t hi) {
        return std::uniform_int_distribution<std::int64_t>(lo, hi)(source_);
    }

private:
    std::mt19937_64 source_{1};
};

// Extreme rounds have the longest maps, of 255s, and the largest multiplier.
bool same(Random& random, bool extreme, bool avx2) {
    const bool tall = random.within(0, 1) == 1;
    const std::int64_t height = extreme && tall ? Alignment::CELLS : random.within(1, 40);
    const std::int64_t width = extreme && !tall ? Alignment::CELLS : random.within(1, 40);
    const std::int64_t channels = random.within(1, extreme ? 2 : 40), count = random.within(0, 12),
                       side = random.within(1, 16);
    std::vector<std::uint8_t> map(static_cast<std::size_t>(height * width * channels), 255);
    if (!extreme) {
        for (std::uint8_t& code : map) code = static_cast<std::uint8_t>(random.within(0, 255));
    }
    const std::int64_t reach = std::int64_t{1} << random.within(8, 24), cell = std::int64_t{1} << random.within(8, 18);
    std::vector<std::int64_t> boxes(static_cast<std::size_t>(4 * count));
    for (std::int64_t& edge : boxes) edge = random.within(-reach, reach);
    std::vector<std::uint8_t> one(static_cast<std::size_t>(count * side * side * channels)), other(one.size());
    const auto zero = static_cast<std::int32_t>(extreme ? 0 : random.within(0, 255));
    const auto shift = static_cast<int>(random.within(1, 62));
    Alignment a{map.data(),   height, width, channels,  zero,
                boxes.data(), count,  side,  cell,      (std::int64_t{1} << 31) - 1,
                shift,        9,      255,   one.data()};
    check_alignment(a);
    roi_align(a, 1, false);
    a.y = other.data();
    roi_align(a, 3, avx2);
    return one == other;
}

}  // namespace

int main() {
    Random random;
    const bool avx2 = cpu_features().avx2;
    int passed = 0, failed = 0;
    for (int round = 0; round < 300; ++round) (same(random, round % 25 == 0, avx2) ? passed : failed) += 1;
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
