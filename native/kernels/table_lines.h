// A compact form of a smooth table of 1024 u8 entries, such as that of GELU, for CPUs on which lookups in large tables
// are slow. Segment s is the entries 16 * s .. 16 * s + 15, and
//     entry[16 * s + i] = clamp(base[s] + ((slope[s] * i) >> 4) + bit[s][i], 0, 255)
// with a slope in -64..63, a base in -128..383 and a correction of 0 or 1. Exact because make_table_lines checks every
// entry.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fqvit {

struct TableLines {
    static constexpr std::int64_t LENGTH = 1024;
    static constexpr int LEAST_BASE = -128, BASE_BITS = 9;
    alignas(64) std::uint16_t line[64];  // slope * 2^BASE_BITS + base - LEAST_BASE
    alignas(64) std::uint16_t bits[64];  // bit i: the correction of entry i
};

// Returns whether 16 entries have this form with this slope, and if so, sets the words of their segment.
inline bool fit_segment(const std::uint8_t* entries, int slope, std::uint16_t& line, std::uint16_t& bits) {
    int least = TableLines::LEAST_BASE, most = least + (1 << TableLines::BASE_BITS) - 1;  // of the base
    if (slope < -64 || slope > 63) return false;
    for (int i = 0; i < 16; ++i) {
        // The line is one or zero below an entry. Any line below 0 or above 255 gives an entry of 0 or 255.
        const int entry = entries[i], rise = (slope * i) >> 4;
        if (entry > 0) least = std::max(least, entry - 1 - rise);
        if (entry < 255) most = std::min(most, entry - rise);
    }
    if (least > most) return false;
    bits = 0;
    for (int i = 0; i < 16; ++i) {
        bits = static_cast<std::uint16_t>(bits | (entries[i] > least + ((slope * i) >> 4) ? 1 : 0) << i);
    }
    line = static_cast<std::uint16_t>(slope * (1 << TableLines::BASE_BITS) + least - TableLines::LEAST_BASE);
    return true;
}

// Returns whether a table of 1024 entries has this form, and if so, sets `out`.
inline bool make_table_lines(const std::uint8_t* table, TableLines& out) {
    for (int s = 0; s < 64; ++s) {
        const std::uint8_t* entries = table + 16 * s;
        const int rise = (entries[15] - entries[0]) * 16 / 15;
        bool fits = false;
        for (int change = 0; change < 128 && !fits; ++change) {
            fits = fit_segment(entries, rise + change, out.line[s], out.bits[s]) ||
                   fit_segment(entries, rise - change, out.line[s], out.bits[s]);
        }
        if (!fits) return false;
    }
    return true;
}

}  // namespace fqvit
