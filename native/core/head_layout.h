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

    // Returns the sizes of a shape [..., H, T, D].
    static HeadSizes of(const Shape& shape);
};

// Strides of an operand, in elements: element d of token t of head h of window w is at
// offset + w * window + h * head + t * token + d.
struct HeadLayout {
    std::int64_t offset, window, head, token;

    // Returns the layout of a contiguous buffer of shape [..., H, T, D].
    static HeadLayout contiguous(const HeadSizes& sizes);
    // Returns where the elements of the permute's output lie in its input buffer; no value if strides cannot express
    // it.
    static std::optional<HeadLayout> before(const Permute& split, const HeadSizes& sizes);
    // Returns where the elements of the permute's input lie in its output buffer; no value if strides cannot express
    // it.
    static std::optional<HeadLayout> after(const Permute& join, const HeadSizes& sizes);
};

}  // namespace fqvit
