// The ops that move values and change none: take, permute, concat.
#include <algorithm>
#include <cstring>

#include "ops/ops.h"

namespace fqvit {
namespace {

const Value& movable(const Value& value) {
    need(value.is_codes() || value.dtype == DType::i32, "moves values of another type");
    return value;
}

class Concat final : public Op {
public:
    Concat(const Record& record, const Scope& scope) {
        need(!record.inputs.empty() && record.ints.empty() && record.arrays.empty(), "a field is missing");
        bool buffer = false;
        for (std::size_t i = 0; i < record.inputs.size(); ++i) {
            const Value& x = movable(any_input(record, scope, i));
            need(x.shape.size() == 2, "joins values that are not [T, C]");
            if (i == 0) {
                value = x;
                value.row_sum = -1, value.row_code = -1, value.mask_code = -1;
            } else {
                need(x.dtype == value.dtype && x.channels() == value.channels(), "joins values that do not fit");
                value.shape[0] += x.shape[0];
                value.lo = std::min(value.lo, x.lo), value.hi = std::max(value.hi, x.hi);
                value.masked = value.masked || x.masked;
            }
            sizes_.push_back(static_cast<std::size_t>(x.bytes()));
            buffer = buffer || !scope.constant[static_cast<std::size_t>(record.inputs[i])];
        }
        need(buffer, "joins no buffer");
    }

    std::int64_t items() const override { return static_cast<std::int64_t>(sizes_.size()); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        std::uint8_t* y = frame[output];
        for (std::size_t i = 0; i < static_cast<std::size_t>(end); y += sizes_[i], ++i) {
            if (i >= static_cast<std::size_t>(begin)) std::memcpy(y, frame[inputs[i]], sizes_[i]);
        }
    }

private:
    std::vector<std::size_t> sizes_;
};

}  // namespace

Take::Take(const Record& record, const Scope& scope) {
    shape_of_record(record, 1, 0, 2);
    const Value& x = movable(buffer_input(record, scope, 0));
    need(x.shape.size() >= 2, "an input has too few axes");
    const Array& rows = record.arrays[0];
    need(rows.dtype == DType::i32 && rows.shape.size() < MAX_AXES && count_of(rows) > 0, "index must be i32");
    for (const std::int64_t i : integers(rows, -1, x.rows() - 1, "index"))
        index.push_back(static_cast<std::int32_t>(i));
    const std::vector<std::int32_t> codes = channels_of(record.arrays[1], x.channels(), x.lo, x.hi, "fill");
    fill.resize(static_cast<std::size_t>(x.channels() * size_of(x.dtype)));
    for (std::size_t c = 0; c < codes.size(); ++c) {
        switch (x.dtype) {
            case DType::u8: fill[c] = static_cast<std::uint8_t>(codes[c]); break;
            case DType::u16: {
                const auto code = static_cast<std::uint16_t>(codes[c]);
                std::memcpy(fill.data() + 2 * c, &code, 2);
                break;
            }
            default: std::memcpy(fill.data() + 4 * c, &codes[c], 4);
        }
    }
    value = x;
    value.row_sum = -1, value.row_code = -1, value.mask_code = -1;  // rows of attention are no longer known
    value.shape = rows.shape;
    value.shape.push_back(x.channels());
}

void Take::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    gather(frame[inputs[0]], begin, end, frame[output] + static_cast<std::size_t>(begin) * fill.size());
}

void Take::gather(const std::uint8_t* x, std::int64_t begin, std::int64_t end, std::uint8_t* y) const {
    const std::size_t row = fill.size();
    for (std::int64_t i = begin; i < end; ++i, y += row) {
        const std::int32_t from = index[static_cast<std::size_t>(i)];
        std::memcpy(y, from < 0 ? fill.data() : x + static_cast<std::size_t>(from) * row, row);
    }
}

Permute::Permute(const Record& record, const Scope& scope) {
    shape_of_record(record, 1, 0, 4);
    const Value& x = movable(buffer_input(record, scope, 0));
    const auto small = [&](std::size_t i) { return integers(record.arrays[i], 0, MAX_ELEMENTS, "permute"); };
    view = small(0), perm = small(1), select = small(3);
    Shape shape = small(2);
    need(!view.empty() && view.size() <= MAX_AXES && elements(view) == x.count(), "view does not fit");
    Shape sizes = view, strides(view.size());
    std::int64_t stride = size_of(x.dtype);
    for (std::size_t axis = view.size(); axis-- > 0; stride *= view[axis]) strides[axis] = stride;
    first_ = 0;
    if (!select.empty()) {
        need(select.size() == 2 && select[0] < static_cast<std::int64_t>(view.size()), "select is outside the view");
        const auto axis = static_cast<std::size_t>(select[0]);
        need(select[1] < view[axis], "select is outside the view");
        first_ = select[1] * strides[axis];
        sizes.erase(sizes.begin() + select[0]), strides.erase(strides.begin() + select[0]);
    }
    Shape sorted = perm;
    std::sort(sorted.begin(), sorted.end());
    need(perm.size() == sizes.size() && !perm.empty(), "perm does not fit");
    for (std::size_t i = 0; i < sorted.size(); ++i)
        need(sorted[i] == static_cast<std::int64_t>(i), "perm is no permutation");
    Shape moved;
    for (const std::int64_t axis : perm) {
        moved.push_back(sizes[static_cast<std::size_t>(axis)]);
        sizes_.push_back(sizes[static_cast<std::size_t>(axis)]);
        strides_.push_back(strides[static_cast<std::size_t>(axis)]);
    }
    // Trailing axes that lie together in memory are copied in one run.
    run_ = size_of(x.dtype);
    while (!sizes_.empty() && strides_.back() == run_) {
        run_ *= sizes_.back();
        sizes_.pop_back(), strides_.pop_back();
    }
    outer_ = 1;
    for (const std::int64_t size : sizes_) outer_ *= size;
    if (shape.empty()) shape = moved;
    need(elements(shape) == elements(moved), "shape does not fit");
    value = x;
    value.row_sum = -1, value.row_code = -1, value.mask_code = -1;
    value.shape = shape;
}

void Permute::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const std::uint8_t* x = frame[inputs[0]] + first_;
    std::uint8_t* y = frame[output] + begin * run_;
    for (std::int64_t i = begin; i < end; ++i, y += run_) {
        std::int64_t rest = i, from = 0;
        for (std::size_t axis = sizes_.size(); axis-- > 0; rest /= sizes_[axis])
            from += rest % sizes_[axis] * strides_[axis];
        std::memcpy(y, x + from, static_cast<std::size_t>(run_));
    }
}

std::unique_ptr<Op> make_concat(const Record& record, const Scope& scope) {
    return std::make_unique<Concat>(record, scope);
}

}  // namespace fqvit
