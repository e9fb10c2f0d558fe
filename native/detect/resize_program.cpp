#include "detect/resize_program.h"

#include <algorithm>
#include <tuple>

#include "detect/grids.h"
#include "detect/shapes.h"

namespace fqvit {
namespace {

constexpr std::int64_t STRIDE = 32;  // stride of the last backbone stage: sides of images are multiples of this
constexpr std::int64_t MAX_IMAGE = 8192;

// Returns the name of an op's constant that depends on the image size: the index of a take op or the region of a
// softmax op. Null if the op has none.
template <class Op>
auto* sized_constant(Op& op) {
    using Name = std::conditional_t<std::is_const_v<Op>, const std::string, std::string>;
    return std::visit(
        [](auto& fields) -> Name* {
            if constexpr (std::is_same_v<std::remove_cvref_t<decltype(fields)>, TakeFields>) {
                return &fields.index;
            } else if constexpr (requires { fields.region; }) {
                return fields.region.has_value() ? &*fields.region : nullptr;
            } else {
                return nullptr;
            }
        },
        op);
}

Shape window_shape(Grid grid, std::int64_t window) {
    const auto windows = [&](std::int64_t side) { return (side + window - 1) / window; };
    return {windows(grid.rows) * windows(grid.columns), window * window};
}

std::int64_t product(const Shape& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    return count;
}

// Resizes the ops in order.
class Resizer {
public:
    Resizer(const Program& program, const Moves& moves, std::int64_t height, std::int64_t width)
        : from_(program), moves_(moves), same_size_(program.input[0] == height && program.input[1] == width) {
        made_ = without_sized_constants(
            Program{{height, width, program.input[2]}, {}, program.outputs, program.constants}, program.ops);
        grids_[INPUT] = {height, width};
        shapes_[INPUT] = made_.input;
    }

    static Program without_sized_constants(Program program, const std::vector<OpFields>& ops) {
        for (const OpFields& op : ops) {
            if (const std::string* name = sized_constant(op)) program.constants.remove(*name);
        }
        return program;
    }

    Program run() {
        for (const OpFields& op : from_.ops) {
            const std::string& y = output_of(op);
            const auto grid = grids_.find(first_input(op));
            require(grid != grids_.end(), y, ": reads '", first_input(op), "' before any op writes it");
            made_.ops.push_back(resize_op(op, y, grid->second));
            shapes_[y] = output_shape(made_.ops.back(), shapes_, made_.constants);
        }
        return std::move(made_);
    }

private:
    OpFields resize_op(OpFields op, const std::string& y, Grid grid) {
        const auto found = moves_.find(y);
        const Move* move = found == moves_.end() ? nullptr : &found->second;
        grids_[y] = grid;
        if (auto* take = std::get_if<TakeFields>(&op)) {
            require(move != nullptr, y, ": no move says how its row indices follow from the image size");
            const Shape shape = rows_shape(y, grid, *move);
            const Grid last = shape.size() == 2 ? Grid{shape[0], shape[1]} : Grid{};
            take->index = constant("rows", y, take->index, shape, *move, grid, last);
            if (move->kind == MoveKind::enlarged || move->kind == MoveKind::second) grids_[y] = last;
            if (move->kind == MoveKind::merge) grids_[y] = grid.halved();
        } else if (std::holds_alternative<DepthwiseFields>(op)) {
            fail({y, ": no move says how its row indices follow from the image size"});
        } else if (auto* permute = std::get_if<PermuteFields>(&op)) {
            resize_permute(*permute, grid, move);
        } else if (std::string* region = sized_constant(op)) {
            require(move != nullptr && 0 < move->shift && move->shift < move->window, y,
                    ": no move says how its regions follow from the image size");
            *region = constant("region", y, *region, window_shape(grid, move->window), *move, grid, {});
        }
        return op;
    }

    // Returns the shape of a move's row indices before they are computed, so that their size can be bounded.
    Shape rows_shape(const std::string& y, Grid grid, const Move& move) const {
        const Grid half = grid.halved();
        if (move.kind == MoveKind::windows || move.kind == MoveKind::tokens) {
            require(move.shift < move.window, y, ": windows of ", move.window, " shifted by ", move.shift,
                    ", expected a smaller shift");
        }
        switch (move.kind) {
            case MoveKind::windows: return window_shape(grid, move.window);
            case MoveKind::tokens: return {grid.count()};
            case MoveKind::neighbours: return {grid.count(), 9};
            case MoveKind::merge: return {half.count(), 4};
            case MoveKind::second: return {half.rows, half.columns};
            case MoveKind::enlarged: {
                const auto of = grids_.find(move.of);
                if (of != grids_.end()) return {of->second.rows, of->second.columns};
                break;
            }
            default: break;
        }
        fail({y, ": move '", Names<MoveKind>::names[static_cast<std::size_t>(move.kind)], "' does not select rows"});
    }

    static Constant make_constant(bool rows, const Move& move, Grid grid, Grid last) {
        if (!rows) return window_regions(grid, move.window, move.shift);
        switch (move.kind) {
            case MoveKind::windows: return window_rows(grid, move.window, move.shift);
            case MoveKind::tokens: return token_rows(grid, move.window, move.shift);
            case MoveKind::neighbours: return neighbour_rows(grid);
            case MoveKind::enlarged: return enlarged_rows(grid, last);
            case MoveKind::merge: return merged_rows(grid);
            default: return second_rows(grid);
        }
    }

    // Makes a constant and returns its name. A small file can ask for large constants, so their total size is bounded.
    // If the image size is that of the program, each constant must equal the stored one.
    std::string constant(const std::string& kind, const std::string& y, const std::string& stored_name,
                         const Shape& shape, const Move& move, Grid grid, Grid last) {
        const Constants::Entry* stored = same_size_ ? from_.constants.find(stored_name) : nullptr;
        const auto expect_same = [&](bool same) {
            require(same, y, ": its stored indices differ from those that its move gives");
        };
        expect_same(stored == nullptr || stored->shape == shape);
        if (elements_ + product(shape) > MAX_ELEMENTS) {
            throw BadProgramWithRemedy(y + ": the image is too large: it needs more than " +
                                       std::to_string(MAX_ELEMENTS) + " indices. Use a smaller one");
        }
        // Many ops need the same indices, which are computed only once.
        const Request request{kind,      move.kind,    move.window, move.shift,
                              grid.rows, grid.columns, last.rows,   last.columns};
        const auto known = requests_.find(request);
        std::string name;
        if (known != requests_.end()) {
            name = known->second;
        } else {
            name = share(kind, make_constant(kind == "rows", move, grid, last));
            requests_.emplace(request, name);
        }
        if (stored != nullptr) {
            const Constant before = from_.constants.read(stored_name), now = made_.constants.read(name);
            expect_same(before.dtype == now.dtype && before.bytes == now.bytes);
        }
        return name;
    }

    // Stores a constant under the name that lowering gives it: equal constants are stored once, and names are
    // numbered in the order of first use.
    std::string share(const std::string& kind, Constant made) {
        std::vector<std::string>& names = names_[kind];
        for (const std::string& name : names) {
            const Constants::Entry& other = *made_.constants.find(name);
            if (other.shape == made.shape && other.owned->bytes == made.bytes) return name;
        }
        names.push_back(kind + "." + std::to_string(names.size()));
        elements_ += made.count();
        made_.constants.set(names.back(), std::move(made));
        return names.back();
    }

    // Without a move, only the first axis (windows or tokens) depends on the image size.
    void resize_permute(PermuteFields& op, Grid grid, const Move* move) {
        if (move != nullptr && move->kind == MoveKind::patches && op.view.size() == 5) {
            const std::int64_t patch = op.view[1], channels = op.view[4];
            const Grid patches{grid.rows / patch, grid.columns / patch};
            grids_[op.y] = patches;
            op.view = {patches.rows, patch, patches.columns, patch, channels};
            op.shape = {patches.count(), patch * patch * channels};
            return;
        }
        if (move != nullptr && move->kind == MoveKind::grid && op.view.size() == 3) {
            op.view = {grid.rows, grid.columns, op.view.back()};
            return;
        }
        require(move == nullptr, op.y, ": its move does not reshape a view of ", op.view.size(), " axes");
        const auto x = shapes_.find(op.x);
        require(x != shapes_.end() && !op.view.empty(), op.y, ": reads '", op.x, "' before any op writes it");
        const std::int64_t old = op.view[0];
        op.view[0] = elements(x->second) / (elements(op.view) / old);
        // The first axis of the shape scales with that of the view.
        if (!op.shape.empty()) op.shape[0] = op.view[0] * op.shape[0] / old;
    }

    using Request = std::tuple<std::string, MoveKind, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                               std::int64_t, std::int64_t>;
    const Program& from_;
    const Moves& moves_;
    const bool same_size_;
    Program made_;
    std::int64_t elements_ = 0;  // of all constants made so far
    std::map<Request, std::string> requests_;
    std::map<std::string, std::vector<std::string>> names_;  // by kind
    std::map<std::string, Grid, std::less<>> grids_;         // rows and columns of each buffer's positions
    Shapes shapes_;
};

}  // namespace

Program resized(const Program& program, const Moves& moves, std::int64_t height, std::int64_t width) {
    if (moves.empty()) {
        throw BadProgramWithRemedy("has a fixed image size. Only the pyramid of a detector can be resized");
    }
    const auto fits = [](std::int64_t side) { return side % STRIDE == 0 && side >= STRIDE && side <= MAX_IMAGE; };
    if (!fits(height) || !fits(width)) {
        throw BadProgramWithRemedy("image of " + std::to_string(height) + " x " + std::to_string(width) +
                                   ": expected sides that are multiples of 32 up to 8192. Pad the image");
    }
    return Resizer(program, moves, height, width).run();
}

Program without_sized_constants(Program program) {
    const std::vector<OpFields> ops = program.ops;
    return Resizer::without_sized_constants(std::move(program), ops);
}

bool is_same_program(const Program& program, const Program& again) {
    for (std::size_t i = 0; i < program.ops.size(); ++i) {
        const std::string *a = sized_constant(program.ops[i]), *b = sized_constant(again.ops[i]);
        if (a != nullptr && *a != *b) return false;
        const auto* before = std::get_if<PermuteFields>(&program.ops[i]);
        const auto* now = std::get_if<PermuteFields>(&again.ops[i]);
        if (before != nullptr && (before->view != now->view || before->shape != now->shape)) return false;
    }
    const auto &a = program.constants.entries(), &b = again.constants.entries();
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
        return x.first == y.first && x.second.dtype == y.second.dtype && x.second.shape == y.second.shape;
    });
}

}  // namespace fqvit
