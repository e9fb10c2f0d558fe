// The ops multiply, rotary, depthwise and max.
#include "ops/elementwise.h"

#include <algorithm>
#include <cstring>

namespace fqvit {
namespace {

// y = clamp(requantize((a - a_zero) * (b - b_zero)) + y_zero). b is broadcast if it lacks leading axes of a.
class Multiply final : public Op {
public:
    Multiply(const MultiplyFields& fields, Scope& scope) : kernels_(scope.kernels.kernels->elementwise) {
        const Operand left = scope.codes(fields.a), right = scope.codes(fields.b);
        const Value &a = left.value, &b = right.value;
        inputs = {left.number, right.number};
        require(b.shape.size() <= a.shape.size() && std::equal(b.shape.rbegin(), b.shape.rend(), a.shape.rbegin()), "'",
                fields.b, "' has shape ", b.shape, ", expected ", a.shape, " or its last axes");
        value = codes_value(fields.bits, a.shape);
        product_.a_zero = static_cast<std::int32_t>(in_range(fields.a_zero, 0, MAX_CODE, "a_zero"));
        product_.b_zero = static_cast<std::int32_t>(in_range(fields.b_zero, 0, MAX_CODE, "b_zero"));
        const std::int64_t bound = bound_multiply(magnitude(a, product_.a_zero, product_.a_zero),
                                                  magnitude(b, product_.b_zero, product_.b_zero));
        prove(bound, 31, "product");
        product_.wide_a = a.is_wide(), product_.wide_b = b.is_wide();
        product_.requantization = tensor_requantization(fields.mult, fields.shift, fields.y_zero, value, bound);
        b_rows_ = b.rows();
    }

    std::int64_t items() const override { return value.rows(); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t channels = value.channels(), a_size = product_.wide_a ? 2 : 1;
        const std::int64_t b_size = product_.wide_b ? 2 : 1, y_size = value.is_wide() ? 2 : 1;
        for (std::int64_t r = begin; r < end;) {
            const std::int64_t b_row = r % b_rows_, count = std::min(end - r, b_rows_ - b_row);
            kernels_->multiply(product_, frame[inputs[0]] + r * channels * a_size,
                               frame[inputs[1]] + b_row * channels * b_size, frame[output] + r * channels * y_size,
                               count * channels);
            r += count;
        }
    }

private:
    const ElementwiseKernels* kernels_;
    Product product_{};
    std::int64_t b_rows_;
};

// kernels/elementwise.h has the formula.
class Rotary final : public Op {
public:
    Rotary(const RotaryFields& fields, Scope& scope) : kernels_(scope.kernels.kernels->elementwise) {
        const Operand input = scope.codes(fields.x, 2);
        const Value& x = input.value;
        inputs = {input.number};
        tokens_ = x.shape[x.shape.size() - 2];
        const Constant table = scope.constant(fields.y + ".table", {DType::i16}, {2, tokens_, ANY});
        const std::int64_t period = table.shape[2], channels = x.channels();
        require(channels % period == 0, "table of ", period, " columns does not divide ", channels, " channels");
        const Constant partners = scope.constant(fields.partner, {DType::i32, DType::u16}, {period});
        partner_ = read_as<std::int32_t>(partners, 0, period - 1, "partner");
        const auto* entries = table.as<std::int16_t>();
        std::int64_t largest = 0;
        for (std::int64_t i = 0; i < tokens_ * period; ++i) {
            const std::int64_t cosine = entries[i], sine = entries[tokens_ * period + i];
            largest = std::max(largest, (cosine < 0 ? -cosine : cosine) + (sine < 0 ? -sine : sine));
            table_.push_back(static_cast<std::int32_t>((cosine & 0xffff) + sine * 65536));
        }
        value = codes_value(fields.bits, x.shape);
        rotation_.channels = channels, rotation_.period = period;
        rotation_.zero = static_cast<std::int32_t>(in_range(fields.zero, 0, MAX_CODE, "zero"));
        const std::int64_t far = magnitude(x, rotation_.zero, rotation_.zero), bound = bound_multiply(far, largest);
        prove(bound, 31, "acc");
        rotation_.requantization = tensor_requantization(fields.mult, fields.shift, fields.y_zero, value, bound);
        rotation_.wide_in = x.is_wide();
        rotation_.fits_i16 = far < 1 << 15;
        rotation_.partner = partner_.data();
        find_vectors();
    }

    std::int64_t items() const override { return value.rows(); }
    std::size_t bytes() const override {
        return (table_.size() + partner_.size() + first_.size() + lane_.size()) * sizeof(std::int32_t);
    }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t channels = rotation_.channels, x_row = channels * (rotation_.wide_in ? 2 : 1);
        const std::int64_t y_row = channels * (value.is_wide() ? 2 : 1);
        for (std::int64_t r = begin; r < end; ++r) {
            kernels_->rotary(rotation_, table_.data() + r % tokens_ * rotation_.period, frame[inputs[0]] + r * x_row,
                             frame[output] + r * y_row);
        }
    }

private:
    // Finds, for each group of 8 channels, a vector of 8 channels that contains their partners. Such a vector exists
    // if partners are neighbours, or if they are half a period apart.
    void find_vectors() {
        constexpr std::int64_t LANES = 8;
        rotation_.by_eights = rotation_.period % LANES == 0;
        for (std::int64_t p = 0; rotation_.by_eights && p < rotation_.period; p += LANES) {
            const auto begin = partner_.begin() + p;
            const std::int64_t first =
                std::min<std::int64_t>(*std::min_element(begin, begin + LANES), rotation_.period - LANES);
            first_.push_back(static_cast<std::int32_t>(first));
            for (std::int64_t i = 0; i < LANES; ++i) {
                lane_.push_back(static_cast<std::int32_t>(begin[i] - first));
                rotation_.by_eights = rotation_.by_eights && lane_.back() < LANES;
            }
        }
        rotation_.first = first_.data(), rotation_.lane = lane_.data();
    }

    const ElementwiseKernels* kernels_;
    std::int64_t tokens_;
    Rotation rotation_{};
    std::vector<std::int32_t> partner_, table_, first_, lane_;
};

// y[..., c] = max over t of x[..., t, c]
class Max final : public Op {
public:
    Max(const MaxFields& fields, Scope& scope) : kernels_(scope.kernels.kernels->elementwise) {
        const Operand input = scope.codes(fields.x, 2);
        const Value& x = input.value;
        inputs = {input.number};
        rows_ = {x.shape[x.shape.size() - 2], x.channels(), x.is_wide()};
        value = Value{x.dtype, x.shape, x.lo, x.hi};
        value.masked = x.masked;
        value.shape.erase(value.shape.end() - 2);
        blocks_ = ChannelBlocks(rows_.stride);
    }

    std::int64_t items() const override { return value.rows() * blocks_.count; }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t size = rows_.wide_in ? 2 : 1;
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t outer = item / blocks_.count, first = blocks_.first(item % blocks_.count);
            kernels_->max(rows_, frame[inputs[0]] + (outer * rows_.count * rows_.stride + first) * size,
                          frame[output] + (outer * rows_.stride + first) * size, blocks_.size(first));
        }
    }

private:
    const ElementwiseKernels* kernels_;
    Rows rows_{};
    ChannelBlocks blocks_;
};

constexpr std::int64_t TILE_ROWS = 16;  // the AVX-512 epilogue loads its tables once per tile

std::size_t tile_bytes(std::int64_t channels) {
    return round_up(static_cast<std::size_t>(TILE_ROWS * channels) * sizeof(std::int32_t), std::size_t{64});
}

// Returns the smallest n with which requantizing acc * 2^n by shift + n has the form Requantization::HIGH_HALF, or 0 if
// there is no such n. The codes do not depend on n. Weights times 2^n must fit in i16.
int find_lift(const std::vector<std::int64_t>& mult, const std::vector<std::int64_t>& shift, std::int64_t bound) {
    constexpr int MAX_LIFT = 7;
    int lift = 0;
    for (std::size_t c = 0; c < mult.size(); ++c) {
        int s = static_cast<int>(shift[c]);
        for (std::int64_t m = mult[c]; s < 32 && m < std::int64_t{1} << 30; m *= 2) ++s;
        lift = std::max(lift, 32 - s);
    }
    const bool fits = lift <= MAX_LIFT && bound < std::int64_t{1} << (31 - lift) &&
                      *std::max_element(shift.begin(), shift.end()) + lift <= MAX_SHIFT;
    return fits ? lift : 0;
}

}  // namespace

Depthwise::Depthwise(const DepthwiseFields& fields, Scope& scope) : kernels_(scope.kernels.kernels) {
    const Operand input = scope.codes(fields.x, 2);
    const Value& x = input.value;
    inputs = {input.number};
    channels_ = x.channels(), wide_in_ = x.is_wide();
    const Constant weights = scope.constant(fields.y + ".w", {DType::i8}, {ANY, channels_});
    taps_ = weights.shape[0];
    const Constant rows = scope.constant(fields.index, {DType::i32});
    require(!rows.shape.empty() && rows.shape.back() == taps_, "constant '", fields.index, "' has shape ", rows.shape,
            ", expected [..., ", taps_, "]");
    index_ = read_as<std::int32_t>(rows, -1, x.rows() - 1, "index");
    Shape shape = rows.shape;
    shape.back() = channels_;
    value = codes_value(fields.bits, shape);
    const std::vector<std::int32_t> fill = scope.zeros(fields.fill, channels_, x.lo, x.hi, "fill");
    for (const std::int32_t code : fill) {
        fill_.push_back(static_cast<std::uint8_t>(code & 255));
        if (wide_in_) fill_.push_back(static_cast<std::uint8_t>(code >> 8));
    }
    const Constant bias = scope.constant(fields.y + ".bias", {DType::i32}, {channels_});
    bias_.assign(bias.as<std::int32_t>(), bias.as<std::int32_t>() + channels_);
    const Constant mults = scope.constant(fields.y + ".mult", {DType::i32, DType::u16}, {channels_});
    const Constant shifts = scope.constant(fields.y + ".shift", {DType::u8}, {channels_});
    const std::vector<std::int64_t> mult = read_as<std::int64_t>(mults, 0, MAX_MULT, "mult");
    std::vector<std::int64_t> shift = read_as<std::int64_t>(shifts, 1, MAX_SHIFT, "shift");
    const auto* w = weights.as<std::int8_t>();
    std::int64_t bound = 0;  // also bounds partial sums, in any order
    for (std::int64_t c = 0; c < channels_; ++c) {
        std::int64_t positive = 0, negative = 0;
        for (std::int64_t k = 0; k < taps_; ++k) {
            const std::int64_t weight = w[k * channels_ + c];
            (weight < 0 ? negative : positive) += weight;
        }
        const std::int64_t b = bias_[static_cast<std::size_t>(c)];
        bound = std::max(
            {bound, positive * x.hi + std::max<std::int64_t>(b, 0), -negative * x.hi - std::min<std::int64_t>(b, 0)});
    }
    prove(bound, 31, "acc");
    const int lift = find_lift(mult, shift, bound);
    for (std::int32_t& b : bias_) b *= 1 << lift;
    for (std::int64_t& s : shift) s += lift;
    pairs_.resize(static_cast<std::size_t>((taps_ + 1) / 2 * channels_));
    for (std::int64_t k = 0; k < taps_; ++k) {
        for (std::int64_t c = 0; c < channels_; ++c) {
            const std::int32_t weight = w[k * channels_ + c] * (1 << lift);
            pairs_[static_cast<std::size_t>(k / 2 * channels_ + c)] += k % 2 == 0 ? weight & 0xffff : weight * 65536;
        }
    }
    requantization_ =
        RequantizationConstants({mult.begin(), mult.end()}, {shift.begin(), shift.end()},
                                scope.zeros(fields.y_zero, channels_, 0, value.hi, "y_zero"), value.hi, bias_.data());
    epilogue_.kind = Epilogue::CODES;
    epilogue_.wide = value.is_wide();
}

bool Depthwise::fuse_lookup(const Lookup& lookup) {
    if (!tables_.fuse(lookup, epilogue_)) return false;
    output = lookup.output, value = lookup.value, tag = "depthwise + lookup";
    return true;
}

std::size_t Depthwise::bytes() const {
    return (index_.size() + pairs_.size() + bias_.size()) * sizeof(std::int32_t) + fill_.size() +
           requantization_.bytes() + tables_.bytes();
}

// Scratch: accumulators of a few rows, then pointers to the rows of x that one row of y needs.
std::size_t Depthwise::scratch() const {
    return tile_bytes(channels_) + static_cast<std::size_t>(taps_ + 1) * sizeof(const std::uint8_t*);
}

void Depthwise::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    auto* acc = reinterpret_cast<std::int32_t*>(scratch);
    auto* rows = reinterpret_cast<const std::uint8_t**>(scratch + tile_bytes(channels_));
    const Taps taps = {channels_, (taps_ + 1) / 2, wide_in_, pairs_.data()};
    Epilogue epilogue = epilogue_;
    epilogue.bias = bias_.data();
    epilogue.requantization = requantization_.view();
    tables_.view(epilogue);
    for (std::int64_t first = begin; first < end; first += TILE_ROWS) {
        const std::int64_t count = std::min(end - first, TILE_ROWS);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int32_t* from = index_.data() + (first + i) * taps_;
            for (std::int64_t k = 0; k < taps_; ++k) {
                rows[k] =
                    from[k] < 0 ? fill_.data() : frame[inputs[0]] + static_cast<std::size_t>(from[k]) * fill_.size();
            }
            rows[taps_] = rows[0];  // the second tap of the last pair if the number of taps is odd; its weight is 0
            kernels_->elementwise->depthwise(taps, rows, acc + i * channels_);
        }
        const int columns = static_cast<int>(channels_);
        kernels_->epilogue(epilogue, {acc, static_cast<int>(count), columns, columns, first, 0, channels_},
                           frame[output]);
    }
}

std::unique_ptr<Op> make_multiply(const MultiplyFields& fields, Scope& scope) {
    return std::make_unique<Multiply>(fields, scope);
}
std::unique_ptr<Op> make_rotary(const RotaryFields& fields, Scope& scope) {
    return std::make_unique<Rotary>(fields, scope);
}
std::unique_ptr<Op> make_max(const MaxFields& fields, Scope& scope) { return std::make_unique<Max>(fields, scope); }

}  // namespace fqvit
