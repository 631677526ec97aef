/* Weights rounded to blocks, without data: types whose codes are whole numbers.
 *
 * Sixteen runs are rounded side by side, one in each lane. Several spreads of the codes over a run's
 * range are tried; for the codes of each, the scale (and minimum) of least squared error is solved,
 * and the best of all stays, as in `make_qkx2_quants` of ggml. Levels with minima have all 8
 * bits of their bytes, where files have 6 (4 in Q2_K). One rounding for each operation: every
 * processor makes the same blocks, and a block depends on its own weights alone.
 */
#include "blocks.h"

enum { LANES = 16, MOST_RUN = 32, TRIES = 16, MOST_LEVEL = 255, MOST_SIGNED_LEVEL = 127 };
static const float LEAST_SPREAD = -0.75f, SPREAD_STEP = 0.1f;

typedef float Lane[LANES];

/* Bytes of each block in the results. */
typedef struct {
  uint8_t *codes;      /* [blocks, columns of a block] */
  float *scales;       /* [blocks]: as a float16 holds them */
  float *minima;       /* [blocks]; not read without minima */
  uint8_t *levels;     /* [blocks, runs]; int8 without minima; not read in types of one level */
  uint8_t *least_levels;
} Rounded;

/* The nearest whole number, within limits; NaN is the highest. */
INLINE float whole(float value, float lowest, float highest) {
  value = value < highest ? value : highest;
  value = value > lowest ? value : lowest;
  return (value + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: only whole numbers are that large */
}

INLINE float inverse(float value) { return value != 0 ? 1 / value : 0; }

/* The nearest float16, as a float. */
INLINE float half_of(float value) {
  const float steps = 16777216.0f; /* 2^24: of the smallest numbers */
  if (fabsf(value) < 6.1035156e-05f) return whole(value * steps, -1024, 1024) / steps;
  const float wide = value * 8193.0f; /* 2^13 + 1 */
  return wide - (wide - value);
}

/* The codes of x, and sums over them. */
typedef struct {
  Lane codes, squares, products; /* q, q q, q x */
} Sums;

INLINE void add(Sums *sums, const float *x, const float *inverses, const float *least, float lowest,
                float highest) {
  for (int i = 0; i < LANES; i++) {
    const float code = whole((x[i] - least[i]) * inverses[i], lowest, highest);
    sums->codes[i] += code;
    sums->squares[i] += code * code;
    sums->products[i] += code * x[i];
  }
}

/* x is about scale * code + least, codes 0 to `top`. has_sign: least may be above 0. */
static void fit_range(const Lane *x, int run, float top, int has_sign, float *scales, float *least) {
  Lane lowest, highest, total = {0}, best;
  for (int i = 0; i < LANES; i++) {
    lowest[i] = highest[i] = x[0][i];
    best[i] = INFINITY;
  }
  for (int k = 0; k < run; k++)
    for (int i = 0; i < LANES; i++) {
      lowest[i] = x[k][i] < lowest[i] ? x[k][i] : lowest[i];
      highest[i] = x[k][i] > highest[i] ? x[k][i] : highest[i];
      total[i] += x[k][i];
    }
  for (int i = 0; i < LANES; i++) {
    if (!has_sign && lowest[i] > 0) lowest[i] = 0;
    scales[i] = 0;
    least[i] = lowest[i];
  }
  for (int try = 0; try < TRIES; try++) {
    const float spread = top + LEAST_SPREAD + SPREAD_STEP * (float)try;
    Lane inverses;
    Sums sums = {0};
    for (int i = 0; i < LANES; i++) inverses[i] = spread * inverse(highest[i] - lowest[i]);
    for (int k = 0; k < run; k++) add(&sums, x[k], inverses, lowest, 0, top);
    for (int i = 0; i < LANES; i++) {
      const float q = sums.codes[i], qq = sums.squares[i], qx = sums.products[i];
      const float both = inverse((float)run * qq - q * q);
      float scale = ((float)run * qx - total[i] * q) * both;
      float minimum = (qq * total[i] - q * qx) * both;
      const int is_off = !has_sign && minimum > 0;
      scale = is_off ? qx * inverse(qq) : scale;
      minimum = is_off ? 0 : minimum;
      /* The squared error, less the sum of x x. */
      const float error = scale * (scale * qq + 2 * (minimum * q - qx)) +
                          minimum * ((float)run * minimum - 2 * total[i]);
      const int is_better = both > 0 && error < best[i]; /* 0: all weights are equal */
      best[i] = is_better ? error : best[i];
      scales[i] = is_better ? scale : scales[i];
      least[i] = is_better ? minimum : least[i];
    }
  }
}

/* x is about scale * code, codes -zero to zero - 1. */
static void fit_scale(const Lane *x, int run, float zero, float *scales) {
  Lane peak = {0}, best = {0}, nothing = {0};
  for (int k = 0; k < run; k++)
    for (int i = 0; i < LANES; i++)
      peak[i] = fabsf(x[k][i]) > fabsf(peak[i]) ? x[k][i] : peak[i];
  for (int i = 0; i < LANES; i++) scales[i] = 0;
  for (int try = 0; try < TRIES; try++) {
    const float spread = -(zero + LEAST_SPREAD + SPREAD_STEP * (float)try);
    Lane inverses;
    Sums sums = {0};
    for (int i = 0; i < LANES; i++) inverses[i] = spread * inverse(peak[i]);
    for (int k = 0; k < run; k++) add(&sums, x[k], inverses, nothing, -zero, zero - 1);
    for (int i = 0; i < LANES; i++) {
      const float scale = sums.products[i] * inverse(sums.squares[i]);
      const float less = sums.products[i] * scale; /* of the squared error */
      const int is_better = less > best[i];
      best[i] = is_better ? less : best[i];
      scales[i] = is_better ? scale : scales[i];
    }
  }
}

/* A float16 for each block, and a level for each run, whose product is the run's number. */
static void in_levels(float *numbers, int runs, float lowest, float highest, float *halves,
                      Lane levels) {
  for (int block = 0; block < LANES / runs; block++) {
    float *own = numbers + block * runs, peak = 0;
    for (int i = 0; i < runs; i++) peak = fabsf(own[i]) > fabsf(peak) ? own[i] : peak;
    float half = half_of(peak / highest);
    /* Not below: levels would be cut off. The next float16, where rounding went down. */
    if (fabsf(half) * highest < fabsf(peak)) {
      const float least = 5.9604645e-08f, more = fabsf(half) * 0.000499f; /* 2^-24; about 2^-11 */
      half = half_of(half + copysignf(more > least ? more : least, peak));
    }
    const float inverted = inverse(half);
    halves[block] = half;
    for (int i = 0; i < runs; i++) {
      levels[block * runs + i] = whole(own[i] * inverted, lowest, highest);
      own[i] = half * levels[block * runs + i];
    }
  }
}

INLINE void round_sixteen(const int type, const float *weights, int blocks, size_t at, Rounded to) {
  const int run = run_of(type), block = block_of(type), runs = block / run;
  const int has_levels = has_two_levels(type), has_least = has_minimum(type);
  const float zero = (float)zero_of(type), top = (float)((1 << bits_of(type)) - 1);
  Lane x[MOST_RUN], scales, least = {0}, levels = {0}, least_levels = {0};
  float halves[LANES], least_halves[LANES] = {0};
  memset(x, 0, sizeof x);
  for (int i = 0; i < blocks * runs; i++)
    for (int k = 0; k < run; k++) x[k][i] = weights[i * run + k];
  if (has_least)
    fit_range((const Lane *)x, run, top, !has_levels, scales, least);
  else
    fit_scale((const Lane *)x, run, zero, scales);
  if (has_levels) {
    const float most = has_least ? MOST_LEVEL : MOST_SIGNED_LEVEL;
    in_levels(scales, runs, has_least ? 0 : -most, most, halves, levels);
    for (int i = 0; has_least && i < LANES; i++) least[i] = -least[i];
    if (has_least) in_levels(least, runs, 0, most, least_halves, least_levels);
    for (int i = 0; has_least && i < LANES; i++) least[i] = -least[i];
  } else {
    for (int i = 0; i < LANES; i++) {
      halves[i] = scales[i] = half_of(scales[i]);
      least_halves[i] = least[i] = half_of(least[i]);
    }
  }
  uint8_t codes[MOST_RUN][LANES];
  for (int k = 0; k < run; k++)
    for (int i = 0; i < LANES; i++) {
      const float code = whole((x[k][i] - least[i]) * inverse(scales[i]), -zero, top - zero);
      codes[k][i] = (uint8_t)(int)(code + zero);
    }
  for (int i = 0; i < blocks * runs; i++)
    for (int k = 0; k < run; k++) to.codes[(at * runs + i) * run + k] = codes[k][i];
  for (int i = 0; i < blocks; i++) {
    to.scales[at + i] = halves[i];
    if (has_least) to.minima[at + i] = least_halves[i];
  }
  for (int i = 0; has_levels && i < blocks * runs; i++) {
    to.levels[at * runs + i] = (uint8_t)(int)levels[i];
    if (has_least) to.least_levels[at * runs + i] = (uint8_t)(int)least_levels[i];
  }
}

/* Weights [blocks, columns of a block] of a type, rounded. 0: none of its codes are whole numbers. */
EXPORT int edge_kernels_round(int type, const float *weights, size_t blocks, uint8_t *codes,
                              float *scales, float *minima, uint8_t *levels,
                              uint8_t *least_levels) {
  if (type < 0 || type >= TYPES || has_table(type) || has_grid(type)) return 0;
  const Rounded to = {codes, scales, minima, levels, least_levels};
  const size_t block = (size_t)block_of(type), step = LANES / (block / (size_t)run_of(type));
  for (size_t at = 0; at < blocks; at += step) {
    const int count = (int)(blocks - at < step ? blocks - at : step);
    const float *own = weights + at * block;
    switch (type) { /* constants, so that each type has loops of its own */
      case Q4_0: round_sixteen(Q4_0, own, count, at, to); break;
      case Q4_1: round_sixteen(Q4_1, own, count, at, to); break;
      case Q5_0: round_sixteen(Q5_0, own, count, at, to); break;
      case Q5_1: round_sixteen(Q5_1, own, count, at, to); break;
      case Q8_0: round_sixteen(Q8_0, own, count, at, to); break;
      case Q2_K: round_sixteen(Q2_K, own, count, at, to); break;
      case Q3_K: round_sixteen(Q3_K, own, count, at, to); break;
      case Q4_K: round_sixteen(Q4_K, own, count, at, to); break;
      case Q5_K: round_sixteen(Q5_K, own, count, at, to); break;
      default: round_sixteen(Q6_K, own, count, at, to);
    }
  }
  return 1;
}
