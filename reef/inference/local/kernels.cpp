// What torch leaves slow on a CPU, for float and bfloat16. Plain loops that a compiler vectorizes; all state is the
// caller's. Shapes: T tokens, H heads, K KV heads, D head size, P page size. Rounding follows the torch operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
  uint32_t wide = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline void store(float* p, float value) { *p = value; }
inline void store(bf16* p, float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest, ties to even
  p->bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}
template <class T>
inline float round_to(float value) {
  T narrow;
  store(&narrow, value);
  return load(&narrow);
}

// e^x in float: 2^n * p(r), relative error about 1e-7.
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.3f), 88.3f);
  float n = std::nearbyint(x * 1.44269504f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

// x += delta (unless null); out = x / rms(x) * weight. x, delta, out [T, size].
template <class S>
void add_norm(S* x, const S* delta, const S* weight, S* out, int64_t tokens, int64_t size, float eps) {
#pragma omp parallel for if (tokens * size > 16384)
  for (int64_t t = 0; t < tokens; t++) {
    S* row = x + t * size;
    if (delta) {
      const S* add = delta + t * size;
      for (int64_t i = 0; i < size; i++) store(row + i, load(row + i) + load(add + i));
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += load(row + i) * load(row + i);
    float scale = 1.0f / std::sqrt(sum / size + eps);
    S* to = out + t * size;
    for (int64_t i = 0; i < size; i++) store(to + i, round_to<S>(load(row + i) * scale) * load(weight + i));
  }
}

// Rotate q and k inside qkv [T, (H + 2K) * D] and copy k and v to their slots. cos, sin [positions, D / 2].
template <class S>
void rotate_store(S* qkv, const S* cos, const S* sin, const int64_t* positions, const int64_t* slots, S* keys, S* values,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
  int64_t half = dim / 2, width = (heads + 2 * kv_heads) * dim, kv_width = kv_heads * dim;
#pragma omp parallel for if (tokens * width > 16384)
  for (int64_t t = 0; t < tokens; t++) {
    S* row = qkv + t * width;
    const S* c = cos + positions[t] * half;
    const S* s = sin + positions[t] * half;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      S* a = row + h * dim;
      S* b = a + half;
#pragma omp simd
      for (int64_t i = 0; i < half; i++) {
        float x = load(a + i), y = load(b + i), u = load(c + i), v = load(s + i);
        store(a + i, round_to<S>(x * u) - round_to<S>(y * v));
        store(b + i, round_to<S>(y * u) + round_to<S>(x * v));
      }
    }
    if (slots) {
      std::memcpy(keys + slots[t] * kv_width, row + heads * dim, kv_width * sizeof(S));
      std::memcpy(values + slots[t] * kv_width, row + heads * dim + kv_width, kv_width * sizeof(S));
    }
  }
}

// One (row, KV head): all query heads of the group over `length` positions.
template <class S>
void attend_one(const S* q, const S* keys, const S* values, const int64_t* pages, int64_t length, S* out, int64_t group,
                int64_t kv_heads, int64_t dim, int64_t page_size, float scale, std::vector<float>& scratch) {
  scratch.resize(group * (length + 2 * dim));
  float* scores = scratch.data();
  float* query = scores + group * length;
  float* sums = query + group * dim;
  for (int64_t i = 0; i < group * dim; i++) query[i] = load(q + i) * scale;
  int64_t stride = kv_heads * dim;
  for (int64_t j = 0; j < length; j++) {
    const S* k = keys + (pages[j / page_size] * page_size + j % page_size) * stride;
    for (int64_t g = 0; g < group; g++) {
      float sum = 0;
      const float* one = query + g * dim;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < dim; i++) sum += one[i] * load(k + i);
      scores[g * length + j] = sum;
    }
  }
  for (int64_t g = 0; g < group; g++) {
    float* row = scores + g * length;
    float top = row[0], total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < length; j++) top = std::max(top, row[j]);
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < length; j++) {
      row[j] = fast_exp(row[j] - top);
      total += row[j];
    }
    float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t j = 0; j < length; j++) row[j] *= inverse;
  }
  std::fill(sums, sums + group * dim, 0.0f);
  for (int64_t j = 0; j < length; j++) {
    const S* v = values + (pages[j / page_size] * page_size + j % page_size) * stride;
    for (int64_t g = 0; g < group; g++) {
      float weight = scores[g * length + j];
      float* sum = sums + g * dim;
#pragma omp simd
      for (int64_t i = 0; i < dim; i++) sum[i] += weight * load(v + i);
    }
  }
  for (int64_t i = 0; i < group * dim; i++) store(out + i, sums[i]);
}

// Rows of queries, each over the first lengths[row] positions of the pages in tables[row]. q [rows, q_stride], of which
// the first H * D are the query heads; out [rows, H * D]; tables [rows, table_width].
template <class S>
void attend_pages(const S* q, int64_t q_stride, const S* keys, const S* values, const int64_t* tables,
                  int64_t table_width, const int64_t* lengths, S* out, int64_t rows, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t page_size) {
  int64_t group = heads / kv_heads;
  float scale = 1.0f / std::sqrt(static_cast<float>(dim));
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t h = 0; h < kv_heads; h++) {
        attend_one(q + r * q_stride + h * group * dim, keys + h * dim, values + h * dim, tables + r * table_width,
                   lengths[r], out + (r * heads + h * group) * dim, group, kv_heads, dim, page_size, scale, scratch);
      }
    }
  }
}

// out = silu(gate) * up. gate_up [T, 2 * size], out [T, size].
template <class S>
void silu_mul(const S* gate_up, S* out, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > 16384)
  for (int64_t t = 0; t < tokens; t++) {
    const S* gate = gate_up + t * 2 * size;
    const S* up = gate + size;
    S* to = out + t * size;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      float x = load(gate + i);
      store(to + i, round_to<S>(x / (1.0f + fast_exp(-x))) * load(up + i));
    }
  }
}

#ifdef __AVX512BF16__
constexpr int64_t LANES = 16, BLOCK = 32;  // outputs in one register, and in one block of packed weights

// ROWS rows of x [T, K] times one block of 32 outputs; its weights are [K / 2, 32, 2].
template <int ROWS>
void linear_tile(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t inputs, int64_t outputs) {
  __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2) {
    const bf16* at = weight + k * BLOCK;
    _mm_prefetch(reinterpret_cast<const char*>(at) + 4096, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(at) + 4160, _MM_HINT_T0);
    __m512bh first = (__m512bh)_mm512_loadu_si512(at), second = (__m512bh)_mm512_loadu_si512(at + 2 * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * inputs + k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      low[r] = _mm512_dpbf16_ps(low[r], first, both);
      high[r] = _mm512_dpbf16_ps(high[r], second, both);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    float row[BLOCK];
    _mm512_storeu_ps(row, low[r]);
    _mm512_storeu_ps(row + LANES, high[r]);
    for (int i = 0; i < BLOCK; i++) store(y + r * outputs + i, row[i] + (bias ? load(bias + i) : 0.0f));
  }
}

// y [T, N] = x [T, K] W^T + bias; `weight` is packed as [N / 32, K / 2, 32, 2].
void linear(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < n; at += BLOCK) {
    const bf16* own = weight + at * k;
    const bf16* added = bias ? bias + at : nullptr;
    int64_t t = 0;
    for (; t + 8 <= tokens; t += 8) linear_tile<8>(x + t * k, own, added, y + t * n + at, k, n);
    for (; t + 4 <= tokens; t += 4) linear_tile<4>(x + t * k, own, added, y + t * n + at, k, n);
    for (; t + 2 <= tokens; t += 2) linear_tile<2>(x + t * k, own, added, y + t * n + at, k, n);
    for (; t < tokens; t++) linear_tile<1>(x + t * k, own, added, y + t * n + at, k, n);
  }
}
#endif

}  // namespace

#define EXPORT(NAME, S)                                                                                               \
  void add_norm_##NAME(S* x, const S* delta, const S* weight, S* out, int64_t tokens, int64_t size, float eps) {      \
    add_norm<S>(x, delta, weight, out, tokens, size, eps);                                                            \
  }                                                                                                                   \
  void rotate_store_##NAME(S* qkv, const S* cos, const S* sin, const int64_t* positions, const int64_t* slots,        \
                           S* keys, S* values, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {        \
    rotate_store<S>(qkv, cos, sin, positions, slots, keys, values, tokens, heads, kv_heads, dim);                     \
  }                                                                                                                   \
  void attend_pages_##NAME(const S* q, int64_t q_stride, const S* keys, const S* values, const int64_t* tables,       \
                           int64_t table_width, const int64_t* lengths, S* out, int64_t rows, int64_t heads,          \
                           int64_t kv_heads, int64_t dim, int64_t page_size) {                                        \
    attend_pages<S>(q, q_stride, keys, values, tables, table_width, lengths, out, rows, heads, kv_heads, dim,         \
                    page_size);                                                                                       \
  }                                                                                                                   \
  void silu_mul_##NAME(const S* gate_up, S* out, int64_t tokens, int64_t size) {                                      \
    silu_mul<S>(gate_up, out, tokens, size);                                                                          \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
#ifdef __AVX512BF16__
void linear_bfloat16(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t n, int64_t k) {
  linear(x, weight, bias, y, tokens, n, k);
}
#endif
}
