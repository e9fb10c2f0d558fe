// The operations of avx512.h in plain C++, with bit-identical results, so that tests run the kernels of this folder on
// CPUs without AVX-512. Included by avx512.h if FQVIT_AVX512_SHIM is defined.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef FQVIT_AVX512_BW
#define FQVIT_AVX512_NAMESPACE avx512bw_shim
#define FQVIT_AVX512_KERNELS kernels_avx512bw_shim
#else
#define FQVIT_AVX512_NAMESPACE avx512_shim
#define FQVIT_AVX512_KERNELS kernels_avx512_shim
#endif
#define FQVIT_AVX512_SHARED avx512bw_shim
#define FQVIT_AVX512
#define FQVIT_INLINE inline

namespace fqvit::FQVIT_AVX512_NAMESPACE {

struct Vector {
    std::uint8_t bytes[64];
};

constexpr std::uint16_t ALL_16 = 0xffff;
constexpr std::uint32_t ALL_32 = 0xffffffff;

template <class T>
constexpr int COUNT = static_cast<int>(64 / sizeof(T));

template <class T>
T get(const Vector& v, int i) {
    T x;
    std::memcpy(&x, v.bytes + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    return x;
}
template <class T>
void set(Vector& v, int i, T x) {
    std::memcpy(v.bytes + static_cast<std::size_t>(i) * sizeof(T), &x, sizeof(T));
}

// Element i is f(i), converted to T.
template <class T, class F>
Vector make(F f) {
    Vector v;
    for (int i = 0; i < COUNT<T>; ++i) set<T>(v, i, static_cast<T>(f(i)));
    return v;
}
template <class T, class F>
Vector map(const Vector& a, const Vector& b, F f) {
    return make<T>([&](int i) { return f(get<T>(a, i), get<T>(b, i)); });
}
// Bit i of the result is f(i).
template <class T, class F>
std::uint64_t make_mask(F f) {
    std::uint64_t mask = 0;
    for (int i = 0; i < COUNT<T>; ++i) mask |= static_cast<std::uint64_t>(f(i) ? 1 : 0) << i;
    return mask;
}
inline bool bit(std::uint64_t mask, int i) { return ((mask >> i) & 1) != 0; }

template <class To, class From>
To saturate(From x) {
    constexpr auto lo = std::int64_t{std::numeric_limits<To>::min()}, hi = std::int64_t{std::numeric_limits<To>::max()};
    return static_cast<To>(std::clamp(static_cast<std::int64_t>(x), lo, hi));
}

// Reads only elements of the mask.
template <class From, class To>
Vector load_as(const void* p, std::uint64_t mask) {
    return make<To>([&](int i) {
        From x = 0;
        if (bit(mask, i)) std::memcpy(&x, static_cast<const From*>(p) + i, sizeof x);
        return To{x};
    });
}
template <class From, class To>
void store_as(void* p, std::uint64_t mask, const Vector& v) {
    for (int i = 0; i < COUNT<From>; ++i) {
        const To x = saturate<To>(get<From>(v, i));
        if (bit(mask, i)) std::memcpy(static_cast<To*>(p) + i, &x, sizeof x);
    }
}

inline Vector load(const void* p) {
    Vector v;
    std::memcpy(v.bytes, p, 64);
    return v;
}
inline void store(void* p, const Vector& v) { std::memcpy(p, v.bytes, 64); }
inline Vector load_i8(const void* p, std::uint64_t mask) { return load_as<std::int8_t, std::int8_t>(p, mask); }
inline void store_i8(void* p, std::uint64_t mask, Vector v) { store_as<std::int8_t, std::int8_t>(p, mask, v); }
inline Vector load_i16(const void* p, std::uint32_t mask) { return load_as<std::int16_t, std::int16_t>(p, mask); }
inline void store_i16(void* p, std::uint32_t mask, Vector v) { store_as<std::int16_t, std::int16_t>(p, mask, v); }
inline Vector load_i32(const void* p, std::uint16_t mask) { return load_as<std::int32_t, std::int32_t>(p, mask); }
inline void store_i32(void* p, std::uint16_t mask, Vector v) { store_as<std::int32_t, std::int32_t>(p, mask, v); }
inline Vector load_i64(const void* p, std::uint8_t mask) { return load_as<std::int64_t, std::int64_t>(p, mask); }
inline Vector load_lanes(const void* a, const void* b, const void* c, const void* d, std::uint16_t mask) {
    const void* lanes[] = {a, b, c, d};
    return make<std::uint8_t>([&](int i) {
        return bit(mask, i % 16) ? static_cast<const std::uint8_t*>(lanes[i / 16])[i % 16] : std::uint8_t{0};
    });
}
inline Vector load_u8_as_i32(const void* p, std::uint16_t mask) { return load_as<std::uint8_t, std::int32_t>(p, mask); }
inline Vector load_u16_as_i32(const void* p, std::uint16_t mask) {
    return load_as<std::uint16_t, std::int32_t>(p, mask);
}
inline Vector load_i16_as_i32(const void* p, std::uint16_t mask) {
    return load_as<std::int16_t, std::int32_t>(p, mask);
}
inline Vector load_u8_as_i16(const void* p, std::uint32_t mask) { return load_as<std::uint8_t, std::int16_t>(p, mask); }
inline void store_u32_as_u8(void* p, std::uint16_t mask, Vector v) {
    store_as<std::uint32_t, std::uint8_t>(p, mask, v);
}
inline void store_u32_as_u16(void* p, std::uint16_t mask, Vector v) {
    store_as<std::uint32_t, std::uint16_t>(p, mask, v);
}
inline void store_i16_as_u8(void* p, std::uint32_t mask, Vector v) {
    store_as<std::uint16_t, std::uint8_t>(p, mask, v);
}
inline void store_16_bytes(void* p, Vector v) { std::memcpy(p, v.bytes, 16); }
inline void store_32_bytes(void* p, Vector v) { std::memcpy(p, v.bytes, 32); }
inline void store_upper_32_bytes(void* p, Vector v) { std::memcpy(p, v.bytes + 32, 32); }

inline Vector zero() { return Vector{}; }
inline Vector set_i8(std::int32_t x) {
    return make<std::int8_t>([&](int) { return x; });
}
inline Vector set_i16(std::int32_t x) {
    return make<std::int16_t>([&](int) { return x; });
}
inline Vector set_i32(std::int32_t x) {
    return make<std::int32_t>([&](int) { return x; });
}
inline Vector set_i64(std::int64_t x) {
    return make<std::int64_t>([&](int) { return x; });
}
inline Vector broadcast_i32(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, 4);
    return set_i32(x);
}

// Unsigned, so that wrapping is defined.
template <class T>
Vector add(const Vector& a, const Vector& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x + y); });
}
template <class T>
Vector sub(const Vector& a, const Vector& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x - y); });
}
inline Vector add_i8(Vector a, Vector b) { return add<std::uint8_t>(a, b); }
inline Vector add_i16(Vector a, Vector b) { return add<std::uint16_t>(a, b); }
inline Vector add_i32(Vector a, Vector b) { return add<std::uint32_t>(a, b); }
inline Vector add_i64(Vector a, Vector b) { return add<std::uint64_t>(a, b); }
inline Vector sub_i8(Vector a, Vector b) { return sub<std::uint8_t>(a, b); }
inline Vector sub_i16(Vector a, Vector b) { return sub<std::uint16_t>(a, b); }
inline Vector sub_i32(Vector a, Vector b) { return sub<std::uint32_t>(a, b); }
inline Vector sub_i64(Vector a, Vector b) { return sub<std::uint64_t>(a, b); }

inline Vector mul_i16(Vector a, Vector b) {
    return map<std::uint16_t>(a, b, [](std::uint32_t x, std::uint32_t y) { return x * y; });
}
inline Vector mul_i32(Vector a, Vector b) {
    return map<std::uint32_t>(a, b, [](std::uint32_t x, std::uint32_t y) { return x * y; });
}
inline Vector mul_i64(Vector a, Vector b) {
    return map<std::uint64_t>(a, b, [](std::uint64_t x, std::uint64_t y) { return x * y; });
}
inline Vector mul_even(Vector a, Vector b) {
    return make<std::int64_t>(
        [&](int i) { return std::int64_t{get<std::int32_t>(a, 2 * i)} * get<std::int32_t>(b, 2 * i); });
}
// acc + the sum of `terms` adjacent products
template <class A, class B>
Vector dot(const Vector& acc, const Vector& a, const Vector& b) {
    constexpr int terms = static_cast<int>(4 / sizeof(A));
    return make<std::uint32_t>([&](int i) {
        auto sum = get<std::uint32_t>(acc, i);
        for (int t = terms * i; t < terms * (i + 1); ++t) {
            sum += static_cast<std::uint32_t>(std::int32_t{get<A>(a, t)} * std::int32_t{get<B>(b, t)});
        }
        return sum;
    });
}
inline Vector madd_i16(Vector a, Vector b) { return dot<std::int16_t, std::int16_t>(zero(), a, b); }
inline Vector dpbusd(Vector acc, Vector u8, Vector i8) { return dot<std::uint8_t, std::int8_t>(acc, u8, i8); }
inline void add_dpbusd(Vector& acc, Vector u8, Vector i8) { acc = dpbusd(acc, u8, i8); }
inline Vector dpwssd(Vector acc, Vector a, Vector b) { return dot<std::int16_t, std::int16_t>(acc, a, b); }

#ifndef FQVIT_AVX512_BW
inline Vector madd52(Vector acc, Vector a, Vector b) {
    return make<std::uint64_t>([&](int i) {
        constexpr std::uint64_t low = (std::uint64_t{1} << 52) - 1;
        return get<std::uint64_t>(acc, i) +
               (((get<std::uint64_t>(a, i) & low) * (get<std::uint64_t>(b, i) & low)) & low);
    });
}
#endif

inline Vector and_bits(Vector a, Vector b) {
    return map<std::uint64_t>(a, b, [](std::uint64_t x, std::uint64_t y) { return x & y; });
}
inline Vector or_bits(Vector a, Vector b) {
    return map<std::uint64_t>(a, b, [](std::uint64_t x, std::uint64_t y) { return x | y; });
}
inline Vector xor_bits(Vector a, Vector b) {
    return map<std::uint64_t>(a, b, [](std::uint64_t x, std::uint64_t y) { return x ^ y; });
}

template <class T>
Vector shl(const Vector& a, const Vector& n) {
    return map<T>(a, n, [](T x, T y) { return static_cast<T>(x << y); });
}
template <class T>
Vector shr(const Vector& a, const Vector& n) {
    return map<T>(a, n, [](T x, T y) { return static_cast<T>(x >> y); });
}
inline Vector shl_each_i32(Vector a, Vector n) {
    return map<std::uint32_t>(a, n, [](std::uint32_t x, std::uint32_t y) { return y < 32 ? x << y : 0; });
}
inline Vector shl_each_i64(Vector a, Vector n) { return shl<std::uint64_t>(a, n); }
inline Vector sar_each_i32(Vector a, Vector n) { return shr<std::int32_t>(a, n); }
inline Vector sar_each_i64(Vector a, Vector n) { return shr<std::int64_t>(a, n); }
inline Vector shr_each_i16(Vector a, Vector n) { return shr<std::uint16_t>(a, n); }
inline Vector shr_each_i64(Vector a, Vector n) { return shr<std::uint64_t>(a, n); }
inline Vector shl_i16(Vector a, unsigned n) { return shl<std::uint16_t>(a, set_i16(static_cast<std::int32_t>(n))); }
inline Vector shl_i32(Vector a, unsigned n) { return shl_each_i32(a, set_i32(static_cast<std::int32_t>(n))); }
inline Vector shl_i64(Vector a, unsigned n) { return shl_each_i64(a, set_i64(n)); }
inline Vector shr_i16(Vector a, unsigned n) { return shr<std::uint16_t>(a, set_i16(static_cast<std::int32_t>(n))); }
inline Vector shr_i32(Vector a, unsigned n) { return shr<std::uint32_t>(a, set_i32(static_cast<std::int32_t>(n))); }
inline Vector shr_i64(Vector a, unsigned n) { return shr_each_i64(a, set_i64(n)); }
inline Vector sar_i16(Vector a, unsigned n) { return shr<std::int16_t>(a, set_i16(static_cast<std::int32_t>(n))); }
inline Vector sar_i32(Vector a, unsigned n) { return sar_each_i32(a, set_i32(static_cast<std::int32_t>(n))); }
inline Vector sar_i64(Vector a, unsigned n) { return sar_each_i64(a, set_i64(n)); }

template <class T>
Vector smaller(const Vector& a, const Vector& b) {
    return map<T>(a, b, [](T x, T y) { return std::min(x, y); });
}
template <class T>
Vector larger(const Vector& a, const Vector& b) {
    return map<T>(a, b, [](T x, T y) { return std::max(x, y); });
}
inline Vector min_i32(Vector a, Vector b) { return smaller<std::int32_t>(a, b); }
inline Vector max_i32(Vector a, Vector b) { return larger<std::int32_t>(a, b); }
inline Vector min_u8(Vector a, Vector b) { return smaller<std::uint8_t>(a, b); }
inline Vector max_u8(Vector a, Vector b) { return larger<std::uint8_t>(a, b); }
inline Vector min_u16(Vector a, Vector b) { return smaller<std::uint16_t>(a, b); }
inline Vector max_u16(Vector a, Vector b) { return larger<std::uint16_t>(a, b); }
inline Vector max_u32(Vector a, Vector b) { return larger<std::uint32_t>(a, b); }

inline std::uint64_t equal_i8(Vector a, Vector b) {
    return make_mask<std::int8_t>([&](int i) { return get<std::int8_t>(a, i) == get<std::int8_t>(b, i); });
}
inline std::uint16_t equal_i32(Vector a, Vector b) {
    return static_cast<std::uint16_t>(
        make_mask<std::int32_t>([&](int i) { return get<std::int32_t>(a, i) == get<std::int32_t>(b, i); }));
}
inline std::uint16_t greater_i32(Vector a, Vector b) {
    return static_cast<std::uint16_t>(
        make_mask<std::int32_t>([&](int i) { return get<std::int32_t>(a, i) > get<std::int32_t>(b, i); }));
}
inline std::uint64_t nonzero_i8(Vector a) {
    return make_mask<std::int8_t>([&](int i) { return get<std::int8_t>(a, i) != 0; });
}
inline std::uint16_t greater_u32(Vector a, Vector b) {
    return static_cast<std::uint16_t>(
        make_mask<std::uint32_t>([&](int i) { return get<std::uint32_t>(a, i) > get<std::uint32_t>(b, i); }));
}
inline std::uint8_t greater_i64(Vector a, Vector b) {
    return static_cast<std::uint8_t>(
        make_mask<std::int64_t>([&](int i) { return get<std::int64_t>(a, i) > get<std::int64_t>(b, i); }));
}
inline std::uint64_t top_bits_i8(Vector a) {
    return make_mask<std::int8_t>([&](int i) { return get<std::int8_t>(a, i) < 0; });
}
inline std::uint64_t test_i8(Vector a, Vector b) {
    return make_mask<std::uint8_t>([&](int i) { return (get<std::uint8_t>(a, i) & get<std::uint8_t>(b, i)) != 0; });
}
inline std::uint32_t test_i16(Vector a, Vector b) {
    return static_cast<std::uint32_t>(
        make_mask<std::uint16_t>([&](int i) { return (get<std::uint16_t>(a, i) & get<std::uint16_t>(b, i)) != 0; }));
}
template <class T>
Vector select(std::uint64_t mask, const Vector& a, const Vector& b) {
    return make<T>([&](int i) { return bit(mask, i) ? get<T>(b, i) : get<T>(a, i); });
}
inline Vector select_i8(std::uint64_t mask, Vector a, Vector b) { return select<std::int8_t>(mask, a, b); }
inline Vector select_i16(std::uint32_t mask, Vector a, Vector b) { return select<std::int16_t>(mask, a, b); }
inline Vector select_i32(std::uint16_t mask, Vector a, Vector b) { return select<std::int32_t>(mask, a, b); }
inline Vector select_i64(std::uint8_t mask, Vector a, Vector b) { return select<std::int64_t>(mask, a, b); }

inline Vector high_halves(Vector even, Vector odd) {
    return make<std::int32_t>([&](int i) { return get<std::int32_t>(i % 2 == 0 ? even : odd, i | 1); });
}

template <class T>
Vector permute2(const Vector& low, const Vector& index, const Vector& high) {
    return make<T>([&](int i) {
        const int at = static_cast<int>(get<T>(index, i) & static_cast<T>(2 * COUNT<T> - 1));
        return at < COUNT<T> ? get<T>(low, at) : get<T>(high, at - COUNT<T>);
    });
}
#ifndef FQVIT_AVX512_BW
inline Vector permute_i8(Vector index, Vector table) { return permute2<std::uint8_t>(table, index, table); }
inline Vector permute2_i8(Vector low, Vector index, Vector high) { return permute2<std::uint8_t>(low, index, high); }
#endif
inline Vector permute_i16(Vector index, Vector table) { return permute2<std::uint16_t>(table, index, table); }
inline Vector permute_i16(std::uint32_t mask, Vector index, Vector table) {
    return select<std::uint16_t>(mask, zero(), permute_i16(index, table));
}
inline Vector permute_i32(Vector index, Vector table) { return permute2<std::uint32_t>(table, index, table); }
inline Vector permute_i64(Vector index, Vector table) { return permute2<std::uint64_t>(table, index, table); }
inline Vector permute2_i16(Vector low, Vector index, Vector high) { return permute2<std::uint16_t>(low, index, high); }
inline Vector permute2_i32(Vector low, Vector index, Vector high) { return permute2<std::uint32_t>(low, index, high); }

inline Vector shuffle_i8(Vector index, Vector table) {
    return make<std::uint8_t>([&](int i) {
        const int at = get<std::uint8_t>(index, i);
        return at >= 128 ? std::uint8_t{0} : get<std::uint8_t>(table, i / 16 * 16 + at % 16);
    });
}

// Lanes of 128 bits: the first half of each lane from a, the second from b.
template <class From, class To>
Vector pack(const Vector& a, const Vector& b) {
    return make<To>([&](int i) {
        constexpr int half = 8 / sizeof(To);
        const int lane = i / (2 * half), at = i % (2 * half);
        return saturate<To>(get<From>(at < half ? a : b, lane * half + at % half));
    });
}
inline Vector pack_i32_as_i16(Vector a, Vector b) { return pack<std::int32_t, std::int16_t>(a, b); }
inline Vector pack_i32_as_u16(Vector a, Vector b) { return pack<std::int32_t, std::uint16_t>(a, b); }
inline Vector pack_i16_as_u8(Vector a, Vector b) { return pack<std::int16_t, std::uint8_t>(a, b); }
template <class T>
Vector interleave(const Vector& a, const Vector& b, bool high) {
    return make<T>([&](int i) {
        constexpr int lane = 16 / sizeof(T);
        return get<T>(i % 2 == 0 ? a : b, i / lane * lane + i % lane / 2 + (high ? lane / 2 : 0));
    });
}
inline Vector interleave_low_i8(Vector a, Vector b) { return interleave<std::uint8_t>(a, b, false); }
inline Vector interleave_high_i8(Vector a, Vector b) { return interleave<std::uint8_t>(a, b, true); }
inline Vector interleave_low_i16(Vector a, Vector b) { return interleave<std::uint16_t>(a, b, false); }
inline Vector interleave_high_i16(Vector a, Vector b) { return interleave<std::uint16_t>(a, b, true); }
inline Vector interleave_low_i32(Vector a, Vector b) { return interleave<std::uint32_t>(a, b, false); }
inline Vector interleave_high_i32(Vector a, Vector b) { return interleave<std::uint32_t>(a, b, true); }
inline Vector interleave_low_i64(Vector a, Vector b) { return interleave<std::uint64_t>(a, b, false); }
inline Vector interleave_high_i64(Vector a, Vector b) { return interleave<std::uint64_t>(a, b, true); }

inline Vector shuffle_lanes(Vector a, Vector b, int lanes) {
    return make<std::uint64_t>(
        [&](int i) { return get<std::uint64_t>(i < 4 ? a : b, ((lanes >> (i / 2 * 2)) & 3) * 2 + i % 2); });
}
#define FQVIT_SHUFFLE_LANES(a, b, lanes) shuffle_lanes(a, b, lanes)

inline std::int64_t sum_i64(Vector v) {
    std::uint64_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += get<std::uint64_t>(v, i);
    return static_cast<std::int64_t>(sum);
}
inline std::int32_t sum_i32(Vector v) {
    std::uint32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += get<std::uint32_t>(v, i);
    return static_cast<std::int32_t>(sum);
}
inline std::uint8_t largest_u8(Vector v) { return *std::max_element(v.bytes, v.bytes + 64); }

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
