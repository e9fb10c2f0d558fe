// Memory aligned to 64 bytes, the size of a cache line and of the widest vector register.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The smallest multiple of `step` that is at least n.
constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
constexpr std::size_t round_up(std::size_t n, std::size_t step) { return (n + step - 1) / step * step; }

}  // namespace fqvit
