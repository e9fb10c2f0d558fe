#include "ops/requantization.h"

#include <algorithm>

#include "ops/scope.h"

namespace fqvit {

RequantizationConstants::RequantizationConstants(std::vector<std::uint32_t> mult, std::vector<std::uint8_t> shift,
                                                 std::vector<std::int32_t> zero, std::int64_t last,
                                                 const std::int32_t* bias, std::int64_t bound)
    : mult_(std::move(mult)),
      shift_(std::move(shift)),
      zero_(std::move(zero)),
      last_(last),
      bound_(bound),
      form_(Requantization::HIGH_HALF) {
    constexpr std::size_t LANES = 8;
    const std::size_t channels = mult_.size(), padded = round_up(channels, LANES);
    zero_.resize(padded);
    vector_mult_.resize(padded), vector_half_.resize(padded), vector_shift_.resize(padded);
    for (std::size_t c = 0; c < channels; ++c) {
        int s = shift_[c];
        for (std::uint32_t m = mult_[c]; s < 32 && m < (1u << 30); m *= 2) ++s;
        lift_ = std::max(lift_, 32 - s);
    }
    const int most_shift = channels == 0 ? 0 : *std::max_element(shift_.begin(), shift_.end());
    if (bound >> (31 - lift_) != 0 || most_shift + lift_ > MAX_SHIFT) lift_ = 0;
    if (lift_ > 0) form_ = Requantization::LIFTED;
    for (std::size_t c = 0; c < channels; ++c) {
        // mult * 2^j / 2^(shift + j) is the same ratio. With a shift of 32 or more, the result is the high half of the
        // product.
        std::uint32_t m = mult_[c];
        int s = shift_[c];
        while (s < 32 && m < (1u << 30)) m *= 2, ++s;
        s += lift_;
        // Adding zero * 2^s before the shift equals adding the zero point after it. With |acc * mult| < 2^62, the
        // condition zero * 2^s < 2^60 keeps the sum below 2^63.
        if (s < 32 || (std::int64_t{zero_[c]} >> (60 - s > 0 ? 60 - s : 0)) > 0) form_ = Requantization::ANY;
        const std::int64_t zero_term = form_ == Requantization::ANY ? 0 : std::int64_t{zero_[c]} << s;
        const std::int64_t bias_term = bias == nullptr ? 0 : std::int64_t{bias[c]} * (std::int64_t{1} << lift_) * m;
        const std::size_t lane = c % LANES, even_first = c - lane + lane / 2 + (lane % 2) * (LANES / 2);
        vector_mult_[c] = static_cast<std::int32_t>(m);
        vector_shift_[c] = std::max(s - 32, 0);
        vector_half_[even_first] = (std::int64_t{1} << (s - 1)) + zero_term + bias_term;
    }
}

RequantizationConstants RequantizationConstants::reordered(const std::vector<std::int32_t>& order,
                                                           const std::int32_t* new_bias) const {
    return {fqvit::reordered(mult_, order),
            fqvit::reordered(shift_, order),
            fqvit::reordered(zero_, order),
            last_,
            new_bias,
            bound_};
}

Requantization RequantizationConstants::view() const {
    return {mult_.data(), shift_.data(),       zero_.data(),        static_cast<std::int32_t>(last_),
            form_,        vector_mult_.data(), vector_half_.data(), vector_shift_.data(),
            lift_};
}

std::size_t RequantizationConstants::bytes() const { return mult_.size() * (4 + 1 + 4 + 4 + 8 + 4); }

TensorRequantization tensor_requantization(std::int64_t mult, std::int64_t shift, std::int64_t zero, const Value& y,
                                           std::int64_t bound) {
    TensorRequantization q{};
    q.mult = in_range(mult, 0, MAX_MULT, "mult");
    q.shift = static_cast<int>(in_range(shift, 1, MAX_SHIFT, "shift"));
    q.zero = static_cast<std::int32_t>(in_range(zero, 0, y.hi, "y_zero"));
    q.last = static_cast<std::int32_t>(y.hi);
    q.wide = y.is_wide();
    // (acc * 2^i) * (mult * 2^j) / 2^(shift + i + j) is the same value.
    std::int64_t m = q.mult;
    int s = q.shift;
    for (; s < 32 && m < std::int64_t{1} << 30; ++s) m *= 2;
    for (; s < 32 && bound < std::int64_t{1} << 30; ++s) bound *= 2, ++q.lift;
    q.vector_mult = static_cast<std::int32_t>(m), q.vector_shift = s < 32 ? 0 : s;
    return q;
}

}  // namespace fqvit
