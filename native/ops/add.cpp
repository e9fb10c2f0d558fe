// The op add: plain loops, or the epilogue kernel of matrix products.
#include <algorithm>

#include "core/codes.h"
#include "core/fixed.h"
#include "ops/bounds.h"
#include "ops/ops.h"

namespace fqvit {

namespace {

std::int64_t load_element(const void* data, DType dtype, std::int64_t i) {
    switch (dtype) {
        case DType::u8: return static_cast<const std::uint8_t*>(data)[i];
        case DType::u16: return static_cast<const std::uint16_t*>(data)[i];
        case DType::i16: return static_cast<const std::int16_t*>(data)[i];
        default: return static_cast<const std::int32_t*>(data)[i];
    }
}

}  // namespace

Add::Add(const AddFields& fields, Scope& scope) : kernels_(scope.kernels.kernels) {
    std::vector<Operand> operands;
    for (const TermFields& term : fields.terms) {
        operands.push_back(scope.buffer_or_constant(term.x, {DType::u8, DType::u16, DType::i16, DType::i32}));
        inputs.push_back(operands.back().number);
    }
    require(!operands[0].is_constant || !operands[1].is_constant, "adds only constants, expected at least one buffer");
    const Shape& shape = operands[operands[0].is_constant ? 1 : 0].value.shape;
    const std::int64_t channels = shape.back();
    std::int64_t total = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        // A constant may lack leading axes; a buffer may not.
        const Value& x = operands[i].value;
        const Shape& own = x.shape;
        const bool fits = operands[i].is_constant ? own.size() <= shape.size() : own.size() == shape.size();
        require(fits && std::equal(own.rbegin(), own.rend(), shape.rbegin()), "'", fields.terms[i].x, "' has shape ",
                own, ", expected ", shape);
        const Multiplier& mult = fields.terms[i].mult;
        Term& term = terms_[i];
        term.dtype = x.dtype;
        term.count = x.count();
        term.zero = scope.zeros(fields.terms[i].zero, channels, 0, MAX_CODE, "zero");
        term.alpha = scope.alphas(fields.terms[i].alpha, channels);
        constexpr std::int64_t LARGEST = (std::int64_t{1} << 30) - 1;
        if (mult.constant.has_value()) {
            const Constant mults = scope.constant(*mult.constant, {DType::i32}, {channels});
            term.mult = read_as<std::int32_t>(mults, 0, LARGEST, "mult");
        } else {
            const auto one = static_cast<std::int32_t>(in_range(mult.value, 0, LARGEST, "mult"));
            term.mult.assign(static_cast<std::size_t>(channels), one);
        }
        const std::int64_t largest = shifted_bound(x, term.zero, term.alpha);
        total = bound_add(total, bound_multiply(largest, largest_of(term.mult)));
    }
    value = codes_value(fields.bits, shape);
    zero_ = scope.zeros(fields.y_zero, channels, 0, value.hi, "y_zero");
    const std::vector<std::int32_t> alpha = scope.alphas(fields.y_alpha, channels);
    in_range(fields.shift, 1, MAX_SHIFT, "shift");
    const std::int64_t largest_shift = in_range(fields.shift + largest_of(alpha), 1, MAX_SHIFT, "shift + y_alpha");
    bound_ = bound_add(total, std::int64_t{1} << (largest_shift - 1));
    prove(bound_, 63, "sum");
    for (const std::int32_t a : alpha) shift_.push_back(static_cast<std::uint8_t>(fields.shift + a));
    acc_term_ = make_epilogue(0) ? 0 : make_epilogue(1) ? 1 : -1;
    if (acc_term_ < 0) staged_term_ = stage_codes(0) ? 0 : stage_codes(1) ? 1 : -1;
    if (acc_term_ >= 0 || staged_term_ >= 0) no_bias_.assign(static_cast<std::size_t>(channels), 0);
}

std::size_t Add::bytes() const {
    const std::size_t channels = zero_.size();
    const std::size_t per_channel = 6 * sizeof(std::int32_t) + sizeof(std::uint8_t) + sizeof(std::int32_t);
    const bool has_epilogue = acc_term_ >= 0 || staged_term_ >= 0;
    const std::size_t of_epilogue = has_epilogue ? requantization_.bytes() + channels * 4 * sizeof(std::int32_t) : 0;
    return channels * per_channel + of_epilogue;
}

namespace {

constexpr std::int64_t STAGED_ROWS = 8;  // rows of accumulators that are in the cache when the epilogue reads them

}  // namespace

std::size_t Add::scratch() const {
    return staged_term_ < 0 ? 0 : static_cast<std::size_t>(STAGED_ROWS * value.channels()) * sizeof(std::int32_t);
}

void Add::run_staged(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    const std::int64_t channels = value.channels();
    const auto staged_input = static_cast<std::size_t>(staged_term_);
    const Term &term = terms_[staged_input], &other = terms_[1 - staged_input];
    const Codes codes{frame[inputs[staged_input]], term.dtype == DType::u16};
    const Centering centering = {term.zero.data(), term.alpha.data(), codes.wide};
    Epilogue e = epilogue;
    view(e, other.count == value.count() ? frame[inputs[1 - staged_input]] : codes.data);
    e.bias = no_bias_.data();
    auto* acc = reinterpret_cast<std::int32_t*>(scratch);
    for (std::int64_t r = begin; r < end; r += STAGED_ROWS) {
        const std::int64_t rows = std::min(STAGED_ROWS, end - r);
        for (std::int64_t i = 0; i < rows; ++i) {
            kernels_->elementwise->center(centering, codes.at((r + i) * channels), acc + i * channels, channels);
        }
        const int columns = static_cast<int>(channels);
        kernels_->epilogue(e, {acc, static_cast<int>(rows), columns, columns, r, 0, channels}, frame[output]);
    }
}

void Add::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    const std::int64_t channels = value.channels();
    if (staged_term_ >= 0) {
        run_staged(frame, begin, end, scratch);
        return;
    }
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

// Prepares the epilogue. Returns false if acc_term is not a plain accumulator, or if the other term is of type i32
// or has fewer elements than the output.
bool Add::make_epilogue(std::size_t acc_term) {
    const Term &acc = terms_[acc_term], &x = terms_[1 - acc_term];
    const auto all_zero = [](const std::vector<std::int32_t>& v) {
        return std::all_of(v.begin(), v.end(), [](std::int32_t i) { return i == 0; });
    };
    if (acc.dtype != DType::i32 || acc.count != value.count() || !all_zero(acc.zero) || !all_zero(acc.alpha)) {
        return false;
    }
    if (x.dtype == DType::i32 || x.count != value.count()) return false;
    fill_epilogue(acc, x);
    return true;
}

// Prepares the epilogue for a term of codes that is converted to accumulators. The other term holds codes, too, or is a
// constant whose multipliers are all 0, so that the op only requantizes.
bool Add::stage_codes(std::size_t staged_term) {
    const Term &staged = terms_[staged_term], &other = terms_[1 - staged_term];
    if (kernels_->epilogue == nullptr || staged.count != value.count() || largest_of(staged.alpha) > 14) return false;
    if (staged.dtype != DType::u8 && staged.dtype != DType::u16) return false;
    if (other.count == value.count()) {
        if (other.dtype == DType::i32) return false;
        fill_epilogue(staged, other);
        return true;
    }
    if (largest_of(other.mult) != 0) return false;
    Term nothing = staged;  // the epilogue reads the codes once more and multiplies them by 0
    nothing.mult.assign(nothing.mult.size(), 0);
    fill_epilogue(staged, nothing);
    return true;
}

void Add::fill_epilogue(const Term& acc, const Term& x) {
    epilogue.kind = Epilogue::ADD;
    epilogue.wide = value.is_wide();
    epilogue.residual.type = x.dtype == DType::u8    ? Residual::U8
                             : x.dtype == DType::u16 ? Residual::U16
                                                     : Residual::I16;
    x_zero_ = x.zero, x_alpha_ = x.alpha, x_mult_ = x.mult;
    requantization_ = RequantizationConstants({acc.mult.begin(), acc.mult.end()}, shift_, zero_, value.hi, nullptr);
    const auto [least, most] = std::minmax_element(shift_.begin(), shift_.end());
    // alpha <= 14 also keeps (x - zero) * 2^alpha within i32.
    const bool fits = largest_of(x.alpha) <= 14;
    epilogue.low_half = *most <= 32 && (bound_ >> *least) < (std::int64_t{1} << 30) && fits;
    epilogue.high_half = *least >= 32 && bound_ < std::int64_t{1} << 62 && fits;
}

void Add::view(Epilogue& e, const void* x) const {
    e.requantization = requantization_.view();
    e.residual.x = x;
    e.residual.zero = x_zero_.data(), e.residual.alpha = x_alpha_.data(), e.residual.mult = x_mult_.data();
}

}  // namespace fqvit
