// Powers of two in fixed point, from three integer tables; softmax and sigmoid of base-2 logits. The
// results equal those of src/fqvit/detect/fixed/exp.py, which has the error bounds.
#pragma once

#include <array>
#include <cstdint>

#include "core/fixed.h"
#include "detect/constants.h"

namespace fqvit {

constexpr int MANTISSA_FRACTION = 30;

// 2^x = mantissa * 2^exponent, with the mantissa in units of 2^-30.
struct Power {
    std::int64_t mantissa, exponent;
};

// Returns 2^x. x: in units of 2^-27
Power power_of_two(std::int64_t x);

// Computes the scores of one row, in units of 2^-24. logits: base-2 logits [count] in units of 2^-27, |logit| < 2^61
// powers: scratch [count]
void softmax(const std::int64_t* logits, std::int64_t count, std::int64_t* powers, std::int32_t* scores);

// Returns the sigmoid in units of 2^-15 of a base-2 logit in units of 2^-27, |logit| <= 2^62.
std::int64_t sigmoid(std::int64_t logit);

}  // namespace fqvit
