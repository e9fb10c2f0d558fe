// Linear as a blocked product: packs a block of rows, multiplies it by one panel of weights after the other, and
// applies the epilogue to each tile of accumulators while it is in the L1 cache.
#include <algorithm>
#include <cstring>

#include "core/codes.h"
#include "core/fixed.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

// The length of per-channel arrays is a multiple of this, because vectors read past the last output.
constexpr std::size_t PADDING = 64;

constexpr std::int64_t MAX_GROUP = 65536;
constexpr int GROUP_BITS = 4;  // bits per group: its exponent, or the index of its codebook
constexpr std::int64_t MAX_CODEBOOKS = 16;

std::int64_t row_bytes(std::int64_t count, int width) { return (count * width + 7) / 8; }

// Returns value i of a row of packed values. width: bits per value, at most 8. The first value is in the lowest bits of
// byte 0.
int packed_value(const std::uint8_t* row, std::int64_t i, int width) {
    const std::int64_t byte = i * width / 8;
    const int bit = static_cast<int>(i * width % 8);
    const int low = row[byte], high = bit + width > 8 ? row[byte + 1] : 0;
    return (low | high << 8) >> bit & ((1 << width) - 1);
}

void require_zero_padding(const std::uint8_t* row, std::int64_t count, int width) {
    const int used = static_cast<int>(count * width % 8);  // bits of the last byte that hold values; 0: all
    require(used == 0 || row[row_bytes(count, width) - 1] >> used == 0, "packed weights: a padding bit is not 0");
}

// Returns the weight of every code: one row of 2^width weights per codebook, or per exponent of a group.
std::vector<std::int8_t> code_values(const LinearFields& fields, int width, Scope& scope) {
    const int codes = 1 << width, sign = codes / 2;
    if (fields.codebooks != 0) {
        const std::int64_t books = in_range(fields.codebooks, 1, MAX_CODEBOOKS, "codebooks");
        require(fields.group != 0, "codebooks is ", books, ", but group is 0");
        const Constant levels = scope.constant(fields.weight_part("codebooks"), {DType::i8}, {books, codes});
        return {levels.as<std::int8_t>(), levels.as<std::int8_t>() + books * codes};
    }
    std::vector<std::int8_t> values;
    for (int exponent = 0; exponent <= (fields.group == 0 ? 0 : 8 - width); ++exponent) {
        for (int code = 0; code < codes; ++code) {
            values.push_back(static_cast<std::int8_t>(((code ^ sign) - sign) * (1 << exponent)));
        }
    }
    return values;
}

// Unpacks weights of `width` bits. Without groups they are codes in two's complement; the weights of a group are codes
// times 2^exponent, or levels of a codebook.
std::vector<std::int8_t> unpack_weights(const LinearFields& fields, std::int64_t inputs, Scope& scope,
                                        std::int64_t& outputs) {
    const std::int64_t group = fields.group == 0 ? inputs : in_range(fields.group, 2, MAX_GROUP, "group");
    const int width = fields.width == 0 ? 4 : static_cast<int>(in_range(fields.width, 2, 7, "width"));
    const std::vector<std::int8_t> values = code_values(fields, width, scope);
    const std::int64_t last = (static_cast<std::int64_t>(values.size()) >> width) - 1;  // the last row of `values`
    const std::int64_t groups = (inputs + group - 1) / group;
    const std::int64_t row = row_bytes(inputs, width), group_row = row_bytes(groups, GROUP_BITS);
    const Constant codes = scope.constant(fields.weight_part("w"), {DType::u8}, {ANY, row});
    outputs = codes.shape[0];
    const char* part = fields.codebooks == 0 ? "exponent" : "choice";  // each group's row of `values`
    Constant rows;
    if (fields.group != 0) rows = scope.constant(fields.weight_part(part), {DType::u8}, {outputs, group_row});
    require(outputs <= MAX_ELEMENTS / inputs, "too many weights: ", outputs, " x ", inputs, ", at most ", MAX_ELEMENTS);
    std::vector<std::int8_t> out(static_cast<std::size_t>(outputs * inputs));
    for (std::int64_t o = 0; o < outputs; ++o) {
        const std::uint8_t* code_row = codes.as<std::uint8_t>() + o * row;
        require_zero_padding(code_row, inputs, width);
        const std::uint8_t* rows_of_groups = nullptr;
        if (fields.group != 0) {
            rows_of_groups = rows.as<std::uint8_t>() + o * group_row;
            require_zero_padding(rows_of_groups, groups, GROUP_BITS);
        }
        for (std::int64_t g = 0; g < groups; ++g) {
            const int chosen = rows_of_groups == nullptr ? 0 : packed_value(rows_of_groups, g, GROUP_BITS);
            const std::int8_t* value = values.data() + (in_range(chosen, 0, last, part) << width);
            for (std::int64_t k = g * group; k < std::min(inputs, (g + 1) * group); ++k) {
                out[static_cast<std::size_t>(o * inputs + k)] = value[packed_value(code_row, k, width)];
            }
        }
    }
    return out;
}

// Returns the packed weights of an op, from the store if an earlier op has packed them.
std::shared_ptr<const LinearWeights> read_weights(const LinearFields& fields, const Value& x, Scope& scope) {
    const std::int64_t inputs = x.channels();
    const std::string name = fields.weight_part("w");
    const WeightStore::Key key{name, x.is_wide()};
    if (auto found = scope.weights.find(key)) {
        require(found->inputs == inputs, "constant '", name, "' has ", found->inputs, " inputs, expected ", inputs);
        return found;
    }
    auto made = std::make_shared<LinearWeights>();
    made->inputs = inputs;
    std::vector<std::int8_t> unpacked;
    Constant constant;
    const std::int8_t* w = nullptr;
    if (!fields.packed()) {
        constant = scope.constant(name, {DType::i8}, {ANY, inputs});
        made->outputs = constant.shape[0];
        w = constant.as<std::int8_t>();
    } else {
        unpacked = unpack_weights(fields, inputs, scope, made->outputs);
        w = unpacked.data();
    }
    for (std::int64_t o = 0; o < made->outputs; ++o) {
        const WeightSums sums = sum_weights(w + o * inputs, inputs);
        made->positive.push_back(sums.positive), made->negative.push_back(sums.negative);
    }
    made->gemm = gemm_for_weights(scope.kernels.gemm, w, made->outputs * inputs);
    if (x.is_wide()) {
        made->plain.assign(w, w + made->outputs * inputs);
    } else {
        made->packed = made->gemm->pack_weights(w, made->outputs, inputs);
    }
    scope.weights.add(key, made);
    return made;
}

}  // namespace

Linear::Linear(const LinearFields& fields, Scope& scope) : kernels_(scope.kernels.kernels) {
    const Operand input = scope.codes(fields.x);
    const Value& x = input.value;
    inputs = {input.number};
    inputs_ = x.channels();
    rows_ = x.rows();
    wide_in_ = x.is_wide();
    weights_ = read_weights(fields, x, scope);
    outputs_ = weights_->outputs;
    require(bound_multiply(rows_, outputs_) <= MAX_ELEMENTS, "too large: ", rows_, " rows of ", outputs_, " outputs");
    const Constant bias = scope.constant(fields.y + ".bias", {DType::i32}, {outputs_});
    const auto* bias_data = bias.as<std::int32_t>();
    // The range of sum_k x[k] * w[k] + b for x in 0..x.hi, which also bounds every partial sum, in any order.
    std::vector<std::int64_t> lows, highs;
    std::int64_t lo = 0, hi = 0;
    for (std::int64_t o = 0; o < outputs_; ++o) {
        const auto at = static_cast<std::size_t>(o);
        const std::int64_t b = bias_data[o];
        lows.push_back(weights_->negative[at] * x.hi + std::min<std::int64_t>(b, 0));
        highs.push_back(weights_->positive[at] * x.hi + std::max<std::int64_t>(b, 0));
        lo = std::min(lo, lows.back()), hi = std::max(hi, highs.back());
    }
    prove(std::max(hi, -lo), 31, "acc");

    Shape shape = x.shape;
    shape.back() = outputs_;
    if (fields.out == LinearOut::acc) {
        value = Value{DType::i32, shape, lo, hi};
        epilogue_.kind = Epilogue::ACC;
    } else {
        const Constant mults = scope.constant(fields.y + ".mult", {DType::i32, DType::u16}, {outputs_});
        const Constant shifts = scope.constant(fields.y + ".shift", {DType::u8}, {outputs_});
        const std::vector<std::int64_t> mult = read_as<std::int64_t>(mults, 0, MAX_MULT, "mult");
        const std::vector<std::int64_t> shift = read_as<std::int64_t>(shifts, 1, MAX_SHIFT, "shift");
        std::vector<std::int32_t> zero(mult.size());
        if (fields.out == LinearOut::codes) {
            value = codes_value(fields.bits, shape);
            zero = scope.zeros(fields.y_zero, outputs_, 0, value.hi, "y_zero");
            epilogue_.kind = Epilogue::CODES;
        } else {
            std::int64_t largest = 0;
            for (std::size_t o = 0; o < mult.size(); ++o) {
                const int s = static_cast<int>(shift[o]);
                largest = std::max({largest, requantize(highs[o], mult[o], s), -requantize(lows[o], mult[o], s)});
            }
            prove(largest, 31, "y");
            value = Value{DType::i32, shape, -largest, largest};
            epilogue_.kind = Epilogue::I32;
        }
        requantization_ = RequantizationConstants({mult.begin(), mult.end()}, {shift.begin(), shift.end()},
                                                  std::move(zero), value.hi, bias_data, std::max(hi, -lo));
    }
    epilogue_.wide = value.is_wide();
    bias_.assign(bias_data, bias_data + outputs_);
    bias_.resize(round_up(bias_.size(), PADDING));
    const Gemm& gemm = *weights_->gemm;
    tile_ = round_up(std::int64_t{gemm.rows} * gemm.columns, 16);  // every tile starts at a cache line
    row_blocks_ = (rows_ + gemm.rows - 1) / gemm.rows;
    if (row_blocks_ >= 8) row_blocks_ += row_blocks_ % 2;  // two threads get the same number of blocks
    panels_ = (outputs_ + gemm.columns - 1) / gemm.columns;
    // With few rows (such as one class token), threads split the outputs instead of the rows.
    panel_groups_ = row_blocks_ >= 8 ? 1 : std::min<std::int64_t>(panels_, 8);
}

std::int64_t Linear::items() const { return wide_in_ ? rows_ : row_blocks_ * panel_groups_; }

// Scratch: the packed block of rows, then the tiles (one per panel of a group if there are several K-blocks, else those
// of one call), then the gathered rows of a fused take.
std::size_t Linear::scratch() const {
    const bool several_k_blocks = weights_->packed != nullptr && weights_->packed->k_blocks() > 1;
    const std::int64_t tiles = several_k_blocks ? (panels_ + panel_groups_ - 1) / panel_groups_ : tiles_per_call();
    const std::size_t gathered = take_ == nullptr ? 0 : static_cast<std::size_t>(weights_->gemm->rows * inputs_);
    return round_up(weights_->gemm->block_bytes(inputs_), std::size_t{64}) +
           static_cast<std::size_t>(tiles * tile_) * sizeof(std::int32_t) + gathered;
}

std::size_t Linear::bytes() const {
    const std::size_t take = take_ == nullptr ? 0 : take_->bytes();
    return bias_.size() * 4 + requantization_.bytes() + tables_.bytes() + take;
}

void Linear::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    Epilogue epilogue = epilogue_;
    epilogue.bias = bias_.data();
    epilogue.requantization = requantization_.view();
    tables_.view(epilogue);
    if (add_ != nullptr) add_->view(epilogue, frame[residual_]);
    if (wide_in_) {
        run_wide(epilogue, frame, begin, end);
        return;
    }
    const Gemm& gemm = *weights_->gemm;
    const PackedWeights& packed = *weights_->packed;
    std::uint8_t* block = scratch;
    auto* acc = reinterpret_cast<std::int32_t*>(scratch + round_up(gemm.block_bytes(inputs_), std::size_t{64}));
    std::int64_t packed_block = -1;
    for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t row_block = item / panel_groups_, group = item % panel_groups_;
        // Blocks of nearly the same size: a tile of one row would take as long as one of several rows.
        const std::int64_t row = rows_ * row_block / row_blocks_;
        const int count = static_cast<int>(rows_ * (row_block + 1) / row_blocks_ - row);
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
        const int last_k_block = packed.k_blocks() - 1;
        for (int k_block = 0; k_block < last_k_block; ++k_block) {
            packed.multiply_k_block(k_block, first, last, block, count, acc, tile_);
        }
        for (std::int64_t panel = first, next = first; panel < last; panel = next) {
            next = std::min(last, panel + tiles_per_call());
            // With one K-block, the tiles of all calls share their memory.
            std::int32_t* sums = acc + (last_k_block == 0 ? 0 : (panel - first) * tile_);
            packed.multiply_k_block(last_k_block, panel, next, block, count, sums, tile_);
            for (std::int64_t i = panel; i < next; ++i, sums += tile_) {
                const std::int64_t channel = i * gemm.columns;
                const int valid = static_cast<int>(std::min<std::int64_t>(gemm.columns, outputs_ - channel));
                kernels_->epilogue(epilogue, {sums, count, gemm.columns, valid, row, channel, outputs_}, frame[output]);
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
                const std::int8_t weight = weights_->plain[static_cast<std::size_t>(o * inputs_ + k)];
                acc += static_cast<std::int32_t>(x[r * inputs_ + k]) * weight;
            }
            kernels_scalar()->epilogue(epilogue, {&acc, 1, 1, 1, r, o, outputs_}, frame[output]);
        }
    }
}

bool Linear::fuse_lookup(const Lookup& lookup) {
    if (!tables_.fuse(lookup, epilogue_)) return false;
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

// The store holds one reference to the weights, each op that uses them another one.
bool Linear::owns_weights() const { return weights_->packed != nullptr && weights_.use_count() == 2; }

void Linear::group_tables(Linear& reader) {
    if (epilogue_.kind != Epilogue::LOOKUP || !kernels_->groups_tables) return;
    if (!owns_weights() || !reader.owns_weights() || reader.inputs_ != outputs_ || reader.take_ != nullptr) return;
    const std::vector<std::int32_t> order = tables_.sorting_order();
    if (order.empty() || !weights_->packed->reorder_outputs(order)) return;
    reader.weights_->packed->reorder_inputs(order);
    tables_.reorder(order);
    bias_ = reordered(bias_, order);
    requantization_ = requantization_.reordered(order, bias_.data());
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
