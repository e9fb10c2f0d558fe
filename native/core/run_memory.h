// The memory of runs: one arena per image in flight and one scratch buffer per thread. Engines that never run at the
// same time can share it, for example the programs of one detector for several image sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/aligned.h"

namespace fqvit {

// Not thread-safe: engines that share a RunMemory must not run at the same time.
class RunMemory {
public:
    // Each of these two functions returns a buffer of at least `bytes` bytes. It keeps its address and contents until
    // trim() or a larger request for it.
    std::uint8_t* arena(std::size_t i, std::size_t bytes) { return grow(arenas_, i, bytes); }
    std::uint8_t* scratch(std::size_t thread, std::size_t bytes) { return grow(scratch_, thread, bytes); }

    // Frees the arenas that are larger than `bytes` bytes.
    void trim(std::size_t bytes) {
        for (Bytes& arena : arenas_) {
            if (arena.size() > bytes) arena = Bytes();
        }
    }

private:
    using Bytes = AlignedVector<std::uint8_t>;

    static std::uint8_t* grow(std::vector<Bytes>& buffers, std::size_t i, std::size_t bytes) {
        if (buffers.size() <= i) buffers.resize(i + 1);
        if (buffers[i].size() < bytes) {
            buffers[i] = Bytes();  // frees the old memory before the new is allocated
            buffers[i].resize(bytes);
        }
        return buffers[i].data();
    }

    std::vector<Bytes> arenas_, scratch_;
};

}  // namespace fqvit
