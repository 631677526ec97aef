/* Each sum has one order, whatever the threads, the other requests and the processor are: eight
 * partial sums of a product, keys one after the other, parts in turn. Products are added without
 * rounding between, which every processor with fast kernels does. */
#include "attention.h"
#include "product.h"

#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
  LANES = 8,
  MOST_FOUND = 2 * MOST_QUERIES * (2 + MOST_SIZE), /* of both halves */
  ROW_SCORES = PART_KEYS + LANES,                  /* as weights are padded */
  TILE_BYTES = 1 << 14, /* of keys that stay in the nearest cache, as heads share them */
};

/* Eight floats. `add_product` rounds once. */
#if defined(__AVX2__)
typedef __m256 F8;
INLINE F8 all(float value) { return _mm256_set1_ps(value); }
INLINE F8 load(const float *at) { return _mm256_loadu_ps(at); }
INLINE F8 load_codes(const int8_t *at) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
INLINE F8 load_nibbles(const uint8_t *at) {
  int32_t bytes;
  memcpy(&bytes, at, sizeof bytes);
  const __m256i places = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(bytes), places),
                                         _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
}
INLINE void store(float *at, F8 x) { _mm256_storeu_ps(at, x); }
/* 32 codes of half a byte, in their order. */
INLINE void store_nibbles(float *at, const uint8_t *from) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)from), half = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, half), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), half);
  const __m128i codes[] = {_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)};
  for (int i = 0; i < 4; i++) {
    const __m128i of = _mm_sub_epi8(codes[i / 2], _mm_set1_epi8(8));
    const __m128i eight = i % 2 ? _mm_srli_si128(of, 8) : of;
    store(at + i * LANES, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
  }
}
INLINE F8 add_product(F8 sum, F8 a, F8 b) { return _mm256_fmadd_ps(a, b, sum); }
/* The sums of eight vectors, each of neighbours, of these, and of these. */
INLINE F8 sums(const F8 x[8]) {
  const F8 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F8 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
/* The sums of four vectors, in the same order. */
INLINE void store_sums(float *at, const F8 x[4]) {
  const F8 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(at, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
#elif defined(__aarch64__)
typedef struct {
  float32x4_t low, high;
} F8;
INLINE F8 all(float value) { return (F8){vdupq_n_f32(value), vdupq_n_f32(value)}; }
INLINE F8 load(const float *at) { return (F8){vld1q_f32(at), vld1q_f32(at + 4)}; }
INLINE F8 load_codes(const int8_t *at) {
  const int16x8_t wide = vmovl_s8(vld1_s8(at));
  return (F8){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
              vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
INLINE F8 load_nibbles(const uint8_t *at) {
  uint32_t four;
  memcpy(&four, at, sizeof four);
  const uint8x8_t bytes = vcreate_u8(four), low = vand_u8(bytes, vdup_n_u8(15));
  const uint8x8_t codes = vzip1_u8(low, vshr_n_u8(bytes, 4));
  const int16x8_t wide = vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(codes)), vdupq_n_s16(8));
  return (F8){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
              vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
INLINE void store(float *at, F8 x) { vst1q_f32(at, x.low), vst1q_f32(at + 4, x.high); }
INLINE F8 add_product(F8 sum, F8 a, F8 b) {
  return (F8){vfmaq_f32(sum.low, a.low, b.low), vfmaq_f32(sum.high, a.high, b.high)};
}
INLINE F8 sums(const F8 x[8]) {
  float32x4_t half[4];
  for (int i = 0; i < 4; i++) {
    const F8 a = x[2 * i], b = x[2 * i + 1];
    half[i] = vpaddq_f32(vpaddq_f32(a.low, a.high), vpaddq_f32(b.low, b.high));
  }
  return (F8){vpaddq_f32(half[0], half[1]), vpaddq_f32(half[2], half[3])};
}
INLINE void store_sums(float *at, const F8 x[4]) {
  float32x4_t half[4];
  for (int i = 0; i < 4; i++) half[i] = vpaddq_f32(x[i].low, x[i].high);
  vst1q_f32(at, vpaddq_f32(vpaddq_f32(half[0], half[1]), vpaddq_f32(half[2], half[3])));
}
#else
typedef struct {
  float of[8];
} F8;
#define EACH(value)                                \
  F8 found;                                        \
  for (int i = 0; i < 8; i++) found.of[i] = value; \
  return found
INLINE F8 all(float value) { EACH(value); }
INLINE F8 load(const float *at) { EACH(at[i]); }
INLINE F8 load_codes(const int8_t *at) { EACH(at[i]); }
INLINE F8 load_nibbles(const uint8_t *at) { EACH((float)((at[i / 2] >> (i % 2 * 4) & 15) - 8)); }
INLINE void store(float *at, F8 x) { memcpy(at, x.of, sizeof x.of); }
INLINE F8 add_product(F8 sum, F8 a, F8 b) { EACH(fmaf(a.of[i], b.of[i], sum.of[i])); }
INLINE float total_of(const float *x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
INLINE F8 sums(const F8 x[8]) { EACH(total_of(x[i].of)); }
INLINE void store_sums(float *at, const F8 x[4]) {
  for (int i = 0; i < 4; i++) at[i] = total_of(x[i].of);
}
#endif

#if !defined(__AVX2__)
INLINE void store_nibbles(float *at, const uint8_t *from) {
  for (int i = 0; i < 32; i += LANES) store(at + i, load_nibbles(from + i / 2));
}
#endif

INLINE F8 floats(const void *memory, size_t at, int bits) {
  if (bits == 4) return load_nibbles((const uint8_t *)memory + at / 2);
  if (bits == 8) return load_codes((const int8_t *)memory + at);
  return load((const float *)memory + at);
}

INLINE float sum(F8 x) {
  float of[8];
  store(of, x);
  return ((of[0] + of[1]) + (of[2] + of[3])) + ((of[4] + of[5]) + (of[6] + of[7]));
}

enum { LINE = 64 };

/* What a head asks memory for while it computes, for each eight keys: its share of what is read next. */
typedef struct {
  size_t ahead, bytes, row;
  int is_first; /* of the heads that share keys */
} Asking;

INLINE Asking asking_of(size_t head, size_t heads, size_t tile, size_t row, int is_stream) {
  const size_t share = (8 * row / heads + LINE - 1) / LINE * LINE, first = head * share;
  const size_t left = first < 8 * row ? 8 * row - first : 0;
  return (Asking){.ahead = tile * row + first, .row = row, .is_first = !head,
                  .bytes = is_stream ? 0 : share < left ? share : left};
}

/* Without it a key takes twice as long where memory sets the pace. */
INLINE void ask(Asking asking, const char *memory) {
  for (size_t at = 0; at < asking.bytes; at += LINE)
    __builtin_prefetch(memory + asking.ahead + at, 0, 2);
}

/* Scores of `count` keys; those up to a multiple of eight are undefined. */
INLINE void score(const float *query, const void *keys, size_t size, size_t count, float *scores,
                  Asking asking, int bits) {
  const size_t row = size * (size_t)bits / 8;
  size_t key = 0;
  for (; key + 8 <= count; key += 8) {
    F8 x[8] = {all(0), all(0), all(0), all(0), all(0), all(0), all(0), all(0)};
    ask(asking, (const char *)keys + key * row);
    if (asking.is_first) { /* in the order of memory, which is what takes time */
      for (size_t i = 0; i < 8; i++)
        for (size_t at = 0; at < size; at += LANES)
          x[i] = add_product(x[i], load(query + at), floats(keys, (key + i) * size + at, bits));
    } else {
      for (size_t at = 0; at < size; at += LANES) {
        const F8 q = load(query + at);
        for (size_t i = 0; i < 8; i++)
          x[i] = add_product(x[i], q, floats(keys, (key + i) * size + at, bits));
      }
    }
    store(scores + key, sums(x));
  }
  for (; key < count; key++) {
    F8 x = all(0);
    for (size_t at = 0; at < size; at += LANES)
      x = add_product(x, load(query + at), floats(keys, key * size + at, bits));
    scores[key] = sum(x);
  }
}

/* Adds values, each times its weight. */
INLINE void add_vectors(const float *weights, const void *values, size_t size, size_t count,
                        float *total, size_t at, size_t vectors, Asking asking, int bits) {
  const size_t row = size * (size_t)bits / 8;
  F8 x[8];
  for (size_t i = 0; i < vectors; i++) x[i] = load(total + at + i * LANES);
  for (size_t key = 0; key < count; key++) {
    const F8 weight = all(weights[key]);
    if (!at && key % 8 == 0) ask(asking, (const char *)values + key * row);
    for (size_t i = 0; i < vectors; i++)
      x[i] = add_product(x[i], weight, floats(values, key * size + at + i * LANES, bits));
  }
  for (size_t i = 0; i < vectors; i++) store(total + at + i * LANES, x[i]);
}

INLINE void add(const float *weights, const void *values, size_t size, size_t count, float *total,
                Asking asking, int bits) {
  const size_t row = size * (size_t)bits / 8;
  /* The first head goes in the order of memory. */
  const size_t strip = !asking.is_first ? count : asking.bytes ? 8 : 2;
  for (size_t key = 0; key < count; key += strip) {
    const char *some = (const char *)values + key * row;
    const size_t rows = count - key < strip ? count - key : strip;
    size_t at = 0;
    for (; at + 8 * LANES <= size; at += 8 * LANES)
      add_vectors(weights + key, some, size, rows, total, at, 8, asking, bits);
    for (; at + 4 * LANES <= size; at += 4 * LANES)
      add_vectors(weights + key, some, size, rows, total, at, 4, asking, bits);
    for (; at < size; at += LANES)
      add_vectors(weights + key, some, size, rows, total, at, 1, asking, bits);
  }
}

/* e^x of x <= 0, by Cephes' polynomial; of less than -87 as of -87, and NaN of NaN. Where the largest
 * score is not found beside NaN, x may be larger: but then the sum of weights is NaN. */
INLINE float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float whole = __builtin_fmaf(x, 1.44269504f, 12582912.0f), n = whole - 12582912.0f;
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
  float y = 1.9875691500e-4f;
  y = __builtin_fmaf(y, r, 1.3981999507e-3f);
  y = __builtin_fmaf(y, r, 8.3334519073e-3f);
  y = __builtin_fmaf(y, r, 4.1665795894e-2f);
  y = __builtin_fmaf(y, r, 1.6666665459e-1f);
  y = __builtin_fmaf(y, r, 5.0000001201e-1f);
  const float square = r * r;
  y = __builtin_fmaf(y, square, r) + 1.0f;
  uint32_t power, bits;
  memcpy(&power, &whole, sizeof power);
  memcpy(&bits, &y, sizeof bits);
  bits += power << 23;
  memcpy(&y, &bits, sizeof y);
  return x == x ? y : x;
}

/* cap * tanh(score / cap) of each. */
INLINE void soften(float *scores, size_t count, float cap) {
  for (size_t i = 0; i < count; i++) {
    const float x = scores[i] / cap, power = exponential(-2 * __builtin_fabsf(x));
    scores[i] = __builtin_copysignf(cap * ((1 - power) / (1 + power)), x);
  }
}

/* Turns scores into weights, with zeros up to a multiple of eight. Their largest and their sum. */
INLINE void weigh(float *scores, size_t count, float found[2]) {
  const size_t padded = (count + LANES - 1) / LANES * LANES;
  for (size_t i = count; i < padded; i++) scores[i] = scores[0];
  float mosts[LANES], most = scores[0];
  for (size_t lane = 0; lane < LANES; lane++) mosts[lane] = scores[lane];
  for (size_t i = LANES; i < padded; i += LANES)
    for (size_t lane = 0; lane < LANES; lane++)
      mosts[lane] = scores[i + lane] > mosts[lane] ? scores[i + lane] : mosts[lane];
  for (size_t lane = 0; lane < LANES; lane++) most = mosts[lane] > most ? mosts[lane] : most;
  for (size_t i = 0; i < count; i++) scores[i] = exponential(scores[i] - most);
  for (size_t i = count; i < padded; i++) scores[i] = 0;
  F8 total = all(0);
  for (size_t i = 0; i < padded; i += LANES) total = add_product(total, load(scores + i), all(1));
  found[0] = most, found[1] = sum(total);
}

INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
INLINE size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* Queries, or keys, one behind the other; with a second half of each, which is elsewhere, or NULL. */
typedef struct {
  const float *first, *second;
} Vectors;

INLINE Vectors behind(Vectors x, size_t elements) {
  return (Vectors){x.first + elements, x.second ? x.second + elements : NULL};
}

/* Adds products of `rows` queries and `count` keys. */
INLINE void add_products(F8 x[3][4], const float *queries, const float *keys, size_t size, size_t rows,
                         size_t count) {
  for (size_t at = 0; at < size; at += LANES) {
    F8 q[3];
    for (size_t i = 0; i < rows; i++) q[i] = load(queries + i * size + at);
    for (size_t key = 0; key < count; key++) {
      const F8 k = load(keys + key * size + at);
      for (size_t i = 0; i < rows; i++) x[i][key] = add_product(x[i][key], q[i], k);
    }
  }
}

/* Scores of `rows` queries and `count` keys, of which each is read once. */
INLINE void score_rows(Vectors queries, Vectors keys, size_t size, size_t rows, size_t count,
                       float *scores) {
  F8 x[3][4];
  for (size_t i = 0; i < rows; i++)
    for (size_t key = 0; key < count; key++) x[i][key] = all(0);
  add_products(x, queries.first, keys.first, size, rows, count);
  if (keys.second) add_products(x, queries.second, keys.second, size, rows, count);
  for (size_t i = 0; i < rows; i++) {
    if (count == 4)
      store_sums(scores + i * ROW_SCORES, x[i]);
    else
      scores[i * ROW_SCORES] = sum(x[i][0]);
  }
}

INLINE void score_some(Vectors queries, Vectors keys, size_t size, size_t rows, size_t count,
                       float *scores, Asking asking, const char *memory) {
  size_t key = 0;
  for (; key + 4 <= count; key += 4) {
    if (key % 8 == 0) ask(asking, memory + key * asking.row);
    score_rows(queries, behind(keys, key * size), size, rows, 4, scores + key);
  }
  for (; key < count; key++)
    score_rows(queries, behind(keys, key * size), size, rows, 1, scores + key);
}

/* Adds values, each times its weight for each of `rows` queries. */
INLINE void add_rows(const float *weights, const float *values, size_t size, size_t rows, size_t count,
                     float *totals, size_t at, size_t vectors, Asking asking, const char *memory) {
  F8 x[3][4];
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < vectors; j++) x[i][j] = load(totals + i * (2 + size) + at + j * LANES);
  for (size_t key = 0; key < count; key++) {
    if (!at && key % 8 == 0) ask(asking, memory + key * asking.row);
    F8 weight[3];
    for (size_t i = 0; i < rows; i++) weight[i] = all(weights[i * ROW_SCORES + key]);
    for (size_t j = 0; j < vectors; j++) {
      const F8 value = load(values + key * size + at + j * LANES);
      for (size_t i = 0; i < rows; i++) x[i][j] = add_product(x[i][j], weight[i], value);
    }
  }
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < vectors; j++) store(totals + i * (2 + size) + at + j * LANES, x[i][j]);
}

INLINE void add_some(const float *weights, const float *values, size_t size, size_t rows, size_t count,
                     float *totals, Asking asking, const char *memory) {
  size_t at = 0;
  for (; at + 4 * LANES <= size; at += 4 * LANES)
    add_rows(weights, values, size, rows, count, totals, at, 4, asking, memory);
  for (; at < size; at += LANES)
    add_rows(weights, values, size, rows, count, totals, at, 1, asking, memory);
}

static size_t sharing(const Attending *work) { return work->form->heads / work->form->kv_heads; }

/* Of queries, keys and values: two where these are joined. */
static size_t halves(const Attending *work) { return work->form->is_joined ? 2 : 1; }

static size_t asked_rows(const Attending *work, size_t request) {
  return work->counts ? (size_t)work->counts[request] : work->rows / work->requests;
}

static size_t rows_of(const Attending *work, size_t request) {
  return work->starts[request + 1] - work->starts[request];
}

/* Queries of a request's key head, which are those of a row behind those of the row before it. */
static size_t queries(const Attending *work, size_t request) {
  return rows_of(work, request) * sharing(work);
}

static size_t blocks_of(const Attending *work, size_t rows) {
  return (rows * sharing(work) + MOST_QUERIES - 1) / MOST_QUERIES;
}

/* The request that has this one of all rows, or of all blocks. */
static size_t request_of(const size_t *before, size_t requests, size_t number) {
  size_t first = 0, end = requests;
  while (end - first > 1) {
    const size_t middle = first + (end - first) / 2;
    if (before[middle] <= number)
      first = middle;
    else
      end = middle;
  }
  return first;
}

/* What one query has found: [0] the largest score, [1] the sum of weights, [2:] the sum of values. */
static size_t found_size(const Attending *work) { return 2 + work->form->size; }

/* Some queries of a key head, which attend to a part of its keys. */
typedef struct {
  const Attending *work;
  size_t request, kv, first, count; /* kv: its key head; queries of this */
} Block;

static Block block_of_part(const Attending *work, size_t number) {
  const size_t request = request_of(work->firsts, work->requests, number);
  const size_t blocks = blocks_of(work, rows_of(work, request));
  const size_t own = number - work->firsts[request];
  const size_t first = own % blocks * MOST_QUERIES;
  return (Block){.work = work, .request = request, .kv = own / blocks, .first = first,
                 .count = least(queries(work, request) - first, MOST_QUERIES)};
}

/* Queries of all key heads before the block's. */
static size_t before(const Block *block) {
  const Attending *work = block->work;
  const size_t start = work->starts[block->request] * work->form->kv_heads * sharing(work);
  return start + block->kv * queries(work, block->request) + block->first;
}

/* The keys up to that of the block's query. */
static size_t own_end(const Block *block, size_t query) {
  const Attending *work = block->work;
  const size_t row = (block->first + query) / sharing(work);
  return (size_t)work->last[block->request] + 2 + row - rows_of(work, block->request);
}

/* Behind the last key that it sees. */
static size_t seen(const Block *block, size_t query) {
  const Attending *work = block->work;
  return work->sees_all ? (size_t)work->last[block->request] + 1 : own_end(block, query);
}

/* The first key that it sees. */
static size_t begin_of(const Block *block, size_t query) {
  const size_t window = block->work->form->window, end = own_end(block, query);
  return window && end > window ? end - window : 0;
}

/* Some keys, which are a part's. */
typedef struct {
  size_t first, end;
} Keys;

/* Those that the block's query sees of the part with this number: none if the end is not behind the
 * first. Parts begin at multiples of their size, wherever a window begins. */
static Keys keys_of(const Block *block, size_t query, size_t part) {
  const size_t first = begin_of(block, query), begin = part * PART_KEYS;
  return (Keys){first > begin ? first : begin, least(seen(block, query), begin + PART_KEYS)};
}

/* Those of them that it sees unrounded, but for key 0. */
static Keys newest_of(const Block *block, size_t query, Keys keys) {
  const size_t newest = block->work->newest, end = own_end(block, query);
  if (!block->work->unrounded) return (Keys){keys.end, keys.end};
  const size_t first = end > newest ? end - newest : 0;
  return (Keys){least(most(first, keys.first), keys.end), keys.end};
}

/* Whether these begin with key 0, which is not among the newest: it is seen unrounded, too. */
static int has_oldest(const Block *block, size_t query, Keys keys) {
  const Attending *work = block->work;
  return work->unrounded && !keys.first && keys.end && own_end(block, query) > work->newest;
}

/* Unrounded keys or values (of = 0, 1) from this one on, of which `count` lie one behind the other. */
static const float *unrounded_of(const Block *block, size_t of, Keys keys, size_t *count) {
  const Attending *work = block->work;
  const size_t kv_heads = work->form->kv_heads, size = work->form->size, newest = work->newest;
  const size_t rows = rows_of(work, block->request), start = work->starts[block->request];
  const size_t past = (size_t)work->last[block->request] + 1 - rows;
  const float *kept = work->unrounded;
  kept += ((block->request * 2 + of) * kv_heads + block->kv) * (1 + newest) * size;
  if (keys.first < past) {
    const size_t row = keys.first % newest;
    *count = least(least(keys.end, past) - keys.first, newest - row);
    return kept + (1 + row) * size;
  }
  *count = keys.end - keys.first;
  return work->fresh +
         ((of * work->rows + start) * kv_heads + block->kv * rows + keys.first - past) * size;
}

/* Key 0 or its value, if `has_oldest`. */
static const float *oldest_of(const Block *block, size_t of) {
  const Attending *work = block->work;
  const size_t kv_heads = work->form->kv_heads, size = work->form->size;
  size_t count;
  if ((size_t)work->last[block->request] + 1 == rows_of(work, block->request))
    return unrounded_of(block, of, (Keys){0, 1}, &count);
  return work->unrounded +
         ((block->request * 2 + of) * kv_heads + block->kv) * (1 + work->newest) * size;
}

static size_t first_part(const Block *block) { return begin_of(block, 0) / PART_KEYS; }

static const float *queries_of(const Block *block, size_t half) {
  const Attending *work = block->work;
  return work->turned + (half * work->rows * work->form->heads + before(block)) * work->form->size;
}

/* Floats of a cache, or its codes as floats. */
INLINE const float *as_floats(const char *memory, size_t count, float *room, int bits) {
  if (bits == 32) return (const float *)(const void *)memory;
  size_t i = 0;
  for (; bits == 4 && i + 32 <= count; i += 32)
    store_nibbles(room + i, (const uint8_t *)memory + i / 2);
  for (; i < count; i += LANES) store(room + i, floats(memory, i, bits));
  return room;
}

/* Scores of queries, of which up to three share what is read of a key. */
INLINE void score_queries(Vectors queries, size_t count, Vectors keys, size_t size, size_t some,
                          float *scores, Asking asking, const char *memory) {
  if (count == 3)
    score_some(queries, keys, size, 3, some, scores, asking, memory);
  else if (count == 2)
    score_some(queries, keys, size, 2, some, scores, asking, memory);
  else
    score_some(queries, keys, size, 1, some, scores, asking, memory);
}

INLINE void add_queries(const float *weights, size_t count, const float *values, size_t size,
                        size_t some, float *totals, Asking asking, const char *memory) {
  if (count == 3)
    add_some(weights, values, size, 3, some, totals, asking, memory);
  else if (count == 2)
    add_some(weights, values, size, 2, some, totals, asking, memory);
  else
    add_some(weights, values, size, 1, some, totals, asking, memory);
}

/* Up to three queries from this one on, which are heads of one row. */
static size_t heads_from(const Block *block, size_t query) {
  const size_t heads = sharing(block->work);
  return least(least(heads - (block->first + query) % heads, block->count - query), 3);
}

/* Scores of the keys that the heads of a row see unrounded, in place of those of their codes. */
static __attribute__((noinline)) void score_unrounded(const Block *block, size_t query, size_t heads,
                                                      Keys keys, float *scores) {
  const size_t size = block->work->form->size;
  const Vectors own = {queries_of(block, 0) + query * size, NULL};
  const Asking none = {0};
  if (has_oldest(block, query, keys))
    score_queries(own, heads, (Vectors){oldest_of(block, 0), NULL}, size, 1, scores, none, NULL);
  Keys left = newest_of(block, query, keys);
  for (size_t count; left.first < left.end; left.first += count) {
    const Vectors rows = {unrounded_of(block, 0, left, &count), NULL};
    score_queries(own, heads, rows, size, count, scores + left.first - keys.first, none, NULL);
  }
}

/* Makes weights of a query's scores of these keys, with what it found at first: their largest score,
 * their sum, and the value of key 0, if that is unrounded. */
static __attribute__((noinline)) void weigh_keys(const Block *block, size_t query, Keys keys,
                                                 float *scores, float *found) {
  const Attending *work = block->work;
  if (work->form->cap != 0) soften(scores, keys.end - keys.first, work->form->cap);
  weigh(scores, keys.end - keys.first, found);
  if (has_oldest(block, query, keys))
    add_some(scores, oldest_of(block, 1), work->form->size, 1, 1, found + 2, (Asking){0}, NULL);
}

/* Adds the values that heads of a row see unrounded, but for that of key 0. */
static __attribute__((noinline)) void add_newest(const Block *block, size_t query, size_t heads,
                                                 Keys keys, const float *weights, float *totals) {
  Keys left = newest_of(block, query, keys);
  for (size_t count; left.first < left.end; left.first += count) {
    const float *rows = unrounded_of(block, 1, left, &count);
    add_queries(weights + left.first - keys.first, heads, rows, block->work->form->size, count, totals,
                (Asking){0}, NULL);
  }
}

/* The keys that a query sees as they are in the cache. */
static Keys cached_of(const Block *block, size_t query, Keys keys) {
  const size_t first = keys.first + (size_t)has_oldest(block, query, keys);
  return (Keys){first, most(first, newest_of(block, query, keys).first)};
}

/* Adds some values for one query; the first here is the key with the number `begin`. */
static __attribute__((noinline)) void add_row(const float *weights, const float *values, size_t size,
                                              size_t begin, Keys keys, float *total, Asking asking,
                                              const char *memory) {
  if (keys.first < keys.end)
    add_some(weights + keys.first, values + (keys.first - begin) * size, size, 1,
             keys.end - keys.first, total, asking, memory);
}

/* Adds the values of a tile for up to three queries, of which each sees some. */
INLINE void add_tile(float (*scores)[ROW_SCORES], const Keys *sees, size_t rows, const float *of,
                     size_t size, Keys tile, float *totals, Asking asking, const char *memory) {
  Keys shared = tile; /* which all of these rows see: later rows begin and end later */
  for (size_t j = 0; j < rows; j++) {
    shared.first = most(sees[j].first, shared.first);
    shared.end = least(sees[j].end, shared.end);
  }
  if (shared.end < shared.first) shared = (Keys){tile.end, tile.end};
  for (size_t j = 0; j < rows; j++)
    add_row(scores[j], of, size, tile.first,
            (Keys){most(sees[j].first, tile.first), least(sees[j].end, shared.first)},
            totals + j * (2 + size), asking, memory);
  add_queries(scores[0] + shared.first, rows, of + (shared.first - tile.first) * size, size,
              shared.end - shared.first, totals, asking, memory);
  for (size_t j = 0; j < rows; j++)
    add_row(scores[j], of, size, tile.first,
            (Keys){most(sees[j].first, shared.end), least(sees[j].end, tile.end)},
            totals + j * (2 + size), asking, memory);
}

/* Several rows. keys, values: from the first that a row of them sees of the part to the last. */
INLINE void attend_rows(const Block *block, const char *keys, const char *values, size_t part,
                        Keys all, float *found, int bits) {
  const Attending *work = block->work;
  const size_t size = work->form->size, row = size * (size_t)bits / 8;
  const size_t tile = TILE_BYTES / (size * sizeof(float)) / 8 * 8 + 8, own = found_size(work);
  const size_t groups = (block->count + 2) / 3, last = block->count - 1;
  const size_t count = cached_of(block, last, keys_of(block, last, part)).end - all.first;
  float scores[MOST_QUERIES][ROW_SCORES], room[TILE_BYTES / sizeof(float) + 8 * MOST_SIZE];
  Keys sees[MOST_QUERIES]; /* of those in the cache, counted from the first of all */
  const int is_joined = work->form->is_joined;
  const Vectors queries = {queries_of(block, 0), is_joined ? queries_of(block, 1) : NULL};
  const size_t scored = is_joined ? tile / 16 * 8 : tile; /* both halves stay in the nearest cache */
  for (size_t key = 0; key < count; key += scored) {
    const size_t some = least(count - key, scored);
    const char *memory = keys + key * row;
    const Vectors of = {as_floats(memory, some * size, room, bits),
                        is_joined ? (const float *)(const void *)(values + key * row) : NULL};
    for (size_t i = 0; i < block->count; i += 3)
      score_queries(behind(queries, i * size), least(block->count - i, 3), of, size, some,
                    scores[i] + key, asking_of(i / 3, groups, scored, row, 0), memory);
  }
  for (size_t i = 0, heads; work->unrounded && i < block->count; i += heads) {
    const Keys of_row = keys_of(block, i, part);
    heads = heads_from(block, i);
    if (of_row.first < of_row.end)
      score_unrounded(block, i, heads, of_row, scores[i] + of_row.first - all.first);
  }
  memset(found, 0, halves(work) * block->count * own * sizeof *found);
  for (size_t i = 0; i < block->count; i++) {
    const Keys of_row = keys_of(block, i, part);
    sees[i] = (Keys){0, 0};
    if (of_row.end <= of_row.first) continue;
    const Keys cached = cached_of(block, i, of_row);
    sees[i] = (Keys){cached.first - all.first, cached.end - all.first};
    float *of = scores[i] + of_row.first - all.first;
    weigh_keys(block, i, of_row, of, found + i * own);
    for (size_t half = 1; half < halves(work); half++)
      memcpy(found + (half * block->count + i) * own, found + i * own, 2 * sizeof *found);
  }
  for (size_t half = 0; half < halves(work); half++)
    for (size_t key = 0; key < count; key += tile) {
      const char *memory = (half + 1 < halves(work) ? keys : values) + key * row;
      const Keys tiled = {key, key + least(count - key, tile)};
      const float *of = as_floats(memory, (tiled.end - key) * size, room, bits);
      for (size_t i = 0; i < block->count; i += 3)
        add_tile(scores + i, sees + i, least(block->count - i, 3), of, size, tiled,
                 found + (half * block->count + i) * own + 2, asking_of(i / 3, groups, tile, row, 0),
                 memory);
    }
  for (size_t i = 0, heads; work->unrounded && i < block->count; i += heads) {
    const Keys of_row = keys_of(block, i, part);
    heads = heads_from(block, i);
    if (of_row.first < of_row.end)
      add_newest(block, i, heads, of_row, scores[i] + of_row.first - all.first, found + i * own + 2);
  }
}

/* One row, all of whose keys it sees as they are in the cache: it takes as long as memory. */
INLINE void attend_row(const Block *block, const char *keys, const char *values, Keys all,
                       float *found, int bits) {
  const Attending *work = block->work;
  const int is_stream = block->count == 1 && bits == 32; /* which processors read ahead themselves */
  const size_t size = work->form->size, row = size * (size_t)bits / 8;
  const size_t tile = TILE_BYTES / row / 8 * 8 + 8, own = found_size(work);
  const size_t count = all.end - all.first;
  const float *queries = queries_of(block, 0);
  float scores[MOST_QUERIES][ROW_SCORES];
  for (size_t key = 0; key < count; key += tile)
    for (size_t head = 0; head < block->count; head++)
      score(queries + head * size, keys + key * row, size, least(count - key, tile),
            scores[head] + key, asking_of(head, block->count, tile, row, is_stream), bits);
  for (size_t head = 0; head < block->count; head++) {
    memset(found + head * own, 0, own * sizeof *found);
    weigh_keys(block, head, all, scores[head], found + head * own);
  }
  for (size_t key = 0; key < count; key += tile)
    for (size_t head = 0; head < block->count; head++)
      add(scores[head] + key, values + key * row, size, least(count - key, tile),
          found + head * own + 2, asking_of(head, block->count, tile, row, is_stream), bits);
}

/* Adds what a query found in a part to what it found in those before. */
static void fold(float *total, const float *found, size_t size) {
  const float most = found[0] > total[0] ? found[0] : total[0];
  const float before = exponential(total[0] - most), weight = exponential(found[0] - most);
  total[0] = most;
  for (size_t i = 1; i < 2 + size; i++)
    total[i] = __builtin_fmaf(weight, found[i], before * total[i]);
}

static void begin_fold(const Block *block, size_t query, float *total) {
  const Attending *work = block->work;
  const size_t row_head = (block->first + query) % sharing(work);
  const size_t head = block->kv * sharing(work) + row_head;
  memset(total, 0, found_size(work) * sizeof *total);
  total[0] = work->sinks ? work->sinks[head] : -INFINITY;
  total[1] = work->sinks != NULL;
}

static void end_fold(const Block *block, size_t query, size_t half, const float *total) {
  const Attending *work = block->work;
  const Form *form = work->form;
  const size_t size = form->size, number = block->first + query, kv = block->kv;
  const size_t row = work->starts[block->request] + number / sharing(work);
  float *output = work->output;
  output += ((row * form->heads + kv * sharing(work) + number % sharing(work)) * halves(work) + half) * size;
  for (size_t i = 0; i < size; i++) {
    output[i] = total[2 + i] / total[1];
    if (form->bits != 32) output[i] *= work->value_scales[kv * size + i];
  }
}

/* Whether a request's ring has no room for its new keys beside those that they see. These are put into
 * memory of their own meanwhile. */
static int is_staged(const Attending *work, size_t request) {
  const Form *form = work->form;
  return form->is_ring && form->window + asked_rows(work, request) > work->context + 1;
}

/* Rows of a stage. */
static size_t staged_rows(const Attending *work, size_t request) {
  return work->form->window - 1 + asked_rows(work, request);
}

static size_t row_bytes(const Form *form) { return form->size * (size_t)form->bits / 8; }

/* Where a key (of = 0) or a value (1) is. */
static char *row_in_cache(const Attending *work, size_t request, size_t of, size_t kv, size_t key) {
  const Form *form = work->form;
  const size_t row = row_bytes(form), at = key - work->bases[request], kv_heads = form->kv_heads;
  if (is_staged(work, request))
    return work->staged + work->stages[request] +
           ((of * kv_heads + kv) * staged_rows(work, request) + at) * row;
  return (char *)(of ? work->values : work->keys) +
         ((request * kv_heads + kv) * work->context + at) * row;
}

INLINE void attend_to(const Block *block, size_t part, float *found, int bits) {
  const Attending *work = block->work;
  const Keys all = {keys_of(block, 0, part).first, keys_of(block, block->count - 1, part).end};
  const char *keys = row_in_cache(work, block->request, 0, block->kv, all.first);
  const char *values = row_in_cache(work, block->request, 1, block->kv, all.first);
  if (rows_of(work, block->request) == 1 && !work->form->is_joined &&
      (bits == 32 || (bits == 8 && block->count == 1)))
    attend_row(block, keys, values, all, found, bits);
  else
    attend_rows(block, keys, values, part, all, found, bits);
}

/* Apart, so that the scores of two callers do not share a frame: threads may have small stacks. */
static __attribute__((noinline)) void attend_part(const Block *block, size_t part, float *found) {
  const int bits = block->work->form->bits;
  if (bits == 4)
    attend_to(block, part, found, 4);
  else if (bits == 8)
    attend_to(block, part, found, 8);
  else
    attend_to(block, part, found, 32);
}

/* How many parts the block's keys are in, from `first_part`. */
static size_t chunks_of(const Block *block) {
  return (seen(block, block->count - 1) + PART_KEYS - 1) / PART_KEYS - first_part(block);
}

static float *found_of(const Block *block, size_t chunk) {
  const Attending *work = block->work;
  const size_t queries = before(block) * work->chunks + chunk * block->count;
  return work->found + queries * halves(work) * found_size(work);
}

/* Adds what a block found in one of its parts. */
static void fold_part(const Block *block, size_t part, float *totals, const float *found) {
  const size_t size = block->work->form->size, own = found_size(block->work);
  for (size_t i = 0; i < halves(block->work) * block->count; i++) {
    const Keys keys = keys_of(block, i % block->count, part);
    if (keys.first < keys.end) fold(totals + i * own, found + i * own, size);
  }
}

static void begin_folds(const Block *block, float *totals) {
  for (size_t i = 0; i < halves(block->work) * block->count; i++)
    begin_fold(block, i % block->count, totals + i * found_size(block->work));
}

static void end_folds(const Block *block, const float *totals) {
  for (size_t i = 0; i < halves(block->work) * block->count; i++)
    end_fold(block, i % block->count, i / block->count, totals + i * found_size(block->work));
}

void attend(void *data, size_t number) {
  const Attending *work = data;
  const Block block = block_of_part(work, work->is_divided ? number / work->chunks : number);
  const size_t chunks = chunks_of(&block), first = first_part(&block);
  if (work->is_divided) {
    const size_t chunk = number % work->chunks;
    if (chunk < chunks) attend_part(&block, first + chunk, found_of(&block, chunk));
    return;
  }
  float totals[MOST_FOUND], found[MOST_FOUND];
  begin_folds(&block, totals);
  for (size_t chunk = 0; chunk < chunks; chunk++) {
    attend_part(&block, first + chunk, found);
    fold_part(&block, first + chunk, totals, found);
  }
  end_folds(&block, totals);
}

/* Turns the first elements of a head by the angles of a position. */
static void turn(const Form *form, float *head, const float *cos, const float *sin) {
  const size_t half = form->turned / 2;
  for (size_t i = 0; i < half; i++) {
    float *a = head + (form->interleaved ? 2 * i : i), *b = a + (form->interleaved ? 1 : half);
    const float x = *a, y = *b, back = y * sin[i], on = x * sin[i];
    *a = __builtin_fmaf(x, cos[i], -back);
    *b = __builtin_fmaf(y, cos[i], on);
  }
}

/* As the operator of ONNX Runtime rounds: by the inverse, half to even. What is no number is -128. */
static int8_t code(float x, float scale, int least, int most) {
  const float inverse = 1.0f / scale, found = nearbyintf(x * inverse);
  return (int8_t)(found > most ? most : found > least ? found : least);
}

static void append(const Form *form, char *to, const float *x, const float *scales) {
  if (form->bits == 32) memcpy(to, x, form->size * sizeof *x);
  for (size_t i = 0; form->bits == 8 && i < form->size; i++)
    ((int8_t *)to)[i] = code(x[i], scales[i], -128, 127);
  for (size_t i = 0; form->bits == 4 && i < form->size; i += 2) {
    const int low = code(x[i], scales[i], -8, 7) + 8, high = code(x[i + 1], scales[i + 1], -8, 7) + 8;
    ((uint8_t *)to)[i / 2] = (uint8_t)(low | high << 4);
  }
}

/* Of this row's request, key head and row: a key, and its value, over their scales. */
static void keep_unrounded(const Attending *work, size_t number, size_t kv, const float *key,
                           const float *value) {
  const size_t request = request_of(work->starts, work->requests, number);
  const size_t size = work->form->size, kv_heads = work->form->kv_heads;
  const size_t start = work->starts[request], rows = rows_of(work, request);
  float *keys = work->fresh + (start * kv_heads + kv * rows + number - start) * size;
  float *values = keys + work->rows * kv_heads * size;
  for (size_t i = 0; i < size; i++) {
    keys[i] = key[i] / work->key_scales[kv * size + i];
    values[i] = value[i] / work->value_scales[kv * size + i];
  }
}

void prepare_row(void *data, size_t number) {
  const Attending *work = data;
  const Form *form = work->form;
  const size_t size = form->size, all_heads = form->heads + 2 * form->kv_heads;
  const size_t request = request_of(work->starts, work->requests, number);
  const size_t rows = rows_of(work, request), row = number - work->starts[request];
  const size_t step = form->is_packed ? all_heads * size : form->heads * halves(work) * size;
  const float *query = work->query + number * step;
  const float *key = form->is_packed ? query + form->heads * size
                                     : work->key + number * form->kv_heads * size;
  const float *value = form->is_packed ? key + form->kv_heads * size
                                       : work->value + number * form->kv_heads * size;
  const size_t position = (size_t)work->last[request] + 1 + row - rows;
  const size_t turns = work->turns ? (size_t)work->turns[number] : position;
  const float *cos = work->cos + turns * (form->turned / 2);
  const float *sin = work->sin + turns * (form->turned / 2);
  for (size_t kv = 0; kv < form->kv_heads; kv++) {
    float turned[MOST_SIZE];
    const size_t place = (work->starts[request] * form->kv_heads + kv * rows + row) * sharing(work);
    for (size_t i = 0; i < halves(work) * sharing(work); i++) {
      const size_t head = i / halves(work), half = i % halves(work);
      float *own = work->turned + (half * work->rows * form->heads + place + head) * size;
      memcpy(own, query + (kv * sharing(work) * halves(work) + i) * size, size * sizeof *own);
      if (form->turned) turn(form, own, cos, sin);
      for (size_t at = 0; at < size; at++) own[at] *= form->scale;
      if (form->bits != 32)
        for (size_t at = 0; at < size; at++) own[at] *= work->key_scales[kv * size + at];
    }
    memcpy(turned, key + kv * size, size * sizeof *key);
    if (form->turned) turn(form, turned, cos, sin);
    const size_t scales = form->bits == 32 ? 0 : kv * size;
    append(form, row_in_cache(work, request, 0, kv, position), turned, work->key_scales + scales);
    append(form, row_in_cache(work, request, 1, kv, position), value + kv * size,
           work->value_scales + scales);
    if (work->unrounded) keep_unrounded(work, number, kv, turned, value + kv * size);
  }
}

/* The key in the first row of a ring after so many tokens: its rows hold the newest keys in order,
 * at least a window of them, and move once in `context - window + 1` tokens. As ONNX Runtime says of
 * its `sliding_window_cache`; see offload/kv/window_rows.py. */
static size_t first_kept(const Attending *work, size_t tokens) {
  const size_t kept = work->context, step = kept - work->form->window + 1;
  return tokens > kept ? (tokens - kept + step - 1) / step * step : 0;
}

/* Moves rows of a request's rings, so that the first is of another key; `end`: behind the last. */
static void move(const Attending *work, size_t request, size_t to, size_t end) {
  const size_t rows = to < end ? end - to : 0, by = to - work->bases[request];
  for (size_t head = 0; by && rows && head < 2 * work->form->kv_heads; head++) {
    const size_t of = head / work->form->kv_heads, kv = head % work->form->kv_heads;
    memmove(row_in_cache(work, request, of, kv, to - by), row_in_cache(work, request, of, kv, to),
            rows * row_bytes(work->form));
  }
  work->bases[request] = to;
}

/* Copies keys and values between a request's rings and its stage. */
static void copy_staged(const Attending *work, size_t request, size_t base, Keys keys, int is_back) {
  const Form *form = work->form;
  const size_t row = row_bytes(form), bytes = keys.first < keys.end ? (keys.end - keys.first) * row : 0;
  for (size_t head = 0; bytes && head < 2 * form->kv_heads; head++) {
    const size_t of = head / form->kv_heads, kv = head % form->kv_heads;
    char *ring = (char *)(of ? work->values : work->keys);
    ring += ((request * form->kv_heads + kv) * work->context + keys.first - base) * row;
    char *stage = row_in_cache(work, request, of, kv, keys.first);
    memmove(is_back ? ring : stage, is_back ? stage : ring, bytes);
  }
}

/* Makes room for the new keys behind those that their rows see. */
static void begin_ring(const Attending *work, size_t request) {
  const size_t end = (size_t)work->last[request] + 1, past = end - rows_of(work, request);
  const size_t window = work->form->window, sees = past + 1 > window ? past + 1 - window : 0;
  const size_t base = first_kept(work, past);
  work->bases[request] = is_staged(work, request) ? sees : base;
  if (is_staged(work, request))
    copy_staged(work, request, base, (Keys){sees, past}, 0);
  else
    move(work, request, least(sees, first_kept(work, end)), past);
}

static void end_ring(const Attending *work, size_t request) {
  const size_t end = (size_t)work->last[request] + 1, base = first_kept(work, end);
  if (!is_staged(work, request)) {
    move(work, request, base, end);
    return;
  }
  /* All that the ring keeps is on the stage, as it has fewer rows. */
  copy_staged(work, request, base, (Keys){base, end}, 1);
}

/* Parts of a block's keys, at most. */
static size_t most_chunks(const Attending *work, size_t request) {
  const size_t keys = (size_t)work->last[request] + 1, window = work->form->window;
  const size_t span = window + asked_rows(work, request) - 1;
  const size_t all = (keys + PART_KEYS - 1) / PART_KEYS;
  return window ? least(all, (span + PART_KEYS - 2) / PART_KEYS + 1) : all;
}

int begin_attention(Attending *work) {
  const Form *form = work->form;
  work->chunks = work->parts = 0;
  for (size_t i = 0; i < work->requests; i++) {
    work->chunks = most(work->chunks, most_chunks(work, i));
    work->parts += form->kv_heads * blocks_of(work, asked_rows(work, i));
  }
  work->is_divided = work->parts < ENOUGH_PARTS && work->chunks > 1;
  if (work->is_divided) work->parts *= work->chunks;
  const size_t all = work->rows * form->heads, numbers = work->requests + 1;
  const size_t turned = halves(work) * all * form->size;
  const size_t found = work->is_divided ? halves(work) * all * work->chunks * found_size(work) : 0;
  const size_t fresh = work->unrounded ? 2 * work->rows * form->kv_heads * form->size : 0;
  size_t staged = 0;
  for (size_t i = 0; i < work->requests; i++)
    if (is_staged(work, i)) staged += 2 * form->kv_heads * staged_rows(work, i) * row_bytes(form);
  work->memory = aligned((turned + found + fresh) * sizeof(float) + 4 * numbers * sizeof(size_t) + staged);
  if (!work->memory) return 0;
  work->turned = work->memory;
  work->found = work->turned + turned;
  work->fresh = work->found + found;
  work->starts = (size_t *)(work->fresh + fresh); /* an even number of floats */
  work->firsts = work->starts + numbers;
  work->bases = work->firsts + numbers;
  work->stages = work->bases + numbers;
  work->staged = (char *)(work->stages + numbers);
  work->starts[0] = work->firsts[0] = work->stages[0] = 0;
  for (size_t i = 0; i < work->requests; i++) {
    const size_t rows = asked_rows(work, i);
    work->starts[i + 1] = work->starts[i] + rows;
    work->firsts[i + 1] = work->firsts[i] + form->kv_heads * blocks_of(work, rows);
    work->stages[i + 1] = work->stages[i];
    if (is_staged(work, i))
      work->stages[i + 1] += 2 * form->kv_heads * staged_rows(work, i) * row_bytes(form);
    work->bases[i] = 0;
    if (form->is_ring) begin_ring(work, i);
  }
  return 1;
}

/* Puts a request's new keys, and values, where those were that no row sees unrounded any more. */
static void keep_newest(const Attending *work, size_t request) {
  const size_t size = work->form->size, kv_heads = work->form->kv_heads, newest = work->newest;
  const size_t end = (size_t)work->last[request] + 1, rows = rows_of(work, request), past = end - rows;
  for (size_t head = 0; head < 2 * kv_heads; head++) {
    float *kept = work->unrounded + (request * 2 * kv_heads + head) * (1 + newest) * size;
    const size_t of = head / kv_heads, kv = head % kv_heads;
    const float *fresh = work->fresh;
    fresh += ((of * work->rows + work->starts[request]) * kv_heads + kv * rows) * size;
    if (!past) memcpy(kept, fresh, size * sizeof *kept);
    for (size_t key = end > past + newest ? end - newest : past; key < end; key++)
      memcpy(kept + (1 + key % newest) * size, fresh + (key - past) * size, size * sizeof *kept);
  }
}

void end_attention(Attending *work, int is_prepared, int is_whole) {
  const size_t blocks = is_whole && work->is_divided ? work->parts / work->chunks : 0;
  float totals[MOST_FOUND];
  for (size_t number = 0; number < blocks; number++) {
    const Block block = block_of_part(work, number);
    begin_folds(&block, totals);
    for (size_t chunk = 0; chunk < chunks_of(&block); chunk++)
      fold_part(&block, first_part(&block) + chunk, totals, found_of(&block, chunk));
    end_folds(&block, totals);
  }
  for (size_t i = 0; is_prepared && i < work->requests; i++) {
    if (work->form->is_ring) end_ring(work, i);
    if (work->unrounded) keep_newest(work, i);
  }
  release(work->memory);
}
