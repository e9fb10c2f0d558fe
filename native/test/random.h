// Random numbers for tests: xorshift64*, the same on every platform.
#pragma once

#include <cstdint>

namespace fqvit {

class Random {
public:
    // seed: must not be 0; with 0, within() would always return lo.
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // Uniform in lo..hi, for hi - lo < 2^32.
    std::int64_t within(std::int64_t lo, std::int64_t hi) {
        state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
        const std::uint64_t bits = (state_ * 0x2545f4914f6cdd1dull) >> 32;
        return lo + static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(hi - lo + 1));
    }

private:
    std::uint64_t state_;
};

}  // namespace fqvit
