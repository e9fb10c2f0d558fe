// The ops that move values without changing them: take, permute, concat.
#include <algorithm>
#include <cstring>

#include "ops/ops.h"
#include "ops/record.h"

namespace fqvit {
namespace {

const Value& require_movable(const Value& value) {
    require(value.is_codes() || value.dtype == DType::i32, "input: ", value.dtype, ", expected u8, u16 or i32");
    return value;
}

// Clears the facts about whole rows of attention codes, which do not hold for rows of moved values. mask_code is used
// only together with row_code. `masked` stays: it says what a code means, wherever the code is moved.
void forget_rows(Value& value) { value.row_sum = -1, value.row_code = -1, value.mask_code = -1; }

class Concat final : public Op {
public:
    Concat(const Record& record, const Scope& scope) {
        require(!record.inputs.empty() && record.ints.empty() && record.arrays.empty(),
                "record: ", record.inputs.size(), " inputs, ", record.ints.size(), " integers and ",
                record.arrays.size(), " arrays, expected 1 or more, 0 and 0");
        bool has_buffer = false;
        for (std::size_t i = 0; i < record.inputs.size(); ++i) {
            const Value& x = require_movable(value_input(record, scope, i));
            require(x.shape.size() == 2, "input ", i, ": shape ", x.shape, ", expected [T, C]");
            if (i == 0) {
                value = x;
                forget_rows(value);
            } else {
                require(x.dtype == value.dtype && x.channels() == value.channels(), "input ", i, ": ", x.dtype, " ",
                        x.shape, ", expected ", value.dtype, " with ", value.channels(), " channels");
                value.shape[0] += x.shape[0];
                value.lo = std::min(value.lo, x.lo), value.hi = std::max(value.hi, x.hi);
                value.masked = value.masked || x.masked;
            }
            sizes_.push_back(static_cast<std::size_t>(x.bytes()));
            has_buffer = has_buffer || !scope.is_constant[static_cast<std::size_t>(record.inputs[i])];
        }
        require(has_buffer, "inputs: constants only, expected at least one buffer");
    }

    std::int64_t items() const override { return static_cast<std::int64_t>(sizes_.size()); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        std::uint8_t* y = frame[output];
        for (std::size_t i = 0; i < static_cast<std::size_t>(end); y += sizes_[i], ++i) {
            if (i >= static_cast<std::size_t>(begin)) std::memcpy(y, frame[inputs[i]], sizes_[i]);
        }
    }

private:
    std::vector<std::size_t> sizes_;  // bytes of each input
};

}  // namespace

Take::Take(const Record& record, const Scope& scope) {
    require_fields(record, 1, 0, 2);
    const Value& x = require_movable(buffer_input(record, scope, 0));
    require(x.shape.size() >= 2, "input 0: shape ", x.shape, ", expected at least 2 axes");
    const Array& rows = record.arrays[0];
    require(rows.dtype == DType::i32 && rows.shape.size() < MAX_AXES && count_of(rows) > 0, "index: ", rows.dtype, " ",
            rows.shape, ", expected i32 with at most ", MAX_AXES - 1, " axes, none empty");
    index = read_as<std::int32_t>(rows, -1, x.rows() - 1, "index");
    const std::vector<std::int32_t> codes = read_channels(record.arrays[1], x.channels(), x.lo, x.hi, "fill");
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
    forget_rows(value);
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
    require_fields(record, 1, 0, 4);
    const Value& x = require_movable(buffer_input(record, scope, 0));
    const auto sizes_of = [&](std::size_t i, const char* name) {
        return read_integers(record.arrays[i], 0, MAX_ELEMENTS, name);
    };
    view = sizes_of(0, "view"), perm = sizes_of(1, "perm"), select = sizes_of(3, "select");
    Shape shape = sizes_of(2, "shape");
    require(!view.empty() && view.size() <= MAX_AXES && elements(view) == x.count(), "view: ", view, ", expected 1 to ",
            MAX_AXES, " axes and ", x.count(), " elements");
    Shape sizes = view, strides(view.size());
    std::int64_t stride = size_of(x.dtype);
    for (std::size_t axis = view.size(); axis-- > 0; stride *= view[axis]) strides[axis] = stride;
    first_ = 0;
    if (!select.empty()) {
        require(select.size() == 2 && select[0] < static_cast<std::int64_t>(view.size()) &&
                    select[1] < view[static_cast<std::size_t>(select[0])],
                "select: ", select, ", expected an axis of ", view, " and an index in it");
        first_ = select[1] * strides[static_cast<std::size_t>(select[0])];
        sizes.erase(sizes.begin() + select[0]), strides.erase(strides.begin() + select[0]);
    }
    Shape sorted = perm;
    std::sort(sorted.begin(), sorted.end());
    bool is_permutation = perm.size() == sizes.size() && !perm.empty();
    for (std::size_t i = 0; is_permutation && i < sorted.size(); ++i) {
        is_permutation = sorted[i] == static_cast<std::int64_t>(i);
    }
    require(is_permutation, "perm: ", perm, ", expected a permutation of ", sizes.size(), " axes");
    Shape permuted;
    for (const std::int64_t axis : perm) {
        permuted.push_back(sizes[static_cast<std::size_t>(axis)]);
        sizes_.push_back(sizes[static_cast<std::size_t>(axis)]);
        strides_.push_back(strides[static_cast<std::size_t>(axis)]);
    }
    // Trailing axes that are contiguous in memory are copied at once.
    contiguous_ = size_of(x.dtype);
    while (!sizes_.empty() && strides_.back() == contiguous_) {
        contiguous_ *= sizes_.back();
        sizes_.pop_back(), strides_.pop_back();
    }
    outer_ = 1;
    for (const std::int64_t size : sizes_) outer_ *= size;
    if (shape.empty()) shape = permuted;
    require(elements(shape) == elements(permuted), "shape: ", shape, ", expected ", elements(permuted), " elements");
    value = x;
    forget_rows(value);
    value.shape = shape;
}

void Permute::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const std::uint8_t* x = frame[inputs[0]] + first_;
    std::uint8_t* y = frame[output] + begin * contiguous_;
    for (std::int64_t i = begin; i < end; ++i, y += contiguous_) {
        std::int64_t rest = i, from = 0;
        for (std::size_t axis = sizes_.size(); axis-- > 0; rest /= sizes_[axis]) {
            from += rest % sizes_[axis] * strides_[axis];
        }
        std::memcpy(y, x + from, static_cast<std::size_t>(contiguous_));
    }
}

std::unique_ptr<Op> make_concat(const Record& record, const Scope& scope) {
    return std::make_unique<Concat>(record, scope);
}

}  // namespace fqvit
