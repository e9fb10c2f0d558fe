// The ops lookup, layernorm and mean.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/codes.h"
#include "core/fixed.h"
#include "kernels/quick_norm.h"
#include "ops/bounds.h"
#include "ops/ops.h"

namespace fqvit {

Lookup::Lookup(const LookupFields& fields, Scope& scope) {
    const Operand input = scope.codes(fields.x);
    const Value& x = input.value;
    inputs = {input.number};
    wide_in = x.is_wide();
    length = x.hi + 1;
    const std::string name = fields.y + ".table";
    const std::int64_t channels = x.channels();
    require(channels <= MAX_CHANNELS, "too many channels: ", channels, ", at most ", MAX_CHANNELS);
    if (!fields.alpha.has_value()) {  // the entries are the codes
        const Constant table = scope.constant(name, {DType::u8, DType::u16}, {length});
        tables = read_as<std::uint16_t>(table, 0, MAX_CODE, "table");
        table_of.assign(static_cast<std::size_t>(channels), 0);
        const auto [lo, hi] = std::minmax_element(tables.begin(), tables.end());
        value = Value{table.dtype, x.shape, *lo, *hi};
        return;
    }
    // Entries are in units of half the scale: code = clamp(round_shift(entry, alpha + 1) + y_zero[alpha]).
    const Constant table = scope.constant(name, {DType::i16, DType::i32}, {length});
    const std::vector<std::int64_t> entries = read_as<std::int64_t>(table, -(MAX_MULT + 1), MAX_MULT, "table");
    const std::vector<std::int32_t> alpha = scope.alphas(fields.alpha, channels);
    const std::int64_t alphas = largest_of(alpha) + 1;
    value = codes_value(fields.bits, x.shape);
    const std::vector<std::int64_t>& zeros = fields.y_zero;
    for (const std::int64_t zero : zeros) in_range(zero, 0, value.hi, "y_zero");
    require(static_cast<std::int64_t>(zeros.size()) == alphas, zeros.size(), " zero points, expected ", alphas,
            ": one per value of alpha");
    for (const std::int64_t entry : entries) {
        prove((entry < 0 ? -entry : entry) + (1 << (alphas - 1)) + value.hi + 1, 31, "y before its clamp");
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

bool FusedTables::fuse(const Lookup& lookup, Epilogue& epilogue) {
    if (epilogue.kind != Epilogue::CODES) return false;
    epilogue.kind = Epilogue::LOOKUP;
    epilogue.wide = lookup.value.is_wide();
    for (const std::uint8_t table : lookup.table_of) {
        starts_.push_back(static_cast<std::int32_t>(table * lookup.length));
    }
    const std::size_t count = lookup.tables.size();
    tables_.resize(epilogue.wide ? 2 * count : count);
    for (std::size_t i = 0; i < count; ++i) {
        if (epilogue.wide) {
            std::memcpy(tables_.data() + 2 * i, &lookup.tables[i], 2);
        } else {
            tables_[i] = static_cast<std::uint8_t>(lookup.tables[i]);
        }
    }
    if (!epilogue.wide && lookup.length == TableLines::LENGTH) {
        lines_.resize(count / TableLines::LENGTH);
        bool fits = true;
        for (std::size_t i = 0; i < lines_.size() && fits; ++i) {
            fits = make_table_lines(tables_.data() + i * TableLines::LENGTH, lines_[i]);
        }
        if (!fits) lines_.clear();
    }
    return true;
}

std::vector<std::int32_t> FusedTables::sorting_order() const {
    if (std::is_sorted(starts_.begin(), starts_.end())) return {};
    std::vector<std::int32_t> order(starts_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto start = [&](std::int32_t channel) { return starts_[static_cast<std::size_t>(channel)]; };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return start(a) < start(b); });
    return order;
}

void FusedTables::reorder(const std::vector<std::int32_t>& order) { starts_ = reordered(starts_, order); }

namespace {

// kernels.h has the formula of LayerNorm. |C * v - M1| <= (isqrt(C) + 1) * sqrt(D), so
// |t| <= (isqrt(C) + 1) * 2^fraction. Both bounds also hold for M1 = 0.
class LayerNorm final : public Op {
public:
    LayerNorm(const LayerNormFields& fields, Scope& scope) : kernels_(scope.kernels.kernels) {
        const Operand input = scope.codes(fields.x);
        const Value& x = input.value;
        inputs = {input.number};
        const std::int64_t channels = x.channels();
        const Constant affine = scope.constant(fields.y + ".affine", {DType::i32}, {2, channels});
        const std::int64_t epsilon = in_range(fields.epsilon, 1, (std::int64_t{1} << 62) - 1, "epsilon");
        const auto shift = static_cast<int>(in_range(fields.shift, 1, MAX_SHIFT, "shift"));
        const auto b_shift = static_cast<int>(in_range(fields.b_shift, 0, 32, "b_shift"));
        const auto fraction = static_cast<int>(in_range(fields.fraction, 16, 24, "fraction"));
        value = codes_value(fields.bits, x.shape);
        zero_ = scope.zeros(fields.zero, channels, 0, MAX_CODE, "zero");
        alpha_ = scope.alphas(fields.alpha, channels);
        const std::int64_t v = shifted_bound(x, zero_, alpha_), root = isqrt(channels) + 1;
        const std::int64_t squares = bound_multiply(bound_multiply(channels, channels), bound_multiply(v, v));
        prove(bound_add(squares, epsilon), 62, "D");
        prove(bound_add(bound_shift(root, fraction + 31), std::int64_t{1} << 31), 63, "t numerator");
        const std::int64_t t = bound_shift(root, fraction);
        prove(t, 31, "t");
        std::int64_t g_largest = 0, b_largest = 0;
        const auto* data = affine.as<std::int32_t>();
        const std::int64_t half = std::int64_t{1} << (shift - 1);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t g = data[c], b = data[channels + c];
            g_largest = std::max(g_largest, g < 0 ? -g : g);
            b_largest = std::max(b_largest, b < 0 ? -b : b);
            g_.push_back(data[c]);
        }
        const std::int64_t y = bound_add(bound_multiply(g_largest, t), bound_shift(b_largest, b_shift));
        prove(bound_add(y, half), 63, "y before its shift");
        for (std::int64_t c = 0; c < channels; ++c) {
            b_.push_back(data[channels + c] * (std::int64_t{1} << b_shift) + half);
        }
        // |C * v[c] - M1| = |sum over c' of (v[c] - v[c'])| <= C * (largest v - smallest v)
        const std::int64_t spread = bound_multiply(channels, 2 * v);
        const bool one_zero = smallest_of(zero_) == largest_of(zero_), no_alpha = largest_of(alpha_) == 0;
        norm_.channels = channels, norm_.epsilon = epsilon, norm_.shift = shift, norm_.fraction = fraction,
        norm_.last = value.hi;
        norm_.center = fields.center, norm_.wide_in = x.is_wide(), norm_.wide_out = value.is_wide();
        norm_.zero = zero_.data(), norm_.alpha = alpha_.data(), norm_.g = g_.data(), norm_.b = b_.data();
        norm_.fits_i32 = spread < std::int64_t{1} << 31 && shift >= 32 && root <= 64 && fraction == 24;
        // A zero point shared by all channels cancels if the mean is subtracted. Without centering, x - zero fits in
        // i16 for u8 codes and a zero point of at most 255.
        const bool i16 = fields.center || (!norm_.wide_in && zero_.front() <= 255);
        norm_.per_tensor = norm_.fits_i32 && channels % 16 == 0 && no_alpha && one_zero && i16;
        norm_.offset = static_cast<std::int16_t>(!fields.center ? zero_.front() : norm_.wide_in ? -32768 : 0);
        quick_.set(norm_, bound_add(y, half));
    }

    std::int64_t items() const override { return value.rows(); }
    std::size_t bytes() const override { return g_.size() * (4 + 4 + 4 + 8 + (norm_.quick_g == nullptr ? 0 : 4 + 8)); }

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
    QuickNorm quick_;
    Norm norm_{};
};

// y[..., c] = clamp(requantize(sum over t >= skip of (x[..., t, c] - zero[c]) * 2^alpha[c]) + y_zero)
class Mean final : public Op {
public:
    Mean(const MeanFields& fields, Scope& scope) : kernels_(scope.kernels.kernels->elementwise) {
        const Operand input = scope.codes(fields.x, 2);
        const Value& x = input.value;
        inputs = {input.number};
        const std::int64_t channels = x.channels();
        tokens_ = x.shape[x.shape.size() - 2];
        skip_ = in_range(fields.skip, 0, tokens_ - 1, "skip");
        Shape shape = x.shape;
        shape.erase(shape.end() - 2);
        value = codes_value(fields.bits, shape);
        zero_ = scope.zeros(fields.zero, channels, 0, MAX_CODE, "zero");
        alpha_ = scope.alphas(fields.alpha, channels);
        const std::int64_t bound = bound_multiply(shifted_bound(x, zero_, alpha_), tokens_ - skip_);
        prove(bound, 31, "acc");
        average_.rows = {tokens_ - skip_, channels, x.is_wide()};
        average_.zero = zero_.data(), average_.alpha = alpha_.data();
        average_.requantization = tensor_requantization(fields.mult, fields.shift, fields.y_zero, value, bound);
        blocks_ = ChannelBlocks(channels);
    }

    std::int64_t items() const override { return value.rows() * blocks_.count; }
    std::size_t bytes() const override { return (zero_.size() + alpha_.size()) * sizeof(std::int32_t); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const override {
        const std::int64_t channels = value.channels(), x_size = average_.rows.wide_in ? 2 : 1;
        const std::int64_t y_size = value.is_wide() ? 2 : 1;
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t outer = item / blocks_.count, first = blocks_.first(item % blocks_.count);
            const std::uint8_t* x = frame[inputs[0]] + ((outer * tokens_ + skip_) * channels + first) * x_size;
            kernels_->mean(average_, x, frame[output] + (outer * channels + first) * y_size, first,
                           blocks_.size(first));
        }
    }

private:
    const ElementwiseKernels* kernels_;
    std::int64_t skip_, tokens_;
    std::vector<std::int32_t> zero_, alpha_;
    Average average_{};
    ChannelBlocks blocks_;
};

}  // namespace

std::unique_ptr<Op> make_layernorm(const LayerNormFields& fields, Scope& scope) {
    return std::make_unique<LayerNorm>(fields, scope);
}
std::unique_ptr<Op> make_mean(const MeanFields& fields, Scope& scope) { return std::make_unique<Mean>(fields, scope); }

}  // namespace fqvit
