// The ops that move values without changing them: take, permute, concat.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ops/ops.h"

namespace fqvit {
namespace {

constexpr std::initializer_list<DType> MOVABLE = {DType::u8, DType::u16, DType::i32};

// Clears the facts about whole rows of attention codes, which no longer hold after values have been moved. mask_code is
// used only together with row_code. `masked` is kept: it describes single codes, wherever they are moved.
void forget_rows(Value& value) { value.row_sum = -1, value.row_code = -1, value.mask_code = -1; }

class Concat final : public Op {
public:
    Concat(const ConcatFields& fields, Scope& scope) {
        const bool has_buffer = std::any_of(fields.xs.begin(), fields.xs.end(),
                                            [&](const std::string& name) { return scope.is_buffer(name); });
        require(has_buffer, "concatenates only constants, expected at least one buffer");
        for (const std::string& name : fields.xs) {
            const Operand input = scope.buffer_or_constant(name, MOVABLE);
            const Value& x = input.value;
            require(x.shape.size() == 2, "'", name, "' has shape ", x.shape, ", expected [T, C]");
            if (inputs.empty()) {
                value = x;
                forget_rows(value);
            } else {
                require(x.dtype == value.dtype && x.channels() == value.channels(), "'", name,
                        "' does not match the dtype and channels of '", fields.xs[0], "'");
                value.shape[0] += x.shape[0];
                value.lo = std::min(value.lo, x.lo), value.hi = std::max(value.hi, x.hi);
                value.masked = value.masked || x.masked;
            }
            inputs.push_back(input.number);
            sizes_.push_back(static_cast<std::size_t>(x.bytes()));
        }
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

Take::Take(const TakeFields& fields, Scope& scope) {
    const Operand input = scope.buffer(fields.x, MOVABLE, 2);
    const Value& x = input.value;
    inputs = {input.number};
    const Constant rows = scope.constant(fields.index, {DType::i32});
    index = read_as<std::int32_t>(rows, -1, x.rows() - 1, "index");
    const std::vector<std::int32_t> codes = scope.zeros(fields.fill, x.channels(), x.lo, x.hi, "fill");
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

Permute::Permute(const PermuteFields& fields, Scope& scope) : view(fields.view), perm(fields.perm) {
    const Operand input = scope.buffer(fields.x, MOVABLE);
    const Value& x = input.value;
    inputs = {input.number};
    if (fields.select.has_value()) select.assign(fields.select->begin(), fields.select->end());
    Shape shape = fields.shape;
    require(!view.empty() && view.size() <= MAX_AXES && elements(view) == x.count(), "view ", view, " does not fit ",
            x.shape);
    Shape sizes = view, strides(view.size());
    std::int64_t stride = size_of(x.dtype);
    for (std::size_t axis = view.size(); axis-- > 0; stride *= view[axis]) strides[axis] = stride;
    first_ = 0;
    if (!select.empty()) {
        require(select[0] >= 0 && select[0] < static_cast<std::int64_t>(view.size()) && select[1] >= 0 &&
                    select[1] < view[static_cast<std::size_t>(select[0])],
                "select ", select, " is outside the view ", view);
        first_ = select[1] * strides[static_cast<std::size_t>(select[0])];
        sizes.erase(sizes.begin() + select[0]), strides.erase(strides.begin() + select[0]);
    }
    Shape sorted = perm;
    std::sort(sorted.begin(), sorted.end());
    bool is_permutation = perm.size() == sizes.size();
    for (std::size_t i = 0; is_permutation && i < sorted.size(); ++i) {
        is_permutation = sorted[i] == static_cast<std::int64_t>(i);
    }
    require(is_permutation, "perm ", perm, " is not a permutation of ", sizes.size(), " axes");
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
    require(!shape.empty() && elements(shape) == elements(permuted), "shape ", shape, " does not fit ", permuted);
    value = x;
    forget_rows(value);
    value.shape = shape;
}

namespace {

// Copies `count` runs of `bytes` bytes that are `stride` bytes apart. Short runs are copied as integers: a call to
// memcpy with a variable size costs more than the copy itself.
void copy_runs(const std::uint8_t* x, std::int64_t stride, std::int64_t count, std::int64_t bytes, std::uint8_t* y) {
    const auto copy = [&](auto size) {
        for (std::int64_t i = 0; i < count; ++i)
            std::memcpy(y + i * static_cast<std::int64_t>(size()), x + i * stride, static_cast<std::size_t>(size()));
    };
    switch (bytes) {
        case 1: return copy(std::integral_constant<std::int64_t, 1>{});
        case 2: return copy(std::integral_constant<std::int64_t, 2>{});
        case 4: return copy(std::integral_constant<std::int64_t, 4>{});
        case 8: return copy(std::integral_constant<std::int64_t, 8>{});
        case 16: return copy(std::integral_constant<std::int64_t, 16>{});
        case 32: return copy(std::integral_constant<std::int64_t, 32>{});
        default: return copy([bytes] { return static_cast<std::size_t>(bytes); });
    }
}

}  // namespace

void Permute::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const std::uint8_t* x = frame[inputs[0]] + first_;
    std::uint8_t* y = frame[output] + begin * contiguous_;
    if (sizes_.empty()) {  // one run: a reshape
        std::memcpy(y, x, static_cast<std::size_t>((end - begin) * contiguous_));
        return;
    }
    const std::int64_t last = sizes_.back(), stride = strides_.back();
    for (std::int64_t i = begin; i < end;) {
        const std::int64_t first = i % last, count = std::min(last - first, end - i);
        std::int64_t rest = i / last, from = first * stride;
        for (std::size_t axis = sizes_.size() - 1; axis-- > 0; rest /= sizes_[axis]) {
            from += rest % sizes_[axis] * strides_[axis];
        }
        copy_runs(x + from, stride, count, contiguous_, y);
        i += count, y += count * contiguous_;
    }
}

std::unique_ptr<Op> make_concat(const ConcatFields& fields, Scope& scope) {
    return std::make_unique<Concat>(fields, scope);
}

}  // namespace fqvit
