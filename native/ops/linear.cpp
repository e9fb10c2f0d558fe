// Linear as a blocked product: packs a block of rows, multiplies it with one panel of weights after the other, and
// applies the epilogue to each tile of accumulators while it is in the L1 cache.
#include <algorithm>
#include <cstring>

#include "core/codes.h"
#include "core/fixed.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace fqvit {
namespace {

enum Out : std::int64_t { OUT_CODES, OUT_ACC, OUT_I32 };

// The length of per-channel arrays is a multiple of this, because vectors read past the last output.
constexpr std::size_t PADDING = 64;

// The range of sum_k x[k] w[k] + b for x in 0..x_hi, from the sums of the negative and of the positive weights. It also
// bounds every partial sum, in any order.
struct Range {
    std::int64_t lo, hi;
};

Range accumulator_range(const std::int8_t* w, std::int64_t inputs, std::int64_t x_hi, std::int64_t bias) {
    std::int64_t sum = 0, size = 0;
    for (std::int64_t k = 0; k < inputs;) {
        std::int32_t part = 0, part_size = 0;  // 32 bits are enough for 4096 weights and let compilers vectorize
        for (const std::int64_t end = std::min(inputs, k + 4096); k < end; ++k) {
            const std::int32_t weight = w[k];
            part += weight;
            part_size += weight < 0 ? -weight : weight;
        }
        sum += part, size += part_size;
    }
    return {(sum - size) / 2 * x_hi + std::min<std::int64_t>(bias, 0),
            (sum + size) / 2 * x_hi + std::max<std::int64_t>(bias, 0)};
}

}  // namespace

Linear::Linear(const Record& record, const Scope& scope) : kernels_(scope.kernels) {
    require_fields(record, 1, 2, 5);
    const Value& x = codes_input(record, scope, 0);
    const Array &w = record.arrays[0], &bias = record.arrays[1];
    inputs_ = x.channels();
    require(w.dtype == DType::i8 && w.shape.size() == 2 && w.shape[1] == inputs_ && w.shape[0] > 0,
            "weights: ", w.dtype, " ", w.shape, ", expected i8 [O, ", inputs_, "]");
    outputs_ = w.shape[0];
    rows_ = x.rows();
    require(count_of(w) <= MAX_ELEMENTS && bound_multiply(rows_, outputs_) <= MAX_ELEMENTS, "weights: ", w.shape,
            " for ", rows_, " rows, expected at most ", MAX_ELEMENTS, " weights and outputs");
    wide_in_ = x.is_wide();
    require(bias.dtype == DType::i32 && bias.shape == Shape({outputs_}), "bias: ", bias.dtype, " ", bias.shape,
            ", expected i32 [", outputs_, "]");
    const auto* bias_data = static_cast<const std::int32_t*>(bias.data);
    const auto* weights = static_cast<const std::int8_t*>(w.data);
    std::vector<Range> ranges;
    std::int64_t lo = 0, hi = 0;
    for (std::int64_t o = 0; o < outputs_; ++o) {
        ranges.push_back(accumulator_range(weights + o * inputs_, inputs_, x.hi, bias_data[o]));
        lo = std::min(lo, ranges.back().lo), hi = std::max(hi, ranges.back().hi);
    }
    prove(std::max(hi, -lo), 31, "accumulator");

    Shape shape = x.shape;
    shape.back() = outputs_;
    const std::int64_t out = in_range(record.ints[0], OUT_CODES, OUT_I32, "out");
    if (out == OUT_ACC) {
        value = Value{DType::i32, shape, lo, hi};
        epilogue_.kind = Epilogue::ACC;
    } else {
        const std::vector<std::int64_t> mult = read_integers(record.arrays[2], 0, MAX_MULT, "mult");
        const std::vector<std::int64_t> shift = read_integers(record.arrays[3], 1, MAX_SHIFT, "shift");
        require(static_cast<std::int64_t>(mult.size()) == outputs_ && mult.size() == shift.size(),
                "mult and shift: ", mult.size(), " and ", shift.size(), " entries, expected one per output (", outputs_,
                ")");
        std::vector<std::int32_t> zero(mult.size());
        if (out == OUT_CODES) {
            value = codes_value(record.ints[1], shape);
            zero = read_channels(record.arrays[4], outputs_, 0, value.hi, "y_zero");
            epilogue_.kind = Epilogue::CODES;
        } else {
            std::int64_t largest = 0;
            for (std::size_t o = 0; o < mult.size(); ++o) {
                const int s = static_cast<int>(shift[o]);
                largest =
                    std::max({largest, requantize(ranges[o].hi, mult[o], s), -requantize(ranges[o].lo, mult[o], s)});
            }
            prove(largest, 31, "score");
            value = Value{DType::i32, shape, -largest, largest};
            epilogue_.kind = Epilogue::I32;
        }
        requantization_ = RequantizationConstants({mult.begin(), mult.end()}, {shift.begin(), shift.end()},
                                                  std::move(zero), value.hi, bias_data);
    }
    epilogue_.wide = value.is_wide();
    bias_.assign(bias_data, bias_data + outputs_);
    bias_.resize(round_up(bias_.size(), PADDING));
    const Gemm& gemm = *kernels_.gemm;
    if (wide_in_) {
        plain_weights_.assign(weights, weights + outputs_ * inputs_);
    } else {
        packed_ = gemm.pack_weights(weights, outputs_, inputs_);
    }
    tile_ = round_up(std::int64_t{gemm.rows} * gemm.columns, 16);  // every tile starts at a cache line
    row_blocks_ = (rows_ + gemm.rows - 1) / gemm.rows;
    panels_ = (outputs_ + gemm.columns - 1) / gemm.columns;
    // With few rows (such as one class token), threads split the outputs instead of the rows.
    panel_groups_ = row_blocks_ >= 8 ? 1 : std::min<std::int64_t>(panels_, 8);
}

std::int64_t Linear::items() const { return wide_in_ ? rows_ : row_blocks_ * panel_groups_; }

// Scratch: the packed block of rows, then the tiles (all panels of a group if there are several K-blocks, else one),
// then the gathered rows of a fused take.
std::size_t Linear::scratch() const {
    const bool several_k_blocks = packed_ != nullptr && packed_->k_blocks() > 1;
    const std::int64_t tiles = several_k_blocks ? (panels_ + panel_groups_ - 1) / panel_groups_ : 1;
    const std::size_t gathered = take_ == nullptr ? 0 : static_cast<std::size_t>(kernels_.gemm->rows * inputs_);
    return round_up(kernels_.gemm->block_bytes(inputs_), std::size_t{64}) +
           static_cast<std::size_t>(tiles * tile_) * sizeof(std::int32_t) + gathered;
}

std::size_t Linear::bytes() const {
    const std::size_t weights = packed_ ? packed_->bytes() : plain_weights_.size();
    const std::size_t take = take_ == nullptr ? 0 : take_->bytes();
    return weights + bias_.size() * 4 + requantization_.bytes() + tables_.size() + take;
}

void Linear::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    Epilogue epilogue = epilogue_;
    epilogue.bias = bias_.data();
    epilogue.requantization = requantization_.view();
    epilogue.tables = tables_.data(), epilogue.starts = starts_.data();
    if (add_ != nullptr) add_->view(epilogue, frame[residual_]);
    if (wide_in_) {
        run_wide(epilogue, frame, begin, end);
        return;
    }
    const Gemm& gemm = *kernels_.gemm;
    std::uint8_t* block = scratch;
    auto* acc = reinterpret_cast<std::int32_t*>(scratch + round_up(gemm.block_bytes(inputs_), std::size_t{64}));
    std::int64_t packed_block = -1;
    for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t row_block = item / panel_groups_, group = item % panel_groups_;
        const std::int64_t row = row_block * gemm.rows;
        const int count = static_cast<int>(std::min<std::int64_t>(gemm.rows, rows_ - row));
        if (row_block != packed_block) {
            const std::uint8_t* x = frame[inputs[0]];
            if (take_ == nullptr) {
                x += row * inputs_;
            } else {
                std::uint8_t* gathered = scratch + this->scratch() - static_cast<std::size_t>(gemm.rows * inputs_);
                take_->gather(x, row * rows_of_take_, (row + count) * rows_of_take_, gathered);
                x = gathered;
            }
            gemm.pack_rows(x, inputs_, count, inputs_, block);
            packed_block = row_block;
        }
        const std::int64_t first = panels_ * group / panel_groups_, last = panels_ * (group + 1) / panel_groups_;
        const int k_blocks = packed_->k_blocks();
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
            for (std::int64_t panel = first; panel < last; ++panel) {
                std::int32_t* tile = k_blocks == 1 ? acc : acc + (panel - first) * tile_;
                packed_->multiply_k_block(k_block, panel, block, count, tile);
                if (k_block + 1 < k_blocks) continue;
                const std::int64_t channel = panel * gemm.columns;
                const int valid = static_cast<int>(std::min<std::int64_t>(gemm.columns, outputs_ - channel));
                kernels_.kernels->epilogue(epilogue, {tile, count, gemm.columns, valid, row, channel, outputs_},
                                           frame[output]);
            }
        }
    }
}

// u16 activations: one plain dot product per output. No recipe produces them, so this is not optimized.
void Linear::run_wide(const Epilogue& epilogue, Frame frame, std::int64_t begin, std::int64_t end) const {
    const Codes x{frame[inputs[0]], true};
    for (std::int64_t r = begin; r < end; ++r) {
        for (std::int64_t o = 0; o < outputs_; ++o) {
            std::int32_t acc = 0;
            for (std::int64_t k = 0; k < inputs_; ++k) {
                const std::int8_t weight = plain_weights_[static_cast<std::size_t>(o * inputs_ + k)];
                acc += static_cast<std::int32_t>(x[r * inputs_ + k]) * weight;
            }
            kernels_scalar()->epilogue(epilogue, {&acc, 1, 1, 1, r, o, outputs_}, frame[output]);
        }
    }
}

bool Linear::fuse_lookup(const Lookup& lookup) {
    if (epilogue_.kind != Epilogue::CODES) return false;
    epilogue_.kind = Epilogue::LOOKUP;
    epilogue_.wide = lookup.value.is_wide();
    for (const std::uint8_t table : lookup.table_of) {
        starts_.push_back(static_cast<std::int32_t>(table * lookup.length));
    }
    starts_.resize(round_up(starts_.size(), PADDING));
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

bool Linear::fuse_add(std::unique_ptr<Op>& op) {
    const Add& add = dynamic_cast<const Add&>(*op);
    if (epilogue_.kind != Epilogue::ACC || add.acc_term() < 0) return false;
    const auto acc_term = static_cast<std::size_t>(add.acc_term());
    if (add.inputs[acc_term] != output) return false;
    residual_ = add.inputs[1 - acc_term];
    inputs.push_back(residual_);
    epilogue_ = add.epilogue;
    output = add.output, value = add.value, tag = "linear + add";
    add_ = &add;
    add_owner_ = std::move(op);
    return true;
}

bool Linear::fuse_take(std::unique_ptr<Op>& op) {
    const Take& take = dynamic_cast<const Take&>(*op);
    const auto row = static_cast<std::int64_t>(take.fill.size());
    if (wide_in_ || inputs_ % row != 0 || take.items() != rows_ * (inputs_ / row)) return false;
    rows_of_take_ = inputs_ / row;
    inputs[0] = take.inputs[0];
    tag = "take + " + tag;
    take_ = &take;
    take_owner_ = std::move(op);
    return true;
}

}  // namespace fqvit
