// Eight floats at a time for cpu_native.cpp: storage formats to fp32, exponential, tanh, sums. Plain compiler vectors,
// so that any CPU will do; intrinsics only where GCC 12 takes a conversion apart.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 4")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I8{__VA_ARGS__})
#endif

namespace {

enum Format : int64_t { FP32, BF16, FP16, E4M3, E5M2, INT8 };

typedef float V8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef float Unaligned8 __attribute__((vector_size(32), aligned(4), may_alias));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr I8 IOTA = {0, 1, 2, 3, 4, 5, 6, 7};

inline V8 load(const float* p) { return *reinterpret_cast<const Unaligned8*>(p); }
inline void store(float* p, V8 x) { *reinterpret_cast<Unaligned8*>(p) = x; }
inline V8 splat(float x) { return V8{x, x, x, x, x, x, x, x}; }
template <typename To, typename From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline int64_t padded(int64_t dim) { return (dim + 7) / 8 * 8; }

// ---- elements to fp32, exactly; integer arithmetic, so that flushed subnormals change nothing ----

inline V8 number(I8 x) { return __builtin_convertvector(x, V8); }

template <int64_t format>
inline V8 decode(I8 x) {
  if constexpr (format == BF16) return bits<V8>(x << 16);
  if constexpr (format == INT8) return number((x << 24) >> 24);
  if constexpr (format == E5M2) return decode<FP16>(x << 8);
  if constexpr (format == FP16) {
    const I8 size = x & 0x7fff;
    const I8 finite = size < 0x400 ? bits<I8>(number(size) * 0x1p-24f) : (size << 13) + (112 << 23);
    return bits<V8>(finite | ((size >= 0x7c00) & 0x7f800000) | ((x & 0x8000) << 16));
  }
  if constexpr (format == E4M3) {
    const I8 size = x & 0x7f;
    const I8 finite = size < 8 ? bits<I8>(number(size) * 0x1p-9f) : (size << 20) + (120 << 23);
    return bits<V8>(finite | ((size == 0x7f) & 0x7fc00000) | ((x & 0x80) << 24));
  }
}

// 8 unsigned elements as integers. GCC 12 takes __builtin_convertvector apart element by element.
template <typename T>
inline I8 read8(const char* from) {
#ifdef __AVX2__
  __m128i raw = {};
  std::memcpy(&raw, from, 8 * sizeof(T));
  return bits<I8>(sizeof(T) == 1 ? _mm256_cvtepu8_epi32(raw) : _mm256_cvtepu16_epi32(raw));
#else
  typedef T Raw8 __attribute__((vector_size(8 * sizeof(T))));
  Raw8 raw;
  std::memcpy(&raw, from, sizeof raw);
  return __builtin_convertvector(raw, I8);
#endif
}

template <int64_t format, typename T>
inline V8 widen8(const char* from) {
#ifdef __F16C__
  if constexpr (format == FP16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  return decode<format>(read8<T>(from));
}

template <int64_t format, typename T>
void widen_as(const char* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store(to + i, widen8<format, T>(from + i * sizeof(T)));
  if (i == n) return;
  T rest[8] = {};
  std::memcpy(rest, from + i * sizeof(T), (n - i) * sizeof(T));
  store(to + i, widen8<format, T>(reinterpret_cast<const char*>(rest)));
}

// n elements as fp32; `to` has room for a multiple of 8, and what pads it becomes 0.
void widen(int64_t format, const char* from, float* to, int64_t n) {
  switch (format) {
    case BF16: return widen_as<BF16, uint16_t>(from, to, n);
    case FP16: return widen_as<FP16, uint16_t>(from, to, n);
    case E4M3: return widen_as<E4M3, uint8_t>(from, to, n);
    case E5M2: return widen_as<E5M2, uint8_t>(from, to, n);
    case INT8: return widen_as<INT8, uint8_t>(from, to, n);
    default: std::memcpy(to, from, n * sizeof *to);
  }
}
int64_t size_of(int64_t format) { return format == FP32 ? 4 : format == BF16 || format == FP16 ? 2 : 1; }

// ---- functions of 8 floats ----

// eˣ for x ≤ 0, 0 below −87, NaN for NaN; the polynomial of Cephes' expf.
inline V8 exp8(V8 x) {
  const V8 shift = splat(12582912.0f + 127.0f);  // 1.5 · 2²³ rounds to an integer; exponent bias
  const V8 t = x * 1.44269504f + shift;
  const V8 n = t - shift;
  const V8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V8 y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const V8 power = bits<V8>(bits<I8>(t) << 23);
  return x < splat(-87.0f) ? splat(0.0f) : y * power;
}

// tanh; Taylor near 0, where (1 − e⁻²ˣ) / (1 + e⁻²ˣ) would cancel.
inline V8 tanh8(V8 x) {
  const V8 y = x * x;
  V8 s = y * (21844.0f / 6081075) - 1382.0f / 155925;
  s = y * s + 62.0f / 2835;
  s = y * s - 17.0f / 315;
  s = y * s + 2.0f / 15;
  s = y * s - 1.0f / 3;
  s = y * s + 1.0f;
  const V8 size = x < splat(0.0f) ? -x : x;
  const V8 t = exp8(size * -2.0f);
  const V8 far = (1.0f - t) / (1.0f + t);
  return y < splat(0.25f) ? x * s : x < splat(0.0f) ? -far : far;
}

// The sums of a, b, c and d.
inline void store_sums(float* to, V8 a, V8 b, V8 c, V8 d) {
  const V8 ab = SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const V8 cd = SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const V8 sums = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  const V8 total = sums + SHUFFLE(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3);
  std::memcpy(to, &total, 4 * sizeof *to);
}

}  // namespace
