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

enum { LANES = 8, TILE_BYTES = 1 << 14 /* of keys that stay in the nearest cache, as heads share them */ };

/* Eight floats. `add_product` rounds once. */
#if defined(__AVX2__)
typedef __m256 F8;
INLINE F8 all(float value) { return _mm256_set1_ps(value); }
INLINE F8 load(const float *at) { return _mm256_loadu_ps(at); }
INLINE F8 load_codes(const int8_t *at) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
INLINE void store(float *at, F8 x) { _mm256_storeu_ps(at, x); }
INLINE F8 add_product(F8 sum, F8 a, F8 b) { return _mm256_fmadd_ps(a, b, sum); }
/* The sums of eight vectors, each of neighbours, of these, and of these. */
INLINE F8 sums(const F8 x[8]) {
  const F8 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F8 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
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
INLINE void store(float *at, F8 x) { memcpy(at, x.of, sizeof x.of); }
INLINE F8 add_product(F8 sum, F8 a, F8 b) { EACH(fmaf(a.of[i], b.of[i], sum.of[i])); }
INLINE float total_of(const float *x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
INLINE F8 sums(const F8 x[8]) { EACH(total_of(x[i].of)); }
#endif

INLINE F8 floats(const void *memory, size_t at, int has_codes) {
  return has_codes ? load_codes((const int8_t *)memory + at) : load((const float *)memory + at);
}

INLINE float sum(F8 x) {
  float of[8];
  store(of, x);
  return ((of[0] + of[1]) + (of[2] + of[3])) + ((of[4] + of[5]) + (of[6] + of[7]));
}

enum { LINE = 64 };

/* What a head asks memory for while it computes, for each eight keys: its share of what is read next. */
typedef struct {
  size_t ahead, bytes;
  int is_first; /* of the heads that share keys */
} Asking;

INLINE Asking asking_of(size_t head, size_t heads, size_t tile, size_t row) {
  const size_t share = (8 * row / heads + LINE - 1) / LINE * LINE, first = head * share;
  const size_t left = first < 8 * row ? 8 * row - first : 0;
  return (Asking){.ahead = tile * row + first, .bytes = share < left ? share : left,
                  .is_first = !head};
}

/* Without it a key takes twice as long where memory sets the pace. */
INLINE void ask(Asking asking, const char *memory) {
  for (size_t at = 0; at < asking.bytes; at += LINE)
    __builtin_prefetch(memory + asking.ahead + at, 0, 2);
}

/* Scores of `count` keys; those up to a multiple of eight are undefined. */
INLINE void score(const float *query, const void *keys, size_t size, size_t count, float *scores,
                  Asking asking, int has_codes) {
  const size_t row = size * (has_codes ? 1 : sizeof(float));
  size_t key = 0;
  for (; key + 8 <= count; key += 8) {
    F8 x[8] = {all(0), all(0), all(0), all(0), all(0), all(0), all(0), all(0)};
    ask(asking, (const char *)keys + key * row);
    if (asking.is_first) { /* in the order of memory, which is what takes time */
      for (size_t i = 0; i < 8; i++)
        for (size_t at = 0; at < size; at += LANES)
          x[i] = add_product(x[i], load(query + at), floats(keys, (key + i) * size + at, has_codes));
    } else {
      for (size_t at = 0; at < size; at += LANES) {
        const F8 q = load(query + at);
        for (size_t i = 0; i < 8; i++)
          x[i] = add_product(x[i], q, floats(keys, (key + i) * size + at, has_codes));
      }
    }
    store(scores + key, sums(x));
  }
  for (; key < count; key++) {
    F8 x = all(0);
    for (size_t at = 0; at < size; at += LANES)
      x = add_product(x, load(query + at), floats(keys, key * size + at, has_codes));
    scores[key] = sum(x);
  }
}

/* Adds values, each times its weight. */
INLINE void add_vectors(const float *weights, const void *values, size_t size, size_t count,
                        float *total, size_t at, size_t vectors, Asking asking, int has_codes) {
  const size_t row = size * (has_codes ? 1 : sizeof(float));
  F8 x[8];
  for (size_t i = 0; i < vectors; i++) x[i] = load(total + at + i * LANES);
  for (size_t key = 0; key < count; key++) {
    const F8 weight = all(weights[key]);
    if (!at && key % 8 == 0) ask(asking, (const char *)values + key * row);
    for (size_t i = 0; i < vectors; i++)
      x[i] = add_product(x[i], weight, floats(values, key * size + at + i * LANES, has_codes));
  }
  for (size_t i = 0; i < vectors; i++) store(total + at + i * LANES, x[i]);
}

INLINE void add(const float *weights, const void *values, size_t size, size_t count, float *total,
                Asking asking, int has_codes) {
  const size_t row = size * (has_codes ? 1 : sizeof(float));
  const size_t strip = asking.is_first ? 8 : count; /* the first head goes in the order of memory */
  for (size_t key = 0; key < count; key += strip) {
    const char *some = (const char *)values + key * row;
    const size_t rows = count - key < strip ? count - key : strip;
    size_t at = 0;
    for (; at + 8 * LANES <= size; at += 8 * LANES)
      add_vectors(weights + key, some, size, rows, total, at, 8, asking, has_codes);
    for (; at < size; at += LANES)
      add_vectors(weights + key, some, size, rows, total, at, 1, asking, has_codes);
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

static size_t sharing(const Attending *work) { return work->form->heads / work->form->kv_heads; }

static size_t heads_of_group(const Attending *work, size_t group) {
  const size_t left = sharing(work) - group * MOST_SHARING;
  return left < MOST_SHARING ? left : MOST_SHARING;
}

/* Heads of a group, of which the last one may have fewer. */
static size_t most_heads(const Attending *work) {
  return sharing(work) < MOST_SHARING ? sharing(work) : MOST_SHARING;
}

static float *found_of(const Attending *work, size_t part, size_t head) {
  return work->found + (part * most_heads(work) + head) * (2 + work->form->size);
}

INLINE void attend_to(const Attending *work, size_t part, int has_codes) {
  const Form *form = work->form;
  const size_t size = form->size, chunk = part % work->chunks, rest = part / work->chunks;
  const size_t group = rest % work->groups, kv = rest / work->groups;
  const size_t request = kv / form->kv_heads, first = chunk * PART_KEYS;
  const size_t keys = (size_t)work->last[request] + 1;
  if (first >= keys) return;
  const size_t count = keys - first < PART_KEYS ? keys - first : PART_KEYS;
  const size_t heads = heads_of_group(work, group), row = size * (has_codes ? 1 : sizeof(float));
  const size_t begin = (kv * work->context + first) * row, tile = TILE_BYTES / row / 8 * 8 + 8;
  const char *own_keys = (const char *)work->keys + begin;
  const char *own_values = (const char *)work->values + begin;
  const float *query = work->turned + (kv * sharing(work) + group * MOST_SHARING) * size;
  float scores[MOST_SHARING][PART_KEYS];
  for (size_t key = 0; key < count; key += tile) {
    const size_t some = count - key < tile ? count - key : tile;
    for (size_t head = 0; head < heads; head++)
      score(query + head * size, own_keys + key * row, size, some, scores[head] + key,
            asking_of(head, heads, tile, row), has_codes);
  }
  for (size_t head = 0; head < heads; head++) {
    float *found = found_of(work, part, head);
    weigh(scores[head], count, found);
    memset(found + 2, 0, size * sizeof *found);
  }
  for (size_t key = 0; key < count; key += tile) {
    const size_t some = count - key < tile ? count - key : tile;
    for (size_t head = 0; head < heads; head++)
      add(scores[head] + key, own_values + key * row, size, some, found_of(work, part, head) + 2,
          asking_of(head, heads, tile, row), has_codes);
  }
}

void attend(void *work, size_t part) {
  if (((const Attending *)work)->form->has_codes)
    attend_to(work, part, 1);
  else
    attend_to(work, part, 0);
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
static int8_t code(float x, float scale) {
  const float inverse = 1.0f / scale, found = nearbyintf(x * inverse);
  return (int8_t)(found > 127 ? 127 : found > -128 ? found : -128);
}

static void append(const Attending *work, size_t request, size_t kv, const float *key,
                   const float *value) {
  const size_t size = work->form->size, last = (size_t)work->last[request];
  const size_t at = ((request * work->form->kv_heads + kv) * work->context + last) * size;
  if (!work->form->has_codes) {
    memcpy((float *)work->keys + at, key, size * sizeof *key);
    memcpy((float *)work->values + at, value, size * sizeof *value);
    return;
  }
  for (size_t i = 0; i < size; i++) {
    ((int8_t *)work->keys)[at + i] = code(key[i], work->key_scales[kv * size + i]);
    ((int8_t *)work->values)[at + i] = code(value[i], work->value_scales[kv * size + i]);
  }
}

static void begin_request(const Attending *work, size_t request) {
  const Form *form = work->form;
  const size_t size = form->size, all_heads = form->heads + 2 * form->kv_heads;
  const size_t step = form->is_packed ? all_heads * size : form->heads * size;
  const float *query = work->query + request * step;
  const float *key = form->is_packed ? query + form->heads * size
                                     : work->key + request * form->kv_heads * size;
  const float *value = form->is_packed ? key + form->kv_heads * size
                                       : work->value + request * form->kv_heads * size;
  const size_t position = work->turns ? (size_t)work->turns[request] : (size_t)work->last[request];
  const float *cos = work->cos + position * (form->turned / 2);
  const float *sin = work->sin + position * (form->turned / 2);
  float *scaled = work->turned + request * form->heads * size;
  memcpy(scaled, query, form->heads * size * sizeof *query);
  for (size_t head = 0; head < form->heads; head++) {
    const size_t kv = head / sharing(work);
    float *own = scaled + head * size;
    if (form->turned) turn(form, own, cos, sin);
    for (size_t i = 0; i < size; i++) own[i] *= form->scale;
    if (form->has_codes)
      for (size_t i = 0; i < size; i++) own[i] *= work->key_scales[kv * size + i];
  }
  for (size_t kv = 0; kv < form->kv_heads; kv++) {
    float turned[MOST_SIZE];
    memcpy(turned, key + kv * size, size * sizeof *key);
    if (form->turned) turn(form, turned, cos, sin);
    append(work, request, kv, turned, value + kv * size);
  }
}

int begin_attention(Attending *work) {
  const Form *form = work->form;
  size_t most = 0;
  for (size_t i = 0; i < work->batch; i++)
    most = (size_t)work->last[i] + 1 > most ? (size_t)work->last[i] + 1 : most;
  work->groups = (sharing(work) + MOST_SHARING - 1) / MOST_SHARING;
  work->chunks = (most + PART_KEYS - 1) / PART_KEYS;
  work->parts = work->batch * form->kv_heads * work->groups * work->chunks;
  const size_t queries = work->batch * form->heads * form->size;
  const size_t found = work->parts * most_heads(work) * (2 + form->size);
  work->memory = aligned((queries + found) * sizeof(float));
  if (!work->memory) return 0;
  work->turned = work->memory;
  work->found = work->turned + queries;
  for (size_t i = 0; i < work->batch; i++) begin_request(work, i);
  return 1;
}

static void merge_head(const Attending *work, size_t kv, size_t number) {
  const Form *form = work->form;
  const size_t size = form->size, request = kv / form->kv_heads;
  const size_t group = number / MOST_SHARING, own = number % MOST_SHARING;
  const size_t head = kv % form->kv_heads * sharing(work) + number;
  const size_t chunks = (size_t)work->last[request] / PART_KEYS + 1;
  const size_t part = (kv * work->groups + group) * work->chunks;
  float *output = work->output + (request * form->heads + head) * size;
  float most = work->sinks ? work->sinks[head] : -INFINITY;
  for (size_t i = 0; i < chunks; i++) {
    const float found = found_of(work, part + i, own)[0];
    most = found > most ? found : most;
  }
  float total = work->sinks ? exponential(work->sinks[head] - most) : 0;
  memset(output, 0, size * sizeof *output);
  for (size_t i = 0; i < chunks; i++) {
    const float *found = found_of(work, part + i, own), weight = exponential(found[0] - most);
    total = __builtin_fmaf(weight, found[1], total);
    for (size_t at = 0; at < size; at++)
      output[at] = __builtin_fmaf(weight, found[2 + at], output[at]);
  }
  for (size_t at = 0; at < size; at++) output[at] /= total;
  if (form->has_codes)
    for (size_t at = 0; at < size; at++)
      output[at] *= work->value_scales[kv % form->kv_heads * size + at];
}

void merge_parts(Attending *work) {
  for (size_t kv = 0; kv < work->batch * work->form->kv_heads; kv++)
    for (size_t head = 0; head < sharing(work); head++) merge_head(work, kv, head);
  release(work->memory);
}
