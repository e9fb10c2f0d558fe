// Packing for dot-product instructions, which multiply groups of adjacent bytes: four, called a quad, in most
// instruction sets, and eight for usmmla.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/aligned.h"
#include "core/memory_size.h"

namespace fqvit {

// Packs w [O, K] into panels of `columns` outputs, [K / size][columns][size] each: the groups k..k + size - 1 of all
// columns are next to each other. Pads K to a multiple of `step` and O to a multiple of `columns`, with zeros.
template <int size>
AlignedVector<std::int8_t> pack_groups(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs,
                                       std::int64_t columns, std::int64_t step) {
    const std::int64_t panel = round_up(inputs, step) * columns;  // bytes
    AlignedVector<std::int8_t> packed(memory_size((outputs + columns - 1) / columns * panel));
    for (std::int64_t o = 0; o < outputs; ++o) {
        std::int8_t* to = packed.data() + o / columns * panel + o % columns * size;
        const std::int8_t* from = w + o * inputs;
        for (std::int64_t k = 0; k < inputs; k += size, to += size * columns) {
            std::memcpy(to, from + k, static_cast<std::size_t>(std::min<std::int64_t>(size, inputs - k)));
        }
    }
    return packed;
}

// The inverse of pack_quads.
inline std::vector<std::int8_t> unpack_quads(const AlignedVector<std::int8_t>& packed, std::int64_t outputs,
                                             std::int64_t inputs, std::int64_t columns) {
    const std::int64_t panel = (inputs + 3) / 4 * 4 * columns;
    std::vector<std::int8_t> w(static_cast<std::size_t>(outputs * inputs));
    for (std::int64_t o = 0; o < outputs; ++o) {
        const std::int8_t* from = packed.data() + o / columns * panel + o % columns * 4;
        std::int8_t* to = w.data() + o * inputs;
        for (std::int64_t k = 0; k < inputs; k += 4, from += 4 * columns) {
            std::memcpy(to + k, from, static_cast<std::size_t>(std::min<std::int64_t>(4, inputs - k)));
        }
    }
    return w;
}

inline AlignedVector<std::int8_t> pack_quads(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs,
                                             std::int64_t columns) {
    return pack_groups<4>(w, outputs, inputs, columns, 4);
}

}  // namespace fqvit
