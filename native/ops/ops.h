// The ops that fusion (core/fuse.cpp) inspects, except Depthwise (elementwise.h). LayerNorm, Mean and Concat are
// accessible only through make functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/aligned.h"
#include "kernels/gemm.h"
#include "kernels/kernels.h"
#include "kernels/table_lines.h"
#include "ops/op.h"
#include "ops/requantization.h"

namespace fqvit {

// y = tables[table_of[c]][x]. One table per alpha is computed at load time, with all rounding included.
class Lookup final : public Op {
public:
    Lookup(const LookupFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return table_of.size() + tables.size() * sizeof(std::uint16_t); }

    std::vector<std::uint8_t> table_of;  // [C]
    std::vector<std::uint16_t> tables;   // [tables, length]
    std::int64_t length;
    bool wide_in;
};

// The tables of a lookup that is the epilogue of another op.
class FusedTables {
public:
    // Makes `epilogue` replace its codes by table entries. Returns false if the epilogue does not compute codes.
    bool fuse(const Lookup& lookup, Epilogue& epilogue);
    // Returns the order that sorts the channels by table: new channel i is old channel order[i]. Empty if they are
    // already sorted.
    std::vector<std::int32_t> sorting_order() const;
    void reorder(const std::vector<std::int32_t>& order);
    void view(Epilogue& epilogue) const {
        epilogue.tables = tables_.data(), epilogue.starts = starts_.data();
        epilogue.lines = lines_.empty() ? nullptr : lines_.data();
    }
    std::size_t bytes() const {
        return tables_.size() + starts_.size() * sizeof(std::int32_t) + lines_.size() * sizeof(TableLines);
    }

private:
    std::vector<std::int32_t> starts_;
    std::vector<std::uint8_t> tables_;
    AlignedVector<TableLines> lines_;  // empty if a table does not have this form
};

// y = clamp(round_shift(sum over both terms of (x - zero) * 2^alpha * mult, shift) + y_zero)
class Add final : public Op {
public:
    Add(const AddFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::size_t bytes() const override;

    // The index of the term that is a plain accumulator, so that the sum can be the epilogue of a matrix product; -1
    // if there is none.
    int acc_term() const { return acc_term_; }
    // Fills in the pointers of an epilogue. x: the values of the other term.
    void view(Epilogue& e, const void* x) const;

    Epilogue epilogue{};  // valid only if acc_term() >= 0 or a term of codes is staged

private:
    struct Term {
        DType dtype;
        std::vector<std::int32_t> mult, zero, alpha;
        std::int64_t count;  // elements; a constant with fewer elements than y repeats
    };
    bool make_epilogue(std::size_t acc_term);
    bool stage_codes(std::size_t staged_term);
    void fill_epilogue(const Term& acc, const Term& x);
    void run_staged(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const;

    const Kernels* kernels_;
    Term terms_[2];
    std::vector<std::uint8_t> shift_;  // [C]
    std::vector<std::int32_t> zero_;
    std::int64_t bound_;  // bound of the sum before its shift
    int acc_term_;
    int staged_term_ = -1;  // the term whose codes are converted to accumulators, so that the epilogue can add them
    RequantizationConstants requantization_;
    std::vector<std::int32_t> x_zero_, x_alpha_, x_mult_, no_bias_;
};

// y[i] = x[index[i]] for rows of x, or `fill` if index[i] is -1.
class Take final : public Op {
public:
    Take(const TakeFields& fields, Scope& scope);
    std::int64_t items() const override { return static_cast<std::int64_t>(index.size()); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return index.size() * sizeof(std::int32_t) + fill.size(); }
    // Writes rows begin..end - 1 of the output to y.
    void gather(const std::uint8_t* x, std::int64_t begin, std::int64_t end, std::uint8_t* y) const;

    std::vector<std::int32_t> index;
    std::vector<std::uint8_t> fill;  // the bytes of one row
};

// acc[o] = sum_k x[k] * w[o, k] + bias[o], then an epilogue: codes, the accumulator itself, a requantized i32 or,
// after fusion, a table or a residual sum.
class Linear final : public Op {
public:
    Linear(const LinearFields& fields, Scope& scope);
    std::int64_t items() const override;
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::int64_t macs() const override { return rows_ * inputs_ * outputs_; }
    std::size_t bytes() const override;

    // Each function fuses another op into this one, if possible, and returns whether it did. Linear then owns a fused
    // Add or Take, because it uses their constants.
    bool fuse_lookup(const Lookup& lookup);
    bool fuse_add(std::unique_ptr<Op>& add);
    // Gathers the rows of a take while packing. A row of x may consist of several rows of the take.
    bool fuse_take(std::unique_ptr<Op>& take);
    // Sorts the outputs by table, and reorders the inputs of `reader` in the same way. `reader` must be the only op
    // that reads these outputs. Does nothing if the kernels do not benefit or if other ops share the weights of either
    // op.
    void group_tables(Linear& reader);

private:
    bool owns_weights() const;
    void run_wide(const Epilogue& epilogue, Frame frame, std::int64_t begin, std::int64_t end) const;

    const Kernels* kernels_;
    std::int64_t rows_, inputs_, outputs_;
    bool wide_in_;
    std::int64_t row_blocks_, panels_, panel_groups_, tile_;
    // Several small tiles are computed before their epilogues, which takes less time than one at a time. They fit in
    // the L1 cache together.
    std::int64_t tiles_per_call() const { return tile_ < 128 ? 8 : 1; }
    std::shared_ptr<const LinearWeights> weights_;
    AlignedVector<std::int32_t> bias_;
    RequantizationConstants requantization_;
    Epilogue epilogue_{};
    FusedTables tables_;
    std::unique_ptr<Op> add_owner_, take_owner_;
    const Add* add_ = nullptr;
    int residual_ = -1;  // the value that is added
    const Take* take_ = nullptr;
    std::int64_t rows_of_take_ = 1;  // rows of the take that form one row of x
};

// Reshapes to `view`, selects one index of one axis, permutes the axes, reshapes to the output.
class Permute final : public Op {
public:
    Permute(const PermuteFields& fields, Scope& scope);
    std::int64_t items() const override { return outer_; }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;

    bool is_reshape() const { return outer_ == 1 && select.empty(); }

    Shape view, perm, select;

private:
    Shape sizes_, strides_;                    // output axes that are not contiguous; strides are in bytes of the input
    std::int64_t first_, contiguous_, outer_;  // offset in bytes, bytes per contiguous run, number of runs
};

// y = clamp(requantize(sum_k (a - a_zero) * (b - b_zero) + bias) + y_zero), for each slice of the last two axes.
class MatMul final : public Op {
public:
    MatMul(const MatMulFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::int64_t macs() const override { return value.count() * inner; }
    std::size_t bytes() const override { return (mults.size() + bias.size() + index.size()) * sizeof(std::int32_t); }

    const Kernels* kernels;
    std::int64_t inner, mult, shift, a_zero, b_zero, y_zero, last, heads;  // mult: the largest of all heads
    bool b_rows, wide_a, wide_b;                                           // b_rows: b is [K, N], else [N, K]
    std::vector<std::int32_t> mults;                                       // [H], or empty: all heads have `mult`
    std::vector<std::int32_t> bias;                                        // [R, H], a table of R values per head
    std::vector<std::int32_t> index;                                       // [M, N], rows of this table
};

// log_softmax, softmax and row_codes.
class Softmax final : public Op {
public:
    Softmax(const LogSoftmaxFields& fields, Scope& scope);
    Softmax(const SoftmaxFields& fields, Scope& scope);
    Softmax(const RowCodesFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return table.size() * sizeof(std::int32_t) + region.size(); }

    Attention::Kind kind;
    std::int64_t mult = 0, shift = 1, last;
    bool wide_in;
    std::vector<std::int32_t> table;
    std::vector<std::uint8_t> region;

private:
    // Reads the scores and their regions.
    Value read_scores(const std::string& x, const OptionalName& region_name, Scope& scope);
    // Reads a table of exponentials; returns its largest entry.
    std::int64_t read_exponentials(const std::string& y, std::int64_t tokens, Scope& scope);
};

// Attention times V: shift_matmul and attend.
class WeightedSum final : public Op {
public:
    WeightedSum(const ShiftMatMulFields& fields, Scope& scope);
    WeightedSum(const AttendFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::int64_t macs() const override { return value.count() * inner; }

    const Kernels* kernels;
    std::int64_t inner, mult, shift, v_zero, y_zero, last;
    std::int64_t largest_weight = 0;  // attend only: each row is divided by the sum of its weights
    bool wide_v;
    std::vector<std::int32_t> weight;  // by code

private:
    // Reads both inputs, checks their shapes and sets the fields that both ops have; returns the attention codes and V.
    std::pair<Value, Value> read_inputs(const std::string& a, const std::string& v, Scope& scope);
    void set_output(std::int64_t bits, std::int64_t zero, const Value& a, const Value& v);
};

std::unique_ptr<Op> make_layernorm(const LayerNormFields& fields, Scope& scope);
std::unique_ptr<Op> make_mean(const MeanFields& fields, Scope& scope);
std::unique_ptr<Op> make_concat(const ConcatFields& fields, Scope& scope);

}  // namespace fqvit
