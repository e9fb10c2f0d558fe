// Where the elements of an attention operand lie in a buffer of bytes. Fusion uses it to read and write through the
// permutes that split and join heads.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/ops.h"

namespace fqvit {

// The sizes of an operand: W windows, H heads, T tokens, D head width. W is the product of all axes before H.
struct HeadSizes {
    std::int64_t windows, heads, tokens, width;

    // Of a shape [..., H, T, D].
    static HeadSizes of(const Shape& shape);
};

// Element d of token t of head h of window w is at offset + w window + h head + t token + d.
struct HeadLayout {
    std::int64_t offset, window, head, token;

    // Of a buffer of shape [..., H, T, D].
    static HeadLayout contiguous(const HeadSizes& sizes);
    // Of the output of a permute, in the input of that permute. No value if strides cannot describe it.
    static std::optional<HeadLayout> before(const Permute& split, const HeadSizes& sizes);
    // Of the input of a permute, in the output of that permute. No value if strides cannot describe it.
    static std::optional<HeadLayout> after(const Permute& join, const HeadSizes& sizes);
};

}  // namespace fqvit
