#include "core/head_layout.h"

#include <array>

namespace fqvit {
namespace {

struct Axis {
    std::int64_t size, stride;
};

// Splits and merges axes so that they have the sizes of an operand, without moving an element.
std::optional<HeadLayout> regroup(const std::vector<Axis>& axes, std::int64_t offset, const HeadSizes& sizes) {
    // Merge neighbours that form one contiguous range; axes of size 1 have no influence.
    std::vector<Axis> merged;
    for (const Axis& axis : axes) {
        if (axis.size == 1) continue;
        if (!merged.empty() && merged.back().stride == axis.size * axis.stride) {
            merged.back() = {merged.back().size * axis.size, axis.stride};
        } else {
            merged.push_back(axis);
        }
    }
    const std::array<std::int64_t, 4> wanted = {sizes.windows, sizes.heads, sizes.tokens, sizes.width};
    std::array<std::int64_t, 4> strides{};
    std::int64_t left = 1, stride = 0;  // remaining size and stride of the merged axis that is being split
    for (std::size_t i = wanted.size(); i-- > 0;) {
        if (wanted[i] == 1) continue;
        if (left == 1) {
            if (merged.empty()) return std::nullopt;
            left = merged.back().size, stride = merged.back().stride;
            merged.pop_back();
        }
        if (left % wanted[i] != 0) return std::nullopt;
        strides[i] = stride;
        left /= wanted[i], stride *= wanted[i];
    }
    if (sizes.width > 1 && strides[3] != 1) return std::nullopt;
    return HeadLayout{offset, strides[0], strides[1], strides[2]};
}

Shape contiguous_strides(const Shape& shape) {
    Shape strides(shape.size());
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
    return strides;
}

}  // namespace

HeadSizes HeadSizes::of(const Shape& shape) {
    const std::size_t lead = shape.size() - 3;
    std::int64_t windows = 1;
    for (std::size_t i = 0; i < lead; ++i) windows *= shape[i];
    return {windows, shape[lead], shape[lead + 1], shape[lead + 2]};
}

HeadLayout HeadLayout::contiguous(const HeadSizes& sizes) {
    const std::int64_t head = sizes.tokens * sizes.width;
    return {0, sizes.heads * head, head, sizes.width};
}

std::optional<HeadLayout> HeadLayout::before(const Permute& split, const HeadSizes& sizes) {
    Shape view = split.view, strides = contiguous_strides(view);
    std::int64_t offset = 0;
    if (!split.select.empty()) {
        offset = split.select[1] * strides[static_cast<std::size_t>(split.select[0])];
        view.erase(view.begin() + split.select[0]), strides.erase(strides.begin() + split.select[0]);
    }
    std::vector<Axis> axes;
    for (const std::int64_t axis : split.perm) {
        axes.push_back({view[static_cast<std::size_t>(axis)], strides[static_cast<std::size_t>(axis)]});
    }
    return regroup(axes, offset, sizes);
}

std::optional<HeadLayout> HeadLayout::after(const Permute& join, const HeadSizes& sizes) {
    if (!join.select.empty()) return std::nullopt;
    Shape permuted;
    for (const std::int64_t axis : join.perm) permuted.push_back(join.view[static_cast<std::size_t>(axis)]);
    const Shape strides = contiguous_strides(permuted);
    std::vector<Axis> axes(join.view.size());
    for (std::size_t i = 0; i < join.perm.size(); ++i) {
        axes[static_cast<std::size_t>(join.perm[i])] = {permuted[i], strides[i]};
    }
    return regroup(axes, 0, sizes);
}

}  // namespace fqvit
