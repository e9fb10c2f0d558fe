// Memory that starts at a multiple of 64 bytes, for vector loads.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace fqvit {

template <class T>
struct Aligned64 {
    using value_type = T;
    Aligned64() = default;
    template <class U>
    constexpr Aligned64(const Aligned64<U>&) noexcept {}
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, std::size_t) noexcept { ::operator delete(p, std::align_val_t{64}); }
    template <class U>
    bool operator==(const Aligned64<U>&) const noexcept {
        return true;
    }
};

template <class T>
using AlignedVector = std::vector<T, Aligned64<T>>;

}  // namespace fqvit
