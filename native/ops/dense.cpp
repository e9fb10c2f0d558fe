// The ops that compute channel by channel or over all channels of a row: lookup, add, layernorm, mean. Linear has its
// own file.
#include <algorithm>

#include "core/fixed.h"
#include "kernels/scalar/attention_scalar.h"
#include "ops/ops.h"

namespace fqvit {

RescaleConstants::RescaleConstants(std::vector<std::uint32_t> mult, std::vector<std::uint8_t> shift,
                                   std::vector<std::int32_t> zero, std::int64_t last, const std::int32_t* bias)
    : mult_(std::move(mult)),
      shift_(std::move(shift)),
      zero_(std::move(zero)),
      last_(last),
      form_(Rescale::HIGH) {
    constexpr std::size_t LANES = 8;
    const std::size_t channels = mult_.size(), padded = (channels + LANES - 1) / LANES * LANES;
    zero_.resize(padded);
    vector_mult_.resize(padded), vector_half_.resize(padded), vector_shift_.resize(padded);
    for (std::size_t c = 0; c < channels; ++c) {
        // mult 2^j / 2^(shift + j) is the same number: with a shift of 32 or more the result lies in the product's
        // upper half.
        std::uint32_t m = mult_[c];
        int s = shift_[c];
        while (s < 32 && m < (1u << 30)) m *= 2, ++s;
        // Adding zero 2^shift before the shift is adding zero after it. It must not overflow beside |acc mult| < 2^62.
        if (s < 32 || (std::int64_t{zero_[c]} >> (60 - s > 0 ? 60 - s : 0)) > 0) form_ = Rescale::ANY;
        vector_mult_[c] = static_cast<std::int32_t>(m);
        vector_shift_[c] = std::max(s - 32, 0);
        const std::size_t lane = c % LANES;
        vector_half_[c - lane + lane / 2 + (lane % 2) * (LANES / 2)] =
            (std::int64_t{1} << (s - 1)) + (form_ == Rescale::HIGH ? std::int64_t{zero_[c]} << s : 0) +
            (bias == nullptr ? 0 : std::int64_t{bias[c]} * m);
    }
}

Rescale RescaleConstants::view() const {
    return {mult_.data(), shift_.data(),       zero_.data(),        static_cast<std::int32_t>(last_),
            form_,        vector_mult_.data(), vector_half_.data(), vector_shift_.data()};
}

std::size_t RescaleConstants::bytes() const { return mult_.size() * (4 + 1 + 4 + 4 + 8 + 4); }

namespace {

std::vector<std::int32_t> alphas_of(const Array& array, std::int64_t channels, const char* name) {
    need(channels <= MAX_CHANNELS, "more channels than can be");
    if (count_of(array) == 0) return std::vector<std::int32_t>(static_cast<std::size_t>(channels));
    need(array.dtype == DType::u8, "alpha must be u8");
    return channels_of(array, channels, 0, 15, name);
}

std::int64_t largest_of(const std::vector<std::int32_t>& values) {
    return *std::max_element(values.begin(), values.end());
}
std::int64_t smallest_of(const std::vector<std::int32_t>& values) {
    return *std::min_element(values.begin(), values.end());
}

constexpr std::int64_t MAX_CODE = 65535;

// The largest |(x - zero) 2^alpha|, each at its worst, as verify() bounds it.
std::int64_t lifted_bound(const Value& x, const std::vector<std::int32_t>& zero,
                          const std::vector<std::int32_t>& alpha) {
    return bound_shift(magnitude(x, smallest_of(zero), largest_of(zero)), static_cast<int>(largest_of(alpha)));
}

std::int64_t element(const void* data, DType dtype, std::int64_t i) {
    switch (dtype) {
        case DType::u8: return static_cast<const std::uint8_t*>(data)[i];
        case DType::u16: return static_cast<const std::uint16_t*>(data)[i];
        case DType::i16: return static_cast<const std::int16_t*>(data)[i];
        default: return static_cast<const std::int32_t*>(data)[i];
    }
}

}  // namespace

Lookup::Lookup(const Record& record, const Scope& scope) {
    shape_of_record(record, 1, 1, 3);
    const Value& x = input(record, scope, 0);
    const Array& table = record.arrays[0];
    wide_in = x.dtype == DType::u16;
    length = x.hi + 1;
    need(table.shape.size() == 1 && table.shape[0] == length, "the table does not fit its input");
    const std::int64_t channels = x.channels();
    if (count_of(record.arrays[1]) == 0) {  // no alpha: the table is the result
        need(table.dtype == DType::u8 || table.dtype == DType::u16, "the table must hold codes");
        for (const std::int64_t code : integers(table, 0, MAX_CODE, "table"))
            tables.push_back(static_cast<std::uint16_t>(code));
        need(channels <= MAX_CHANNELS, "more channels than can be");
        which.assign(static_cast<std::size_t>(channels), 0);
        const auto [lo, hi] = std::minmax_element(tables.begin(), tables.end());
        value = Value{table.dtype, x.shape, *lo, *hi};
        return;
    }
    need(table.dtype == DType::i16 || table.dtype == DType::i32, "a table that is rounded must be i16 or i32");
    const std::vector<std::int64_t> twice =
        integers(table, -(std::int64_t{1} << 31), (std::int64_t{1} << 31) - 1, "table");
    const std::vector<std::int32_t> alpha = alphas_of(record.arrays[1], channels, "alpha");
    const std::int64_t ways = largest_of(alpha) + 1;
    value = codes(record.ints[0], x.shape);
    const std::vector<std::int64_t> zeros = integers(record.arrays[2], 0, value.hi, "y_zero");
    need(static_cast<std::int64_t>(zeros.size()) == ways, "y_zero has not one entry a shift");
    for (const std::int64_t entry : twice)
        prove((entry < 0 ? -entry : entry) + (1 << (ways - 1)) + value.hi + 1, 31, "a lookup");
    for (std::int64_t way = 0; way < ways; ++way) {
        for (const std::int64_t entry : twice) {
            const std::int64_t code =
                round_shift(entry, static_cast<int>(way + 1)) + zeros[static_cast<std::size_t>(way)];
            tables.push_back(static_cast<std::uint16_t>(clamp(code, value.hi)));
        }
    }
    for (const std::int32_t a : alpha) which.push_back(static_cast<std::uint8_t>(a));
}

void Lookup::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const scalar::Codes x{frame[inputs[0]], wide_in};
    const std::int64_t channels = value.channels();
    const bool wide = value.dtype == DType::u16;
    for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t at = which[static_cast<std::size_t>(c)] * length + x[r * channels + c];
            scalar::put(frame[output], wide, r * channels + c, tables[static_cast<std::size_t>(at)]);
        }
    }
}

Add::Add(const Record& record, const Scope& scope) : kernels_(scope.machine.kernels) {
    shape_of_record(record, 2, 2, 8);
    const Value* values[2];
    bool constant[2];
    for (std::size_t i = 0; i < 2; ++i) {
        values[i] = &any_input(record, scope, i);
        constant[i] = scope.constant[static_cast<std::size_t>(record.inputs[i])];
        need(values[i]->dtype != DType::i8 && values[i]->dtype != DType::i64, "adds values of another type");
    }
    need(!constant[0] || !constant[1], "adds constants only");
    const Shape& shape = values[constant[0] ? 1 : 0]->shape;
    const std::int64_t channels = shape.back();
    std::int64_t total = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        const Shape& own = values[i]->shape;
        // A constant may lack leading axes; a buffer may not.
        need(own.size() <= shape.size() && (constant[i] || own.size() == shape.size()),
             "adds values of different shapes");
        need(std::equal(own.rbegin(), own.rend(), shape.rbegin()), "adds values of different shapes");
        terms[i].dtype = values[i]->dtype;
        terms[i].count = values[i]->count();
        terms[i].mult = channels_of(record.arrays[3 * i], channels, 0, (std::int64_t{1} << 30) - 1, "mult");
        terms[i].zero = channels_of(record.arrays[3 * i + 1], channels, 0, MAX_CODE, "zero");
        terms[i].alpha = alphas_of(record.arrays[3 * i + 2], channels, "alpha");
        total = bound_add(
            total, bound_multiply(lifted_bound(*values[i], terms[i].zero, terms[i].alpha), largest_of(terms[i].mult)));
    }
    value = codes(record.ints[1], shape);
    zero = channels_of(record.arrays[6], channels, 0, value.hi, "y_zero");
    const std::vector<std::int32_t> alpha = alphas_of(record.arrays[7], channels, "y_alpha");
    within(record.ints[0], 1, 62, "shift");
    const std::int64_t last_shift = within(record.ints[0] + largest_of(alpha), 1, 62, "shift");
    bound = bound_add(total, std::int64_t{1} << (last_shift - 1));
    prove(bound, 63, "a sum");
    for (const std::int32_t a : alpha) shift.push_back(static_cast<std::uint8_t>(record.ints[0] + a));
    acc_ = as_epilogue(0) ? 0 : as_epilogue(1) ? 1 : -1;
    if (acc_ >= 0) no_bias_.assign(static_cast<std::size_t>(channels), 0);
}

std::size_t Add::bytes() const {
    const std::size_t channels = zero.size(),
                      each = 6 * sizeof(std::int32_t) + sizeof(std::uint8_t) + sizeof(std::int32_t);
    return channels * each + (acc_ < 0 ? 0 : rescale_.bytes() + channels * 4 * sizeof(std::int32_t));
}

void Add::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const std::int64_t channels = value.channels();
    const bool wide = value.dtype == DType::u16;
    if (acc_ >= 0) {  // as if a linear map had just made the accumulators
        Epilogue e = epilogue;
        view(e, frame[inputs[static_cast<std::size_t>(1 - acc_)]]);
        e.bias = no_bias_.data();
        const auto* acc =
            reinterpret_cast<const std::int32_t*>(frame[inputs[static_cast<std::size_t>(acc_)]]) + begin * channels;
        const int rows = static_cast<int>(end - begin), columns = static_cast<int>(channels);
        kernels_->finish(e, {acc, rows, columns, columns, begin, 0, channels}, frame[output]);
        return;
    }
    for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t c = 0; c < channels; ++c) {
            const auto at = static_cast<std::size_t>(c);
            std::int64_t sum = 0;
            for (std::size_t i = 0; i < 2; ++i) {
                const Term& term = terms[i];
                const std::int64_t x = element(frame[inputs[i]], term.dtype, (r * channels + c) % term.count);
                sum += (x - term.zero[at]) * (std::int64_t{1} << term.alpha[at]) * term.mult[at];
            }
            scalar::put(frame[output], wide, r * channels + c, clamp(round_shift(sum, shift[at]) + zero[at], value.hi));
        }
    }
}

// Makes an epilogue of the sum, where one term is a plain accumulator and the other has one value for each of its own.
bool Add::as_epilogue(std::size_t own) {
    const Term &acc = terms[own], &other = terms[1 - own];
    const auto zeros = [](const std::vector<std::int32_t>& v) {
        return std::all_of(v.begin(), v.end(), [](auto i) { return i == 0; });
    };
    if (acc.dtype != DType::i32 || acc.count != value.count() || !zeros(acc.zero) || !zeros(acc.alpha)) return false;
    if (other.dtype == DType::i32 || other.count != value.count()) return false;
    epilogue.kind = Epilogue::ADD;
    epilogue.wide = value.dtype == DType::u16;
    epilogue.residual.type = other.dtype == DType::u8    ? Residual::U8
                             : other.dtype == DType::u16 ? Residual::U16
                                                         : Residual::I16;
    x_zero_ = other.zero, x_alpha_ = other.alpha, x_mult_ = other.mult;
    rescale_ = RescaleConstants({acc.mult.begin(), acc.mult.end()}, shift, zero, value.hi, nullptr);
    const auto [least, most] = std::minmax_element(shift.begin(), shift.end());
    // (x - zero) 2^alpha must fit 32 bits, too.
    epilogue.low = *most <= 32 && (bound >> *least) < (std::int64_t{1} << 30) && largest_of(other.alpha) <= 14;
    return true;
}

void Add::view(Epilogue& e, const void* x) const {
    e.rescale = rescale_.view();
    e.residual.x = x;
    e.residual.zero = x_zero_.data(), e.residual.alpha = x_alpha_.data(), e.residual.mult = x_mult_.data();
}

namespace {

std::int64_t root_of(std::int64_t channels) { return isqrt(channels) + 1; }

class LayerNorm final : public Op {
public:
    LayerNorm(const Record& record, const Scope& scope) : kernels_(scope.machine.kernels) {
        shape_of_record(record, 1, 4, 3);
        const Value& x = input(record, scope, 0);
        const std::int64_t channels = x.channels();
        const Array& affine = record.arrays[0];
        need(affine.dtype == DType::i32 && affine.shape == Shape({2, channels}), "affine must be i32 [2, C]");
        const std::int64_t epsilon = within(record.ints[0], 1, (std::int64_t{1} << 62) - 1, "epsilon");
        const std::int64_t shift = within(record.ints[1], 1, 62, "shift"),
                           b_shift = within(record.ints[2], 0, 32, "b_shift");
        value = codes(record.ints[3], x.shape);
        zero_ = channels_of(record.arrays[1], channels, 0, MAX_CODE, "zero");
        alpha_ = alphas_of(record.arrays[2], channels, "alpha");
        const std::int64_t v = lifted_bound(x, zero_, alpha_);
        prove(bound_add(bound_multiply(bound_multiply(channels, channels), bound_multiply(v, v)), epsilon), 62,
              "D of a norm");
        prove(bound_add(bound_shift(root_of(channels), 55), std::int64_t{1} << 31), 63, "t of a norm");
        const std::int64_t t = bound_shift(root_of(channels), 24);
        prove(t, 31, "t of a norm");
        std::int64_t g_largest = 0, b_largest = 0;
        const auto* data = static_cast<const std::int32_t*>(affine.data);
        const std::int64_t half = std::int64_t{1} << (shift - 1);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t g = data[c], b = data[channels + c];
            g_largest = std::max(g_largest, g < 0 ? -g : g);
            b_largest = std::max(b_largest, b < 0 ? -b : b);
            g_.push_back(data[c]);
        }
        prove(
            bound_add(bound_add(bound_multiply(g_largest, t), bound_shift(b_largest, static_cast<int>(b_shift))), half),
            63, "y of a norm");
        for (std::int64_t c = 0; c < channels; ++c)
            b_.push_back(data[channels + c] * (std::int64_t{1} << b_shift) + half);
        // |C v - M1| = |sum of v - v'| <= C (largest v - smallest v)
        const std::int64_t spread = bound_multiply(channels, 2 * v);
        const bool narrow = spread < std::int64_t{1} << 31 && shift >= 32 && root_of(channels) <= 64;
        norm_ = {channels,
                 epsilon,
                 static_cast<int>(shift),
                 static_cast<int>(b_shift),
                 value.hi,
                 x.dtype == DType::u16,
                 value.dtype == DType::u16,
                 zero_.data(),
                 alpha_.data(),
                 g_.data(),
                 b_.data(),
                 narrow,
                 narrow && channels % 16 == 0 && channels < 32768 && largest_of(alpha_) == 0 &&
                     smallest_of(zero_) == largest_of(zero_)};
    }

    std::int64_t items() const override { return value.rows(); }
    std::size_t bytes() const override { return g_.size() * (4 + 4 + 4 + 8); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t from = begin * norm_.channels;
        const std::uint8_t* x = frame[inputs[0]] + from * (norm_.wide_in ? 2 : 1);
        kernels_->normalize(norm_, x, frame[output] + from * (norm_.wide_out ? 2 : 1), end - begin);
    }

private:
    const Kernels* kernels_;
    std::vector<std::int32_t> zero_, alpha_;
    AlignedVector<std::int32_t> g_;
    AlignedVector<std::int64_t> b_;
    Norm norm_;
};

class Mean final : public Op {
public:
    Mean(const Record& record, const Scope& scope) {
        shape_of_record(record, 1, 5, 2);
        const Value& x = input(record, scope, 0);
        need(x.shape.size() == 2, "the mean is of [T, C]");
        const std::int64_t channels = x.channels();
        mult_ = within(record.ints[0], 0, (std::int64_t{1} << 31) - 1, "mult");
        shift_ = static_cast<int>(within(record.ints[1], 1, 62, "shift"));
        skip_ = within(record.ints[2], 0, x.shape[0] - 1, "skip");
        tokens_ = x.shape[0];
        value = codes(record.ints[4], {channels});
        y_zero_ = within(record.ints[3], 0, value.hi, "y_zero");
        zero_ = channels_of(record.arrays[0], channels, 0, MAX_CODE, "zero");
        alpha_ = alphas_of(record.arrays[1], channels, "alpha");
        wide_ = x.dtype == DType::u16;
        prove(bound_multiply(lifted_bound(x, zero_, alpha_), tokens_ - skip_), 31, "a mean");
    }

    std::int64_t items() const override { return value.channels(); }
    std::size_t bytes() const override { return (zero_.size() + alpha_.size()) * sizeof(std::int32_t); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const scalar::Codes x{frame[inputs[0]], wide_};
        for (std::int64_t c = begin; c < end; ++c) {
            const auto at = static_cast<std::size_t>(c);
            std::int64_t acc = 0;
            for (std::int64_t t = skip_; t < tokens_; ++t) acc += x[t * value.channels() + c] - zero_[at];
            const std::int64_t mean = requantize(acc * (std::int64_t{1} << alpha_[at]), mult_, shift_);
            scalar::put(frame[output], value.dtype == DType::u16, c, clamp(mean + y_zero_, value.hi));
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
