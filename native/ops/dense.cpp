// The ops lookup, add, layernorm and mean.
#include <algorithm>

#include "core/codes.h"
#include "core/fixed.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace fqvit {

namespace {

std::int64_t largest_of(const std::vector<std::int32_t>& values) {
    return *std::max_element(values.begin(), values.end());
}
std::int64_t smallest_of(const std::vector<std::int32_t>& values) {
    return *std::min_element(values.begin(), values.end());
}

// An upper bound of |(x - zero) 2^alpha|, for the worst zero point and alpha of all channels, as in Program.verify().
std::int64_t shifted_bound(const Value& x, const std::vector<std::int32_t>& zero,
                           const std::vector<std::int32_t>& alpha) {
    return bound_shift(magnitude(x, smallest_of(zero), largest_of(zero)), static_cast<int>(largest_of(alpha)));
}

std::int64_t load_element(const void* data, DType dtype, std::int64_t i) {
    switch (dtype) {
        case DType::u8: return static_cast<const std::uint8_t*>(data)[i];
        case DType::u16: return static_cast<const std::uint16_t*>(data)[i];
        case DType::i16: return static_cast<const std::int16_t*>(data)[i];
        default: return static_cast<const std::int32_t*>(data)[i];
    }
}

}  // namespace

Lookup::Lookup(const Record& record, const Scope& scope) {
    require_fields(record, 1, 1, 3);
    const Value& x = codes_input(record, scope, 0);
    const Array& table = record.arrays[0];
    wide_in = x.is_wide();
    length = x.hi + 1;
    require(table.shape == Shape({length}), "table: shape ", table.shape, ", expected one entry per code, [", length,
            "]");
    const std::int64_t channels = x.channels();
    if (count_of(record.arrays[1]) == 0) {  // without alpha, the entries are the codes
        require(table.dtype == DType::u8 || table.dtype == DType::u16, "table: ", table.dtype,
                ", expected codes (u8 or u16)");
        tables = read_as<std::uint16_t>(table, 0, MAX_CODE, "table");
        require_channels(channels);
        table_of.assign(static_cast<std::size_t>(channels), 0);
        const auto [lo, hi] = std::minmax_element(tables.begin(), tables.end());
        value = Value{table.dtype, x.shape, *lo, *hi};
        return;
    }
    // Entries are in units of half the scale: code = clamp(round_shift(entry, alpha + 1) + y_zero[alpha]).
    require(table.dtype == DType::i16 || table.dtype == DType::i32, "table: ", table.dtype,
            ", expected i16 or i32 with alpha");
    const std::vector<std::int64_t> entries = read_integers(table, -(MAX_MULT + 1), MAX_MULT, "table");
    const std::vector<std::int32_t> alpha = read_alphas(record.arrays[1], channels, "alpha");
    const std::int64_t alphas = largest_of(alpha) + 1;
    value = codes_value(record.ints[0], x.shape);
    const std::vector<std::int64_t> zeros = read_integers(record.arrays[2], 0, value.hi, "y_zero");
    require(static_cast<std::int64_t>(zeros.size()) == alphas, "y_zero: ", zeros.size(),
            " entries, expected one per alpha (", alphas, ")");
    for (const std::int64_t entry : entries) {
        prove((entry < 0 ? -entry : entry) + (1 << (alphas - 1)) + value.hi + 1, 31, "lookup");
    }
    for (std::int64_t a = 0; a < alphas; ++a) {
        for (const std::int64_t entry : entries) {
            const std::int64_t code = round_shift(entry, static_cast<int>(a + 1)) + zeros[static_cast<std::size_t>(a)];
            tables.push_back(static_cast<std::uint16_t>(clamp(code, value.hi)));
        }
    }
    table_of.assign(alpha.begin(), alpha.end());
}

void Lookup::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const Codes x{frame[inputs[0]], wide_in};
    const std::int64_t channels = value.channels();
    const bool wide = value.is_wide();
    for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t at = table_of[static_cast<std::size_t>(c)] * length + x[r * channels + c];
            store_code(frame[output], wide, r * channels + c, tables[static_cast<std::size_t>(at)]);
        }
    }
}

Add::Add(const Record& record, const Scope& scope) : kernels_(scope.kernels.kernels) {
    require_fields(record, 2, 2, 8);
    const Value* values[2];
    bool constant[2];
    for (std::size_t i = 0; i < 2; ++i) {
        values[i] = &value_input(record, scope, i);
        constant[i] = scope.is_constant[static_cast<std::size_t>(record.inputs[i])];
        require(values[i]->dtype != DType::i8 && values[i]->dtype != DType::i64, "input ", i, ": ", values[i]->dtype,
                ", expected u8, u16, i16 or i32");
    }
    require(!constant[0] || !constant[1], "inputs: constants only, expected at least one buffer");
    const Shape& shape = values[constant[0] ? 1 : 0]->shape;
    const std::int64_t channels = shape.back();
    std::int64_t total = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        // A constant may lack leading axes; a buffer may not.
        const Shape& own = values[i]->shape;
        const bool fits = constant[i] ? own.size() <= shape.size() : own.size() == shape.size();
        require(fits && std::equal(own.rbegin(), own.rend(), shape.rbegin()), "input ", i, ": shape ", own,
                ", expected ", shape);
        Term& term = terms_[i];
        term.dtype = values[i]->dtype;
        term.count = values[i]->count();
        term.mult = read_channels(record.arrays[3 * i], channels, 0, (std::int64_t{1} << 30) - 1, "mult");
        term.zero = read_channels(record.arrays[3 * i + 1], channels, 0, MAX_CODE, "zero");
        term.alpha = read_alphas(record.arrays[3 * i + 2], channels, "alpha");
        const std::int64_t largest = shifted_bound(*values[i], term.zero, term.alpha);
        total = bound_add(total, bound_multiply(largest, largest_of(term.mult)));
    }
    value = codes_value(record.ints[1], shape);
    zero_ = read_channels(record.arrays[6], channels, 0, value.hi, "y_zero");
    const std::vector<std::int32_t> alpha = read_alphas(record.arrays[7], channels, "y_alpha");
    in_range(record.ints[0], 1, MAX_SHIFT, "shift");
    const std::int64_t largest_shift = in_range(record.ints[0] + largest_of(alpha), 1, MAX_SHIFT, "shift + y_alpha");
    bound_ = bound_add(total, std::int64_t{1} << (largest_shift - 1));
    prove(bound_, 63, "sum");
    for (const std::int32_t a : alpha) shift_.push_back(static_cast<std::uint8_t>(record.ints[0] + a));
    acc_term_ = make_epilogue(0) ? 0 : make_epilogue(1) ? 1 : -1;
    if (acc_term_ >= 0) no_bias_.assign(static_cast<std::size_t>(channels), 0);
}

std::size_t Add::bytes() const {
    const std::size_t channels = zero_.size();
    const std::size_t per_channel = 6 * sizeof(std::int32_t) + sizeof(std::uint8_t) + sizeof(std::int32_t);
    const std::size_t of_epilogue = acc_term_ < 0 ? 0 : requantization_.bytes() + channels * 4 * sizeof(std::int32_t);
    return channels * per_channel + of_epilogue;
}

void Add::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const std::int64_t channels = value.channels();
    if (acc_term_ >= 0) {  // runs as the epilogue of a product whose accumulators are in memory
        const auto acc_input = static_cast<std::size_t>(acc_term_);
        Epilogue e = epilogue;
        view(e, frame[inputs[1 - acc_input]]);
        e.bias = no_bias_.data();
        const auto* acc = reinterpret_cast<const std::int32_t*>(frame[inputs[acc_input]]) + begin * channels;
        const int rows = static_cast<int>(end - begin), columns = static_cast<int>(channels);
        kernels_->epilogue(e, {acc, rows, columns, columns, begin, 0, channels}, frame[output]);
        return;
    }
    for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t c = 0; c < channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            std::int64_t sum = 0;
            for (std::size_t i = 0; i < 2; ++i) {
                const Term& term = terms_[i];
                const std::int64_t x = load_element(frame[inputs[i]], term.dtype, (r * channels + c) % term.count);
                sum += (x - term.zero[at]) * (std::int64_t{1} << term.alpha[at]) * term.mult[at];
            }
            const std::int64_t code = clamp(round_shift(sum, shift_[at]) + zero_[at], value.hi);
            store_code(frame[output], value.is_wide(), r * channels + c, code);
        }
    }
}

// Prepares the epilogue. Returns false if acc_term is not a plain accumulator, or if the other term is i32 or smaller
// than the output.
bool Add::make_epilogue(std::size_t acc_term) {
    const Term &acc = terms_[acc_term], &x = terms_[1 - acc_term];
    const auto all_zero = [](const std::vector<std::int32_t>& v) {
        return std::all_of(v.begin(), v.end(), [](std::int32_t i) { return i == 0; });
    };
    if (acc.dtype != DType::i32 || acc.count != value.count() || !all_zero(acc.zero) || !all_zero(acc.alpha)) {
        return false;
    }
    if (x.dtype == DType::i32 || x.count != value.count()) return false;
    epilogue.kind = Epilogue::ADD;
    epilogue.wide = value.is_wide();
    epilogue.residual.type = x.dtype == DType::u8    ? Residual::U8
                             : x.dtype == DType::u16 ? Residual::U16
                                                     : Residual::I16;
    x_zero_ = x.zero, x_alpha_ = x.alpha, x_mult_ = x.mult;
    requantization_ = RequantizationConstants({acc.mult.begin(), acc.mult.end()}, shift_, zero_, value.hi, nullptr);
    const auto [least, most] = std::minmax_element(shift_.begin(), shift_.end());
    // alpha <= 14 also keeps (x - zero) 2^alpha within i32.
    epilogue.low_half = *most <= 32 && (bound_ >> *least) < (std::int64_t{1} << 30) && largest_of(x.alpha) <= 14;
    return true;
}

void Add::view(Epilogue& e, const void* x) const {
    e.requantization = requantization_.view();
    e.residual.x = x;
    e.residual.zero = x_zero_.data(), e.residual.alpha = x_alpha_.data(), e.residual.mult = x_mult_.data();
}

namespace {

// kernels.h has the formula of LayerNorm. |C v - M1| <= (isqrt(C) + 1) sqrt(D), so |t| <= (isqrt(C) + 1) 2^24.
class LayerNorm final : public Op {
public:
    LayerNorm(const Record& record, const Scope& scope) : kernels_(scope.kernels.kernels) {
        require_fields(record, 1, 4, 3);
        const Value& x = codes_input(record, scope, 0);
        const std::int64_t channels = x.channels();
        const Array& affine = record.arrays[0];
        require(affine.dtype == DType::i32 && affine.shape == Shape({2, channels}), "affine: ", affine.dtype, " ",
                affine.shape, ", expected i32 [2, ", channels, "]");
        const std::int64_t epsilon = in_range(record.ints[0], 1, (std::int64_t{1} << 62) - 1, "epsilon");
        const auto shift = static_cast<int>(in_range(record.ints[1], 1, MAX_SHIFT, "shift"));
        const auto b_shift = static_cast<int>(in_range(record.ints[2], 0, 32, "b_shift"));
        value = codes_value(record.ints[3], x.shape);
        zero_ = read_channels(record.arrays[1], channels, 0, MAX_CODE, "zero");
        alpha_ = read_alphas(record.arrays[2], channels, "alpha");
        const std::int64_t v = shifted_bound(x, zero_, alpha_), root = isqrt(channels) + 1;
        const std::int64_t squares = bound_multiply(bound_multiply(channels, channels), bound_multiply(v, v));
        prove(bound_add(squares, epsilon), 62, "D of layernorm");
        prove(bound_add(bound_shift(root, 55), std::int64_t{1} << 31), 63, "numerator of t of layernorm");
        const std::int64_t t = bound_shift(root, 24);
        prove(t, 31, "t of layernorm");
        std::int64_t g_largest = 0, b_largest = 0;
        const auto* data = static_cast<const std::int32_t*>(affine.data);
        const std::int64_t half = std::int64_t{1} << (shift - 1);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t g = data[c], b = data[channels + c];
            g_largest = std::max(g_largest, g < 0 ? -g : g);
            b_largest = std::max(b_largest, b < 0 ? -b : b);
            g_.push_back(data[c]);
        }
        const std::int64_t y = bound_add(bound_multiply(g_largest, t), bound_shift(b_largest, b_shift));
        prove(bound_add(y, half), 63, "y of layernorm before its shift");
        for (std::int64_t c = 0; c < channels; ++c) {
            b_.push_back(data[channels + c] * (std::int64_t{1} << b_shift) + half);
        }
        // |C v - M1| = |sum over c' of v - v[c']| <= C (largest v - smallest v)
        const std::int64_t spread = bound_multiply(channels, 2 * v);
        const bool one_zero = smallest_of(zero_) == largest_of(zero_), no_alpha = largest_of(alpha_) == 0;
        norm_.channels = channels, norm_.epsilon = epsilon, norm_.shift = shift, norm_.last = value.hi;
        norm_.wide_in = x.is_wide(), norm_.wide_out = value.is_wide();
        norm_.zero = zero_.data(), norm_.alpha = alpha_.data(), norm_.g = g_.data(), norm_.b = b_.data();
        norm_.fits_i32 = spread < std::int64_t{1} << 31 && shift >= 32 && root <= 64;
        norm_.per_tensor = norm_.fits_i32 && channels % 16 == 0 && no_alpha && one_zero;
    }

    std::int64_t items() const override { return value.rows(); }
    std::size_t bytes() const override { return g_.size() * (4 + 4 + 4 + 8); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t from = begin * norm_.channels;
        const std::uint8_t* x = frame[inputs[0]] + from * (norm_.wide_in ? 2 : 1);
        kernels_->layernorm(norm_, x, frame[output] + from * (norm_.wide_out ? 2 : 1), end - begin);
    }

private:
    const Kernels* kernels_;
    std::vector<std::int32_t> zero_, alpha_;
    AlignedVector<std::int32_t> g_;
    AlignedVector<std::int64_t> b_;
    Norm norm_{};
};

// y[c] = clamp(requantize(sum over t >= skip of (x[t, c] - zero[c]) 2^alpha[c]) + y_zero)
class Mean final : public Op {
public:
    Mean(const Record& record, const Scope& scope) {
        require_fields(record, 1, 5, 2);
        const Value& x = codes_input(record, scope, 0);
        require(x.shape.size() == 2, "input 0: shape ", x.shape, ", expected [T, C]");
        const std::int64_t channels = x.channels();
        mult_ = in_range(record.ints[0], 0, MAX_MULT, "mult");
        shift_ = static_cast<int>(in_range(record.ints[1], 1, MAX_SHIFT, "shift"));
        skip_ = in_range(record.ints[2], 0, x.shape[0] - 1, "skip");
        tokens_ = x.shape[0];
        value = codes_value(record.ints[4], {channels});
        y_zero_ = in_range(record.ints[3], 0, value.hi, "y_zero");
        zero_ = read_channels(record.arrays[0], channels, 0, MAX_CODE, "zero");
        alpha_ = read_alphas(record.arrays[1], channels, "alpha");
        wide_ = x.is_wide();
        prove(bound_multiply(shifted_bound(x, zero_, alpha_), tokens_ - skip_), 31, "mean");
    }

    std::int64_t items() const override { return value.channels(); }
    std::size_t bytes() const override { return (zero_.size() + alpha_.size()) * sizeof(std::int32_t); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const Codes x{frame[inputs[0]], wide_};
        for (std::int64_t c = begin; c < end; ++c) {
            const auto at = static_cast<std::size_t>(c);
            std::int64_t acc = 0;
            for (std::int64_t t = skip_; t < tokens_; ++t) acc += x[t * value.channels() + c] - zero_[at];
            const std::int64_t mean = requantize(acc * (std::int64_t{1} << alpha_[at]), mult_, shift_);
            store_code(frame[output], value.is_wide(), c, clamp(mean + y_zero_, value.hi));
        }
    }

private:
    std::int64_t mult_, skip_, tokens_, y_zero_;
    int shift_;
    bool wide_;
    std::vector<std::int32_t> zero_, alpha_;
};

}  // namespace

std::unique_ptr<Op> make_layernorm(const Record& record, const Scope& scope) {
    return std::make_unique<LayerNorm>(record, scope);
}
std::unique_ptr<Op> make_mean(const Record& record, const Scope& scope) {
    return std::make_unique<Mean>(record, scope);
}

}  // namespace fqvit
