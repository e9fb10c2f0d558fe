#include "detect/grids.h"

#include <algorithm>

#include "core/aligned.h"

namespace fqvit {
namespace {

// An i32 constant that is written element by element.
class Rows {
public:
    explicit Rows(Shape shape) : constant_{DType::i32, std::move(shape), {}} {
        constant_.bytes.resize(static_cast<std::size_t>(elements(constant_.shape)) * sizeof(std::int32_t));
        data_ = reinterpret_cast<std::int32_t*>(constant_.bytes.data());
    }
    void add(std::int64_t row) { data_[at_++] = static_cast<std::int32_t>(row); }
    std::int32_t& operator[](std::int64_t i) { return data_[i]; }
    Constant take() { return std::move(constant_); }

private:
    Constant constant_;
    std::int32_t* data_;
    std::int64_t at_ = 0;
};

std::int64_t row_of(Grid grid, std::int64_t y, std::int64_t x) {
    const bool inside = y >= 0 && y < grid.rows && x >= 0 && x < grid.columns;
    return inside ? y * grid.columns + x : -1;
}

Grid padded(Grid grid, std::int64_t window) { return {round_up(grid.rows, window), round_up(grid.columns, window)}; }

// Calls visit(y, x) for the positions of all windows of the padded grid, window by window.
template <class Visit>
void for_each_in_windows(Grid whole, std::int64_t window, const Visit& visit) {
    for (std::int64_t top = 0; top < whole.rows; top += window) {
        for (std::int64_t left = 0; left < whole.columns; left += window) {
            for (std::int64_t y = top; y < top + window; ++y) {
                for (std::int64_t x = left; x < left + window; ++x) visit(y, x);
            }
        }
    }
}

}  // namespace

Constant neighbour_rows(Grid grid) {
    Rows out({grid.count(), 9});
    for (std::int64_t y = 0; y < grid.rows; ++y) {
        for (std::int64_t x = 0; x < grid.columns; ++x) {
            for (std::int64_t i = -1; i <= 1; ++i) {
                for (std::int64_t j = -1; j <= 1; ++j) out.add(row_of(grid, y + i, x + j));
            }
        }
    }
    return out.take();
}

Constant enlarged_rows(Grid small, Grid large) {
    Rows out({large.rows, large.columns});
    for (std::int64_t y = 0; y < large.rows; ++y) {
        for (std::int64_t x = 0; x < large.columns; ++x) {
            out.add(y * small.rows / large.rows * small.columns + x * small.columns / large.columns);
        }
    }
    return out.take();
}

Constant second_rows(Grid grid) {
    const Grid half = grid.halved();
    Rows out({half.rows, half.columns});
    for (std::int64_t y = 0; y < half.rows; ++y) {
        for (std::int64_t x = 0; x < half.columns; ++x) out.add(2 * y * grid.columns + 2 * x);
    }
    return out.take();
}

Constant window_rows(Grid grid, std::int64_t window, std::int64_t shift) {
    const Grid whole = padded(grid, window);
    Rows out({whole.count() / (window * window), window * window});
    for_each_in_windows(whole, window, [&](std::int64_t y, std::int64_t x) {
        out.add(row_of(grid, (y + shift) % whole.rows, (x + shift) % whole.columns));
    });
    return out.take();
}

Constant token_rows(Grid grid, std::int64_t window, std::int64_t shift) {
    const Constant windows = window_rows(grid, window, shift);
    Rows out({grid.count()});
    const auto* rows = windows.as<std::int32_t>();
    for (std::int64_t i = 0; i < windows.count(); ++i) {
        if (rows[i] >= 0) out[rows[i]] = static_cast<std::int32_t>(i);
    }
    return out.take();
}

Constant merged_rows(Grid grid) {
    const Grid half = grid.halved();
    Rows out({half.count(), 4});
    for (std::int64_t y = 0; y < half.rows; ++y) {
        for (std::int64_t x = 0; x < half.columns; ++x) {
            for (std::int64_t j = 0; j < 2; ++j) {
                for (std::int64_t i = 0; i < 2; ++i) out.add(row_of(grid, 2 * y + i, 2 * x + j));
            }
        }
    }
    return out.take();
}

// Regions are numbered in the order of their first appearance in a window.
Constant window_regions(Grid grid, std::int64_t window, std::int64_t shift) {
    const Grid whole = padded(grid, window);
    const std::int64_t tokens = window * window;
    Constant out{DType::u8, {whole.count() / tokens, tokens}, {}};
    out.bytes.reserve(static_cast<std::size_t>(whole.count()));
    constexpr int UNKNOWN = -1;
    int number[4], count = 0;
    for_each_in_windows(whole, window, [&](std::int64_t y, std::int64_t x) {
        if (static_cast<std::int64_t>(out.bytes.size()) % tokens == 0)
            std::fill(number, number + 4, UNKNOWN), count = 0;
        // Bit 1: the row wrapped around. Bit 0: the column wrapped around.
        const int part = (y >= whole.rows - shift ? 2 : 0) + (x >= whole.columns - shift ? 1 : 0);
        if (number[part] == UNKNOWN) number[part] = count++;
        out.bytes.push_back(static_cast<std::uint8_t>(number[part]));
    });
    return out;
}

}  // namespace fqvit
