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
  return __builtin_bit_cast(float, static_cast<uint32_t>(p->bits) << 16);
}
inline void store(float* p, float value) { *p = value; }
inline void store(bf16* p, float value) {
  uint32_t wide = __builtin_bit_cast(uint32_t, value);
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
  return p * __builtin_bit_cast(float, bits);
}

// In place.
inline void softmax(float* row, int64_t length) {
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

// Rotate q and k inside qkv [T, (H + 2K) * D] and copy k and v to their slots (page * P + offset) in keys and values
// [pages, K, P, D], unless slots is null. cos, sin [positions, D / 2].
template <class S>
void rotate_store(S* qkv, const S* cos, const S* sin, const int64_t* positions, const int64_t* slots, S* keys, S* values,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_size) {
  int64_t half = dim / 2, width = (heads + 2 * kv_heads) * dim;
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
    for (int64_t h = 0; slots && h < kv_heads; h++) {
      int64_t to = ((slots[t] / page_size * kv_heads + h) * page_size + slots[t] % page_size) * dim;
      const S* k = row + (heads + h) * dim;
      std::memcpy(keys + to, k, dim * sizeof(S));
      std::memcpy(values + to, k + kv_heads * dim, dim * sizeof(S));
    }
  }
}

// Sixteen floats at a time, in whatever registers there are.
typedef float vec __attribute__((vector_size(64)));
typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));

inline vec load_vec(const float* p) {
  vec value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline vec load_vec(const bf16* p) {
  typedef uint16_t narrow __attribute__((vector_size(32)));
  typedef uint32_t wide __attribute__((vector_size(64)));
  narrow bits;
  std::memcpy(&bits, p, sizeof bits);
  return (vec)(__builtin_convertvector(bits, wide) << 16);
}
inline float sum_of(vec x) {
  half_vec halves[2];
  std::memcpy(halves, &x, sizeof x);
  half_vec half = halves[0] + halves[1];
  quarter_vec quarters[2];
  std::memcpy(quarters, &half, sizeof half);
  quarter_vec quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

template <class S, int DIM>
inline void prefetch(const S* at) {
  for (size_t offset = 0; offset < DIM * sizeof(S); offset += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(at) + offset);
  }
}

// Query heads [GROUP, DIM] that share one KV head, over `length` positions; scores is scratch [GROUP, length]. In
// keys and values a page of one KV head is [P, DIM], and pages are `stride` apart. The sizes are constants so that a
// whole head stays in registers.
template <class S, int DIM, int GROUP>
void attend_group(const S* q, const S* keys, const S* values, const int64_t* pages, int64_t length, S* out,
                  int64_t stride, int64_t page_size, float scale, float* scores) {
  constexpr int VECS = DIM / 16;
  vec query[GROUP][VECS];
#pragma GCC unroll 32
  for (int i = 0; i < GROUP * VECS; i++) query[i / VECS][i % VECS] = load_vec(q + i * 16) * scale;
  for (int64_t start = 0; start < length; start += page_size) {
    const S* k = keys + pages[start / page_size] * stride;
    const S* next = start + page_size < length ? keys + pages[start / page_size + 1] * stride : values + pages[0] * stride;
    int64_t end = std::min(length, start + page_size);
    for (int64_t j = start; j < end; j++, k += DIM, next += DIM) {
      prefetch<S, DIM>(next);
      vec sums[GROUP] = {};
#pragma GCC unroll 8
      for (int i = 0; i < VECS; i++) {
        vec key = load_vec(k + i * 16);
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; g++) sums[g] += query[g][i] * key;
      }
#pragma GCC unroll 4
      for (int g = 0; g < GROUP; g++) scores[g * length + j] = sum_of(sums[g]);
    }
  }
  for (int g = 0; g < GROUP; g++) softmax(scores + g * length, length);
  vec mixed[GROUP][VECS] = {};
  for (int64_t start = 0; start < length; start += page_size) {
    const S* v = values + pages[start / page_size] * stride;
    const S* next = start + page_size < length ? values + pages[start / page_size + 1] * stride : v;
    int64_t end = std::min(length, start + page_size);
    for (int64_t j = start; j < end; j++, v += DIM, next += DIM) {
      prefetch<S, DIM>(next);
#pragma GCC unroll 8
      for (int i = 0; i < VECS; i++) {
        vec value = load_vec(v + i * 16);
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; g++) mixed[g][i] += scores[g * length + j] * value;
      }
    }
  }
  for (int g = 0; g < GROUP; g++)
    for (int i = 0; i < DIM; i++) store(out + g * DIM + i, mixed[g][i / 16][i % 16]);
}

// Any number of heads that share one KV head, a few at a time.
template <class S, int DIM>
void attend_heads(int64_t heads, const S* q, const S* keys, const S* values, const int64_t* pages, int64_t length,
                  S* out, int64_t stride, int64_t page_size, float scale, float* scores) {
  constexpr int MOST = DIM > 64 ? 2 : 4;
  for (; heads > 0; heads -= MOST, q += MOST * DIM, out += MOST * DIM) {
    auto one = heads >= MOST || heads == 4 ? attend_group<S, DIM, MOST>
               : heads == 3                ? attend_group<S, DIM, 3>
               : heads == 2                ? attend_group<S, DIM, 2>
                                           : attend_group<S, DIM, 1>;
    one(q, keys, values, pages, length, out, stride, page_size, scale, scores);
  }
}

// Rows of queries, each over the first lengths[row] positions of the pages in tables[row]. q [rows, q_stride], of which
// the first H * D are the query heads; out [rows, H * D]; tables [rows, table_width].
template <class S, int DIM>
void attend_rows(const S* q, int64_t q_stride, const S* keys, const S* values, const int64_t* tables,
                 int64_t table_width, const int64_t* lengths, S* out, int64_t rows, int64_t heads, int64_t kv_heads,
                 int64_t page_size) {
  int64_t group = heads / kv_heads;
  float scale = 1.0f / std::sqrt(static_cast<float>(DIM));
#pragma omp parallel
  {
    std::vector<float> scores;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t h = 0; h < kv_heads; h++) {
        scores.resize(4 * lengths[r]);
        int64_t head = h * page_size * DIM;
        attend_heads<S, DIM>(group, q + r * q_stride + h * group * DIM, keys + head, values + head,
                             tables + r * table_width, lengths[r], out + (r * heads + h * group) * DIM,
                             kv_heads * page_size * DIM, page_size, scale, scores.data());
      }
    }
  }
}

// Returns false, having done nothing, for a head size that is not compiled in.
template <class S>
bool attend_pages(const S* q, int64_t q_stride, const S* keys, const S* values, const int64_t* tables,
                  int64_t table_width, const int64_t* lengths, S* out, int64_t rows, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t page_size) {
  auto run = dim == 16    ? attend_rows<S, 16>
             : dim == 32  ? attend_rows<S, 32>
             : dim == 64  ? attend_rows<S, 64>
             : dim == 80  ? attend_rows<S, 80>
             : dim == 96  ? attend_rows<S, 96>
             : dim == 128 ? attend_rows<S, 128>
                          : nullptr;
  if (!run) return false;
  run(q, q_stride, keys, values, tables, table_width, lengths, out, rows, heads, kv_heads, page_size);
  return true;
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

// Of a product in float: numbers in a register, rows whose sums fit into registers, outputs in one block of packed
// weights; rows whose x stays in the second-level cache while all weights pass, inputs that are summed up before they
// are added to the others, which keeps rounding small.
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, TILE = 12;
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, TILE = 6;
#else
constexpr int64_t WIDTH = 4, TILE = 6;
#endif
constexpr int64_t OUTPUTS = 16, PARTS = OUTPUTS / WIDTH, STRETCH = 48, SUMMED = 256;
typedef float Register __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

// ROWS rows of x [T, K], `count` inputs of each, times one block of 16 outputs; its weights are [K, 16].
template <int ROWS>
void linear_tile(const float* x, const float* weight, const float* bias, float* y, int64_t count, int64_t inputs,
                 int64_t outputs, bool first) {
  Register sums[ROWS][PARTS] = {};
  for (int64_t k = 0; k < count; k++) {
    Register parts[PARTS];
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) parts[p] = *reinterpret_cast<const Register*>(weight + k * OUTPUTS + p * WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) sums[r][p] += parts[p] * x[r * inputs + k];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      Register* to = reinterpret_cast<Register*>(y + r * outputs + p * WIDTH);
      Register before = {};
      if (!first) before = *to;
      if (first && bias) before = *reinterpret_cast<const Register*>(bias + p * WIDTH);
      *to = before + sums[r][p];
    }
  }
}

// y [T, N] = x [T, K] W^T + bias; `weight` is packed as [N / 16, K, 16].
void linear(const float* x, const float* weight, const float* bias, float* y, int64_t tokens, int64_t n, int64_t k) {
  for (int64_t begin = 0; begin < tokens; begin += STRETCH) {
    int64_t end = std::min(begin + STRETCH, tokens);
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < n; at += OUTPUTS) {
      const float* added = bias ? bias + at : nullptr;
      for (int64_t from = 0; from < k; from += SUMMED) {
        const float* own = weight + at * k + from * OUTPUTS;
        int64_t t = begin;
        auto tiles = [&](auto tile, int64_t rows) {
          for (; t + rows <= end; t += rows) {
            tile(x + t * k + from, own, added, y + t * n + at, std::min(SUMMED, k - from), k, n, from == 0);
          }
        };
        tiles(linear_tile<TILE>, TILE);
        tiles(linear_tile<4>, 4);
        tiles(linear_tile<2>, 2);
        tiles(linear_tile<1>, 1);
      }
    }
  }
}

#ifdef __AVX512BF16__
constexpr int64_t LANES = 16, BLOCK = 32;  // outputs in one register, and in one block of packed weights

// ROWS rows of x [T, K] times one block of 32 outputs; its weights are [K / 2, 32, 2]. As it goes it fetches half a
// block from `ahead` into the second-level cache.
template <int ROWS>
void linear_tile(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t inputs, int64_t outputs,
                 const bf16* ahead) {
  __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2) {
    const bf16* at = weight + k * BLOCK;
    _mm_prefetch(reinterpret_cast<const char*>(ahead + k * LANES), _MM_HINT_T1);
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

// y [T, N] = x [T, K] W^T + bias; `weight` is packed as [N / 32, K / 2, 32, 2]. One tile of rows streams its weights
// faster without fetching the next block. With more tiles, the next block is fetched while this one is multiplied, half
// of it by each of two, or the second tile would leave memory idle.
void linear(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < n; at += BLOCK) {
    const bf16* own = weight + at * k;
    const bf16* next = tokens > 8 && at + BLOCK < n ? own + BLOCK * k : own;
    const bf16* added = bias ? bias + at : nullptr;
    int64_t t = 0;
    auto tiles = [&](auto tile, int64_t rows) {
      for (; t + rows <= tokens; t += rows) {
        tile(x + t * k, own, added, y + t * n + at, k, n, next + t / 8 % 2 * LANES * k);
      }
    };
    tiles(linear_tile<8>, 8);
    tiles(linear_tile<4>, 4);
    tiles(linear_tile<2>, 2);
    tiles(linear_tile<1>, 1);
  }
}
#endif

}  // namespace

#define EXPORT(NAME, S)                                                                                               \
  void add_norm_##NAME(S* x, const S* delta, const S* weight, S* out, int64_t tokens, int64_t size, float eps) {      \
    add_norm<S>(x, delta, weight, out, tokens, size, eps);                                                            \
  }                                                                                                                   \
  void rotate_store_##NAME(S* qkv, const S* cos, const S* sin, const int64_t* positions, const int64_t* slots,        \
                           S* keys, S* values, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,          \
                           int64_t page_size) {                                                                       \
    rotate_store<S>(qkv, cos, sin, positions, slots, keys, values, tokens, heads, kv_heads, dim, page_size);          \
  }                                                                                                                   \
  int attend_pages_##NAME(const S* q, int64_t q_stride, const S* keys, const S* values, const int64_t* tables,       \
                           int64_t table_width, const int64_t* lengths, S* out, int64_t rows, int64_t heads,          \
                           int64_t kv_heads, int64_t dim, int64_t page_size) {                                        \
    return attend_pages<S>(q, q_stride, keys, values, tables, table_width, lengths, out, rows, heads, kv_heads, dim,  \
                           page_size);                                                                                \
  }                                                                                                                   \
  void silu_mul_##NAME(const S* gate_up, S* out, int64_t tokens, int64_t size) {                                      \
    silu_mul<S>(gate_up, out, tokens, size);                                                                          \
  }

extern "C" {
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
void linear_float32(const float* x, const float* weight, const float* bias, float* y, int64_t tokens, int64_t n,
                    int64_t k) {
  linear(x, weight, bias, y, tokens, n, k);
}
#ifdef __AVX512BF16__
void linear_bfloat16(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t n, int64_t k) {
  linear(x, weight, bias, y, tokens, n, k);
}
#endif
}
