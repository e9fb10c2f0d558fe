#include "detect/exp.h"

#include <algorithm>

namespace fqvit {
namespace {

constexpr int TABLE_BITS = LOG_FRACTION / 3;  // each table is indexed by a third of the fraction bits
constexpr std::int64_t ONE = std::int64_t{1} << MANTISSA_FRACTION;
constexpr std::int64_t LOWEST = -(std::int64_t{64} << LOG_FRACTION);  // 2^-64 rounds to 0 in units of 2^-30

// An unsigned number in units of 2^-120, lowest word first: precise enough to round the tables correctly.
struct Wide {
    std::array<std::uint32_t, 4> words;
};

// Returns floor(a * b * 2^-120) for two numbers below 4.
constexpr Wide multiply(const Wide& a, const Wide& b) {
    std::array<std::uint32_t, 8> product{};
    for (std::size_t i = 0; i < 4; ++i) {
        std::uint64_t carry = 0;
        for (std::size_t j = 0; j < 4; ++j) {
            carry += std::uint64_t{a.words[i]} * b.words[j] + product[i + j];
            product[i + j] = static_cast<std::uint32_t>(carry);
            carry >>= 32;
        }
        product[i + 4] = static_cast<std::uint32_t>(carry);
    }
    Wide out{};
    for (std::size_t i = 0; i < 4; ++i) {  // >> 120 = 3 words and 24 bits
        out.words[i] = product[i + 3] >> 24 | product[i + 4] << 8;
    }
    return out;
}

using Table = std::array<std::uint32_t, 1 << TABLE_BITS>;  // entries are below 2^31

// Returns the powers of `step`, rounded to multiples of 2^-30.
constexpr Table make_table(const Wide& step) {
    Table table{};
    Wide power{{0, 0, 0, 1 << 24}};
    for (std::uint32_t& entry : table) {
        const std::uint64_t high = std::uint64_t{power.words[3]} << 32 | power.words[2];  // in units of 2^-56
        entry = static_cast<std::uint32_t>((high + (1 << 25)) >> 26);
        power = multiply(power, step);
    }
    return table;
}

// 2^(2^-9), 2^(2^-18) and 2^(2^-27) in units of 2^-120, from integer square roots of 2: see _table in exp.py.
constexpr Table HIGH = make_table({{0x94cf2f66, 0xa1ff19d2, 0x6da1c09e, 0x010058c8}});
constexpr Table MIDDLE = make_table({{0xacc017b7, 0x6ca4d7c8, 0x5c89d5ec, 0x0100002c}});
constexpr Table LOW = make_table({{0xaa2b219e, 0xf037df38, 0x162e42ff, 0x01000000}});

// Returns 2^x in units of 2^-30, for x <= 0 in units of 2^-27.
std::int64_t power_below_one(std::int64_t x) {
    const Power power = power_of_two(std::max(x, LOWEST));
    // round_shift needs a shift of at least 1. The mantissa is below 2^31, so it can be doubled.
    return round_shift(power.mantissa * 2, static_cast<int>(std::min<std::int64_t>(1 - power.exponent, 62)));
}

}  // namespace

Power power_of_two(std::int64_t x) {
    constexpr std::int64_t MASK = (1 << TABLE_BITS) - 1;
    const auto part = [&](const Table& table, int shift) {
        return std::int64_t{table[static_cast<std::size_t>(x >> shift & MASK)]};
    };
    std::int64_t mantissa = round_shift(part(HIGH, 2 * TABLE_BITS) * part(MIDDLE, TABLE_BITS), MANTISSA_FRACTION);
    mantissa = round_shift(mantissa * part(LOW, 0), MANTISSA_FRACTION);
    return {std::min(mantissa, 2 * ONE - 1), x >> LOG_FRACTION};
}

void softmax(const std::int64_t* logits, std::int64_t count, std::int64_t* powers, std::int32_t* scores) {
    const std::int64_t largest = *std::max_element(logits, logits + count);
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += powers[i] = power_below_one(logits[i] - largest);
    for (std::int64_t i = 0; i < count; ++i) {
        scores[i] = static_cast<std::int32_t>(round_divide(powers[i] << SCORE_FRACTION, sum));
    }
}

std::int64_t sigmoid(std::int64_t logit) {
    const std::int64_t power = power_below_one(logit < 0 ? logit : -logit);
    return round_divide((logit < 0 ? power : ONE) << MASK_FRACTION, power + ONE);
}

}  // namespace fqvit
