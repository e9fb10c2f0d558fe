#include "detect/shapes.h"

namespace fqvit {
namespace {

class Inference {
public:
    Inference(const Shapes& shapes, const Constants& constants) : shapes_(shapes), constants_(constants) {}

    Shape operator()(const LinearFields& op) const {
        return with_last(buffer(op.x), constant(op.weight_part("w"), 2).front());
    }
    // One term may be a constant.
    Shape operator()(const AddFields& op) const {
        return buffer(shapes_.contains(op.terms[0].x) ? op.terms[0].x : op.terms[1].x);
    }
    Shape operator()(const MeanFields& op) const { return without_rows(buffer(op.x, 2)); }
    Shape operator()(const MaxFields& op) const { return without_rows(buffer(op.x, 2)); }
    Shape operator()(const MultiplyFields& op) const { return buffer(op.a); }
    Shape operator()(const DepthwiseFields& op) const { return with_last(constant(op.index, 1), buffer(op.x).back()); }
    Shape operator()(const TakeFields& op) const {
        Shape shape = constant(op.index, 0);
        shape.push_back(buffer(op.x).back());
        return shape;
    }
    Shape operator()(const PermuteFields& op) const {
        if (!op.shape.empty()) return op.shape;
        Shape sizes = op.view, out;
        if (op.select.has_value()) sizes.erase(sizes.begin() + op.select->front());
        for (const std::int64_t axis : op.perm) out.push_back(sizes.at(static_cast<std::size_t>(axis)));
        return out;
    }
    Shape operator()(const ConcatFields& op) const {
        Shape out;
        for (const std::string& name : op.xs) {
            const Shape& shape = shapes_.contains(name) ? buffer(name, 2) : constant(name, 2);
            if (out.empty()) {
                out = shape;
            } else {
                out[0] += shape[0];
            }
        }
        return out;
    }
    Shape operator()(const MatMulFields& op) const {
        const Shape& b = buffer(op.b, 2);
        return with_last(buffer(op.a), op.b_rows ? b.back() : b[b.size() - 2]);
    }
    Shape operator()(const ShiftMatMulFields& op) const { return with_last(buffer(op.a), buffer(op.v).back()); }
    Shape operator()(const AttendFields& op) const { return with_last(buffer(op.a), buffer(op.v).back()); }
    // Lookup, layernorm, rotary and the softmax ops keep the shape.
    template <class Other>
    Shape operator()(const Other& op) const {
        return buffer(op.x);
    }

private:
    const Shape& buffer(const std::string& name, std::size_t min_axes = 1) const {
        const auto found = shapes_.find(name);
        require(found != shapes_.end() && found->second.size() >= min_axes, "reads '", name,
                "' before any op writes it, or it has too few axes");
        return found->second;
    }
    const Shape& constant(const std::string& name, std::size_t min_axes) const {
        const Constants::Entry* found = constants_.find(name);
        require(found != nullptr && found->shape.size() >= min_axes, "constant '", name,
                "' is missing or has too few axes");
        return found->shape;
    }
    static Shape with_last(Shape shape, std::int64_t last) {
        shape.back() = last;
        return shape;
    }
    static Shape without_rows(Shape shape) {
        shape.erase(shape.end() - 2);
        return shape;
    }

    const Shapes& shapes_;
    const Constants& constants_;
};

}  // namespace

const std::string& first_input(const OpFields& op) {
    return std::visit(
        [](const auto& fields) -> const std::string& {
            if constexpr (requires { fields.x; }) {
                return fields.x;
            } else if constexpr (requires { fields.a; }) {
                return fields.a;
            } else if constexpr (requires { fields.terms; }) {
                return fields.terms[0].x;
            } else {
                require(!fields.xs.empty(), fields.y, ": has no input");
                return fields.xs.front();
            }
        },
        op);
}

Shape output_shape(const OpFields& op, const Shapes& shapes, const Constants& constants) {
    try {
        return std::visit(Inference(shapes, constants), op);
    } catch (const BadProgram& error) {
        throw BadProgram(output_of(op) + ": " + error.what());
    }
}

}  // namespace fqvit
