// The ops of a program, checked and made ready to run on one image. Meaning: src/fqvit/ir/ops.py, moves.py and
// attention.py.
//
// A constructor takes a Record (what Python read from the file), checks every index, shape, shift and bound again, and
// packs its constants. It trusts nothing: a record that breaks a rule raises BadProgram. After that, run() checks
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "fqvit/value.h"
#include "kernels/gemm.h"
#include "kernels/kernels.h"

namespace fqvit {

// A constant as it came; the data are only borrowed.
struct Array {
    DType dtype;
    Shape shape;
    const void* data;
};

// One op as it came. docs/explanation/engine.md lists the integers and arrays of each tag, in order.
struct Record {
    std::string tag;
    std::vector<std::int64_t> inputs;  // numbers of values: buffers and constants
    std::vector<std::int64_t> ints;
    std::vector<Array> arrays;
};

// The instruction sets that an engine uses.
struct Machine {
    const Gemm* gemm;
    const Kernels* kernels;
};

// Where every value of one image is while a program runs.
using Frame = std::uint8_t* const*;

class Op {
public:
    virtual ~Op() = default;
    // Work comes in `items` that can be done in any order and by different threads.
    virtual std::int64_t items() const = 0;
    virtual void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const = 0;
    virtual std::size_t scratch() const { return 0; }
    virtual std::int64_t macs() const { return 0; }
    virtual std::size_t bytes() const { return 0; }  // of constants kept

    std::string tag;
    std::vector<int> inputs;
    int output = -1;
    Value value{};  // of the output
};

// Everything an op may look at while it is made.
struct Scope {
    const std::vector<Value>& values;
    const std::vector<bool>& constant;  // by value: a constant, not a buffer
    const Machine& machine;
};

std::unique_ptr<Op> make_op(const Record& record, const Scope& scope);

// ---- reading records: each refuses with a message ----

void need(bool condition, const char* problem);
const Value& any_input(const Record& record, const Scope& scope, std::size_t i);     // a buffer or a constant
const Value& buffer_input(const Record& record, const Scope& scope, std::size_t i);  // a buffer of any type
const Value& input(const Record& record, const Scope& scope, std::size_t i,
                   std::size_t min_rank = 1);  // a buffer of codes
void shape_of_record(const Record& record, std::size_t inputs, std::size_t ints, std::size_t arrays);
std::int64_t within(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name);
std::vector<std::int64_t> integers(const Array& array, std::int64_t lo, std::int64_t hi,
                                   const char* name);  // of any integer type
std::vector<std::int32_t> channels_of(const Array& array, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                      const char* name);
Value codes(std::int64_t bits, Shape shape);
std::int64_t magnitude(const Value& value, std::int64_t zero_lo, std::int64_t zero_hi);
void prove(std::int64_t bound, int bits, const char* what);
std::int64_t count_of(const Array& array);

// ---- ops that fusion looks into ----

// Constants for Rescale, padded for vectors.
class RescaleConstants {
public:
    RescaleConstants() = default;
    // bias: of the accumulators, one a channel; null where there is none.
    RescaleConstants(std::vector<std::uint32_t> mult, std::vector<std::uint8_t> shift, std::vector<std::int32_t> zero,
                     std::int64_t last, const std::int32_t* bias);
    Rescale view() const;
    std::size_t bytes() const;

private:
    std::vector<std::uint32_t> mult_;
    std::vector<std::uint8_t> shift_;
    std::vector<std::int32_t> zero_;
    std::int64_t last_ = 0;
    Rescale::Form form_ = Rescale::ANY;
    AlignedVector<std::int32_t> vector_mult_, vector_shift_;
    AlignedVector<std::int64_t> vector_half_;
};

// y = tables[which[c]][x]: what a lookup is once its rounding by channel is done for every code.
class Lookup final : public Op {
public:
    Lookup(const Record& record, const Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return which.size() + tables.size() * sizeof(std::uint16_t); }

    std::vector<std::uint8_t> which;
    std::vector<std::uint16_t> tables;  // [.., length]
    std::int64_t length;
    bool wide_in;
};

class Add final : public Op {
public:
    struct Term {
        DType dtype;
        std::vector<std::int32_t> mult, zero, alpha;
        std::int64_t count;  // elements, for constants that are repeated
    };
    Add(const Record& record, const Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override;

    // Which of its terms is a plain accumulator, so that the sum can be the end of a linear map; -1: none.
    int acc() const { return acc_; }
    void view(Epilogue& e, const void* x) const;  // fills in where constants are; x: the other term

    Epilogue epilogue{};  // where acc() is not negative

private:
    bool as_epilogue(std::size_t own);

    const Kernels* kernels_;
    Term terms[2];
    std::vector<std::uint8_t> shift;  // of every channel
    std::vector<std::int32_t> zero;
    std::int64_t bound;  // of the sum before its shift
    int acc_;
    RescaleConstants rescale_;
    std::vector<std::int32_t> x_zero_, x_alpha_, x_mult_, no_bias_;
};

class Take final : public Op {
public:
    Take(const Record& record, const Scope& scope);
    std::int64_t items() const override { return static_cast<std::int64_t>(index.size()); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return index.size() * sizeof(std::int32_t) + fill.size(); }
    // Rows begin..end of the output, one after the other.
    void gather(const std::uint8_t* x, std::int64_t begin, std::int64_t end, std::uint8_t* y) const;

    std::vector<std::int32_t> index;
    std::vector<std::uint8_t> fill;  // the bytes of a row that is no row of x
};

// A product with weights, and what follows it: codes, an accumulator, or (fused) a table or a sum.
class Linear final : public Op {
public:
    Linear(const Record& record, const Scope& scope);
    std::int64_t items() const override;
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::int64_t macs() const override { return rows_ * inputs_ * outputs_; }
    std::size_t bytes() const override;

    // Take over what follows; false where this op cannot.
    bool join(const Lookup& lookup);
    bool join(std::unique_ptr<Op>& add);  // takes the op itself, which keeps the constants
    // Read the rows that a take would put together, perhaps several side by side, without writing them all down first.
    bool read_by(std::unique_ptr<Op>& take);
    bool gives_codes() const { return epilogue_.kind == Epilogue::CODES; }
    bool gives_acc() const { return epilogue_.kind == Epilogue::ACC; }

private:
    void set_bias(std::vector<std::int32_t> bias);

    const Machine machine_;
    std::int64_t rows_, inputs_, outputs_, bound_;
    bool wide_in_;
    std::int64_t row_blocks_, panels_, panel_groups_, tile_;
    std::unique_ptr<Packed> packed_;
    std::vector<std::int8_t> plain_;  // weights, where activations are u16
    AlignedVector<std::int32_t> bias_;
    RescaleConstants rescale_;
    Epilogue epilogue_{};
    std::vector<std::int32_t> starts_;
    std::vector<std::uint8_t> tables_;
    std::unique_ptr<Op> add_owner_;
    const Add* add_ = nullptr;
    int residual_ = -1;  // the value added
    std::unique_ptr<Op> take_owner_;
    const Take* take_ = nullptr;
    std::int64_t parts_ = 1;  // rows of the take that lie side by side in a row here
};

class Permute final : public Op {
public:
    Permute(const Record& record, const Scope& scope);
    std::int64_t items() const override { return outer_; }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;

    bool moves_nothing() const { return outer_ == 1 && select.empty(); }

    Shape view, perm, select;

private:
    Shape sizes_, strides_;  // of the output's axes but the run, in bytes of the input
    std::int64_t first_, run_, outer_;
};

class MatMul final : public Op {
public:
    MatMul(const Record& record, const Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::int64_t macs() const override { return value.count() * inner; }
    std::size_t bytes() const override {
        return bias.size() * sizeof(std::int32_t) + index.size() * sizeof(std::uint16_t);
    }

    std::int64_t inner, mult, shift, a_zero, b_zero, y_zero, last, heads;
    bool b_rows, wide_a, wide_b;
    std::vector<std::int32_t> bias;  // [R, H]
    std::vector<std::uint16_t> index;
};

// log_softmax, softmax and row_codes.
class RowSoftmax final : public Op {
public:
    RowSoftmax(const Record& record, const Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t bytes() const override { return table.size() * sizeof(std::int32_t) + region.size(); }

    Attention::Kind kind;
    std::int64_t mult = 0, shift = 1, last;
    bool wide_in;
    std::vector<std::int32_t> table;
    std::vector<std::uint8_t> region;
};

// shift_matmul and attend.
class Context final : public Op {
public:
    Context(const Record& record, const Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::int64_t macs() const override { return value.count() * inner; }

    std::int64_t inner, mult, shift, v_zero, y_zero, last, largest = 0;
    bool wide_v;
    std::vector<std::int32_t> weight;  // of each code
};

std::unique_ptr<Op> make_layernorm(const Record& record, const Scope& scope);
std::unique_ptr<Op> make_mean(const Record& record, const Scope& scope);
std::unique_ptr<Op> make_concat(const Record& record, const Scope& scope);

}  // namespace fqvit
