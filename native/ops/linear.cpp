// Linear: block by block of rows, panel by panel of outputs, each tile finished while it is in the first cache.
#include <algorithm>
#include <cstring>

#include "core/fixed.h"
#include "kernels/scalar/attention_scalar.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

enum Out : std::int64_t { OUT_CODES, OUT_ACC, OUT_I32 };

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Linear::Linear(const Record& record, const Scope& scope) : machine_(scope.machine) {
    shape_of_record(record, 1, 2, 5);
    const Value& x = input(record, scope, 0);
    const Array& w = record.arrays[0];
    inputs_ = x.channels();
    need(w.dtype == DType::i8 && w.shape.size() == 2 && w.shape[1] == inputs_ && w.shape[0] > 0,
         "weights must be i8 [O, K]");
    outputs_ = w.shape[0];
    rows_ = x.rows();
    need(count_of(w) <= MAX_ELEMENTS && bound_multiply(rows_, outputs_) <= MAX_ELEMENTS, "a product is too large");
    wide_in_ = x.dtype == DType::u16;
    const Array& bias = record.arrays[1];
    need(bias.dtype == DType::i32 && bias.shape == Shape({outputs_}), "bias must be i32 [O]");
    const auto* bias_data = static_cast<const std::int32_t*>(bias.data);
    const auto* weights = static_cast<const std::int8_t*>(w.data);
    // Positive and negative parts alone bound every partial sum, in any order.
    std::vector<std::int64_t> lows, highs;
    std::int64_t lo = 0, hi = 0;
    for (std::int64_t o = 0; o < outputs_; ++o) {
        std::int64_t sum = 0, size = 0;
        for (std::int64_t k = 0; k < inputs_;) {
            std::int32_t part = 0, part_size = 0;  // 32 bits for a stretch, which compilers turn into vectors
            for (const std::int64_t end = std::min(inputs_, k + 4096); k < end; ++k) {
                const std::int32_t weight = weights[o * inputs_ + k];
                part += weight;
                part_size += weight < 0 ? -weight : weight;
            }
            sum += part, size += part_size;
        }
        const std::int64_t b = bias_data[o];
        highs.push_back((size + sum) / 2 * x.hi + std::max<std::int64_t>(b, 0));
        lows.push_back((sum - size) / 2 * x.hi + std::min<std::int64_t>(b, 0));
        hi = std::max(hi, highs.back()), lo = std::min(lo, lows.back());
    }
    bound_ = std::max(hi, -lo);
    prove(bound_, 31, "an accumulator");

    Shape shape = x.shape;
    shape.back() = outputs_;
    const std::int64_t out = within(record.ints[0], OUT_CODES, OUT_I32, "out");
    if (out == OUT_ACC) {
        value = Value{DType::i32, shape, lo, hi};
        epilogue_.kind = Epilogue::ACC;
    } else {
        const std::vector<std::int64_t> mult = integers(record.arrays[2], 0, (std::int64_t{1} << 31) - 1, "mult");
        const std::vector<std::int64_t> shift = integers(record.arrays[3], 1, 62, "shift");
        need(static_cast<std::int64_t>(mult.size()) == outputs_ && mult.size() == shift.size(),
             "mult and shift must have O entries");
        std::vector<std::int32_t> zero(mult.size());
        if (out == OUT_CODES) {
            value = codes(record.ints[1], shape);
            zero = channels_of(record.arrays[4], outputs_, 0, value.hi, "y_zero");
            epilogue_.kind = Epilogue::CODES;
        } else {
            std::int64_t largest = 0;
            for (std::size_t o = 0; o < mult.size(); ++o) {
                const int s = static_cast<int>(shift[o]);
                largest = std::max({largest, requantize(highs[o], mult[o], s), -requantize(lows[o], mult[o], s)});
            }
            prove(largest, 31, "a score");
            value = Value{DType::i32, shape, -largest, largest};
            epilogue_.kind = Epilogue::I32;
        }
        rescale_ = RescaleConstants({mult.begin(), mult.end()}, {shift.begin(), shift.end()}, std::move(zero), value.hi,
                                    bias_data);
    }
    epilogue_.wide = value.dtype == DType::u16;
    set_bias({bias_data, bias_data + outputs_});
    if (wide_in_) {
        plain_.assign(weights, weights + outputs_ * inputs_);
    } else {
        packed_ = machine_.gemm->pack(weights, outputs_, inputs_);
    }
    const Gemm& gemm = *machine_.gemm;
    tile_ = (gemm.rows * gemm.columns + 15) / 16 * 16;  // each starts at a cache line
    row_blocks_ = (rows_ + gemm.rows - 1) / gemm.rows;
    panels_ = (outputs_ + gemm.columns - 1) / gemm.columns;
    // Few rows (the class token): threads share the outputs instead.
    panel_groups_ = row_blocks_ >= 8 ? 1 : std::min<std::int64_t>(panels_, 8);
}

void Linear::set_bias(std::vector<std::int32_t> bias) {
    bias_.assign(bias.begin(), bias.end());
    bias_.resize((bias_.size() + 63) / 64 * 64);  // vectors may read past the last output
}

std::int64_t Linear::items() const { return wide_in_ ? rows_ : row_blocks_ * panel_groups_; }

std::size_t Linear::scratch() const {
    const std::int64_t tiles =
        packed_ != nullptr && packed_->passes() > 1 ? (panels_ + panel_groups_ - 1) / panel_groups_ : 1;
    const std::size_t gathered = take_ == nullptr ? 0 : static_cast<std::size_t>(machine_.gemm->rows * inputs_);
    return aligned(machine_.gemm->block_bytes(inputs_)) +
           static_cast<std::size_t>(tiles * tile_) * sizeof(std::int32_t) + gathered;
}

std::size_t Linear::bytes() const {
    const std::size_t rows = take_ == nullptr ? 0 : take_->bytes();
    return (packed_ ? packed_->bytes() : plain_.size()) + bias_.size() * 4 + rescale_.bytes() + tables_.size() + rows;
}

void Linear::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    Epilogue epilogue = epilogue_;
    epilogue.bias = bias_.data();
    epilogue.rescale = rescale_.view();
    epilogue.tables = tables_.data(), epilogue.starts = starts_.data();
    if (add_ != nullptr) add_->view(epilogue, frame[residual_]);
    void* y = frame[output];
    if (wide_in_) {  // no recipe does this: one output after the other
        const scalar::Codes x{frame[inputs[0]], true};
        for (std::int64_t r = begin; r < end; ++r) {
            for (std::int64_t o = 0; o < outputs_; ++o) {
                std::int32_t acc = 0;
                for (std::int64_t k = 0; k < inputs_; ++k) {
                    acc += static_cast<std::int32_t>(x[r * inputs_ + k]) *
                           plain_[static_cast<std::size_t>(o * inputs_ + k)];
                }
                kernels_scalar()->finish(epilogue, {&acc, 1, 1, 1, r, o, outputs_}, y);
            }
        }
        return;
    }
    const Gemm& gemm = *machine_.gemm;
    std::uint8_t* block = scratch;
    auto* acc = reinterpret_cast<std::int32_t*>(scratch + aligned(gemm.block_bytes(inputs_)));
    std::int64_t packed_block = -1;
    for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t number = item / panel_groups_, group = item % panel_groups_;
        const std::int64_t row = number * gemm.rows;
        const int count = static_cast<int>(std::min<std::int64_t>(gemm.rows, rows_ - row));
        if (number != packed_block) {
            const std::uint8_t* x = frame[inputs[0]];
            if (take_ == nullptr) {
                x += row * inputs_;
            } else {
                // The scratch's last part, past the block and all tiles.
                std::uint8_t* gathered = scratch + this->scratch() - static_cast<std::size_t>(gemm.rows * inputs_);
                take_->gather(x, row * parts_, (row + count) * parts_, gathered);
                x = gathered;
            }
            gemm.pack_rows(x, inputs_, count, inputs_, block);
            packed_block = number;
        }
        const std::int64_t first = panels_ * group / panel_groups_, last = panels_ * (group + 1) / panel_groups_;
        const int passes = packed_->passes();
        for (int pass = 0; pass < passes; ++pass) {
            for (std::int64_t panel = first; panel < last; ++panel) {
                std::int32_t* tile = passes == 1 ? acc : acc + (panel - first) * tile_;
                packed_->multiply_pass(pass, panel, block, count, tile);
                if (pass + 1 < passes) continue;
                const std::int64_t channel = panel * gemm.columns;
                const int taken = static_cast<int>(std::min<std::int64_t>(gemm.columns, outputs_ - channel));
                machine_.kernels->finish(epilogue, {tile, count, gemm.columns, taken, row, channel, outputs_}, y);
            }
        }
    }
}

bool Linear::join(const Lookup& lookup) {
    if (!gives_codes()) return false;
    epilogue_.kind = Epilogue::LOOKUP;
    epilogue_.wide = lookup.value.dtype == DType::u16;
    for (const std::uint8_t which : lookup.which) starts_.push_back(static_cast<std::int32_t>(which * lookup.length));
    starts_.resize((starts_.size() + 63) / 64 * 64);
    const std::size_t count = lookup.tables.size();
    tables_.resize(epilogue_.wide ? 2 * count : count);
    for (std::size_t i = 0; i < count; ++i) {
        if (epilogue_.wide) {
            std::memcpy(tables_.data() + 2 * i, &lookup.tables[i], 2);
        } else {
            tables_[i] = static_cast<std::uint8_t>(lookup.tables[i]);
        }
    }
    output = lookup.output, value = lookup.value, tag = "linear + lookup";
    return true;
}

bool Linear::join(std::unique_ptr<Op>& op) {
    const Add& add = dynamic_cast<const Add&>(*op);
    if (!gives_acc() || add.acc() < 0 || add.inputs[static_cast<std::size_t>(add.acc())] != output) return false;
    residual_ = add.inputs[static_cast<std::size_t>(1 - add.acc())];
    inputs.push_back(residual_);
    epilogue_ = add.epilogue;
    output = add.output, value = add.value, tag = "linear + add";
    add_ = &add;
    add_owner_ = std::move(op);
    return true;
}

bool Linear::read_by(std::unique_ptr<Op>& op) {
    const Take& take = dynamic_cast<const Take&>(*op);
    const auto row = static_cast<std::int64_t>(take.fill.size());
    if (wide_in_ || inputs_ % row != 0 || take.items() != rows_ * (inputs_ / row)) return false;
    parts_ = inputs_ / row;
    inputs[0] = take.inputs[0];
    tag = "take + " + tag;
    take_ = &take;
    take_owner_ = std::move(op);
    return true;
}

}  // namespace fqvit
