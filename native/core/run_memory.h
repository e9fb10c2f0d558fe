// The memory of runs: one arena per image in flight and one scratch buffer per thread. Engines that never run at the
// same time can share it, for example the programs of one detector for several image sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/aligned.h"

namespace fqvit {

// Not thread-safe: whoever shares it runs one engine at a time.
class RunMemory {
public:
    // Both return at least this many bytes. They keep their address and contents until a larger request or trim().
    std::uint8_t* arena(std::size_t i, std::size_t bytes) { return grow(arenas_, i, bytes); }
    std::uint8_t* scratch(std::size_t thread, std::size_t bytes) { return grow(scratch_, thread, bytes); }

    // Frees the arenas that are larger than this.
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
