// The row indices of take ops on feature maps, and the regions of shifted windows: the parts of a detector's program
// that depend on the image size. The results are the same as those of src/fqvit/lowering/grids.py.
//
// A map [h, w, C] is a list of h * w rows of C channels, in raster order; index -1 is a location outside the map.
#pragma once

#include <cstdint>

#include "ir/constants.h"

namespace fqvit {

struct Grid {
    std::int64_t rows = 0, columns = 0;

    std::int64_t count() const { return rows * columns; }
    Grid halved() const { return {(rows + 1) / 2, (columns + 1) / 2}; }  // rounded up
    bool operator==(const Grid&) const = default;
};

// [h * w, 9]: the 3x3 neighborhood of each location, as a convolution reads it.
Constant neighbour_rows(Grid grid);
// [large.rows, large.columns]: nearest-neighbor upsampling.
Constant enlarged_rows(Grid small, Grid large);
// [ceil(h / 2), ceil(w / 2)]: every second location of every second row.
Constant second_rows(Grid grid);
// [windows, window^2]: the tokens of each window after the grid is padded and cyclically shifted. 0 <= shift < window
Constant window_rows(Grid grid, std::int64_t window, std::int64_t shift);
// [h * w]: the position of each token in the flattened windows.
Constant token_rows(Grid grid, std::int64_t window, std::int64_t shift);
// [ceil(h / 2) * ceil(w / 2), 4]: the four tokens to merge, at (row, column) offsets (0, 0), (1, 0), (0, 1), (1, 1).
Constant merged_rows(Grid grid);
// u8 [windows, window^2]: region numbers; tokens of a window attend to each other if their numbers are equal.
Constant window_regions(Grid grid, std::int64_t window, std::int64_t shift);

}  // namespace fqvit
