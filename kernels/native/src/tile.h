/* The product of a tile, for the vectors that the including file defines:
 *
 *   NAME, MOST       suffix of functions; rows of inputs at once
 *   LANES            rows in a vector; F, I: vectors of LANES floats or 32-bit integers
 *   B                4 * LANES bytes: four columns of each row
 *   STEP(a, p, w, x) adds the products of bytes w with four inputs x to a, by way of p
 *   FLUSH(a, p)      ends that, where FLUSHES says so
 *
 * Whole numbers are exact, and floats are multiplied and added in one order with one rounding each,
 * so every processor computes the same bits, for any number of rows of inputs.
 */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#include "grid.h"

/* Adds a piece's products to `sums`. levels, codes: of the lanes' rows. at: the number of the piece. */
INLINE void JOIN(add_piece, NAME)(const int type, const int count, const uint8_t *levels,
                                  const uint8_t *codes, const Inputs *x, size_t at, int piece,
                                  const F scale, const F least, F *sums) {
  const int bits = bits_of(type), width = width_of(type), run = run_of(type);
  const int zero = SIGNED(width) ? 0 : zero_of(type);
  (void)width; /* STEP may treat all alike */
  const int pieces = block_of(type) / PIECE, minimum = has_minimum(type);
  const uint8_t *high = codes + (bits < 4 ? 0 : 256); /* two bits of each code, then one */
  I low_sums[MOST], high_sums[MOST];
  P low_pairs[MOST], high_pairs[MOST];
  (void)low_pairs, (void)high_pairs; /* some STEPs need none */
  JOIN(Piece, NAME) own_piece;
  if (has_grid(type)) own_piece = JOIN(piece, NAME)(type, levels, codes, piece);
  for (int t = 0; t < count; t++) {
    const int32_t *own = x[t].sums + 2 * at;
    low_sums[t] = I_ALL(-zero * (run == 32 ? own[0] + own[1] : own[0]));
    if (run == 16) high_sums[t] = I_ALL(-zero * own[1]);
    low_pairs[t] = high_pairs[t] = P_ZERO();
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    B low, up;
    if (has_grid(type)) {
      low = JOIN(four, NAME)(type, &own_piece, i);
      up = JOIN(four, NAME)(type, &own_piece, 4 + i);
    } else if (bits == 8) {
      low = B_LOAD(codes + 64 * i);
      up = B_LOAD(codes + 64 * (4 + i));
    } else if (bits >= 4) {
      const B both = B_LOAD(codes + 64 * i);
      low = B_AND(both, 15);
      up = B_AND(B_RIGHT(both, 4), 15);
    }
    if (!has_grid(type) && bits < 4) {
      low = B_AND(B_MOVE(B_LOAD(high), 2 * i, 0), 3);
      up = B_AND(B_MOVE(B_LOAD(high + 64), 2 * i, 0), 3);
    } else if (bits == 6) {
      low = B_OR(low, B_AND(B_MOVE(B_LOAD(high), 2 * i, 4), 48));
      up = B_OR(up, B_AND(B_MOVE(B_LOAD(high + 64), 2 * i, 4), 48));
    }
    if ((bits == 3 && !has_grid(type)) || bits == 5) {
      const B more = B_LOAD(high + (bits == 3 ? 128 : 0));
      low = B_OR(low, B_AND(B_MOVE(more, i, bits - 1), 1 << (bits - 1)));
      up = B_OR(up, B_AND(B_MOVE(more, 4 + i, bits - 1), 1 << (bits - 1)));
    }
    if (has_table(type)) {
      low = B_LOOK_UP(table_of(type), low);
      up = B_LOOK_UP(table_of(type), up);
    }
    if (SIGNED(width)) {
      low = B_SIGNED(low);
      up = B_SIGNED(up);
    }
    for (int t = 0; t < count; t++) {
      const int8_t *inputs = x[t].codes + PIECE * at + 4 * i;
      STEP(low_sums[t], low_pairs[t], low, inputs, width);
      if (run == 16) {
        STEP(high_sums[t], high_pairs[t], up, inputs + 16, width);
      } else {
        STEP(low_sums[t], low_pairs[t], up, inputs + 16, width);
      }
      if (FLUSHES(width, run, i)) {
        FLUSH(low_sums[t], low_pairs[t]);
        if (run == 16) FLUSH(high_sums[t], high_pairs[t]);
      }
    }
  }
  F first = scale, second = scale, offset = least, other = least;
  if (has_grid(type)) {
    first = F_TIMES(scale, F_OF_W(own_piece.levels[0]));
    second = F_TIMES(scale, F_OF_W(own_piece.levels[1]));
  } else if (has_float_levels(type)) {
    const uint8_t *own = levels + 2 * ROWS * piece;
    first = F_TIMES(scale, F_FLOATS8(own));
    second = F_TIMES(scale, F_FLOATS8(own + ROWS));
  } else if (has_two_levels(type)) {
    const int runs = PIECE / run;
    const uint8_t *own = levels + ROWS * runs * piece, *lows = own + ROWS * runs * pieces;
    first = F_TIMES(scale, minimum ? F_BYTES(own) : F_SIGNED_BYTES(own));
    if (run == 16) second = F_TIMES(scale, minimum ? F_BYTES(own + ROWS) : F_SIGNED_BYTES(own + ROWS));
    if (minimum) offset = F_TIMES(least, F_BYTES(lows));
    if (minimum && run == 16) other = F_TIMES(least, F_BYTES(lows + ROWS));
  }
  for (int t = 0; t < count; t++) {
    const F by = F_ALL(x[t].scales[at]);
    sums[t] = F_ADD_PRODUCT(sums[t], F_OF(low_sums[t]), F_TIMES(first, by));
    if (run == 16) sums[t] = F_ADD_PRODUCT(sums[t], F_OF(high_sums[t]), F_TIMES(second, by));
    if (minimum && run == 16) {
      const int32_t *own = x[t].sums + 2 * at;
      sums[t] = F_TAKE_PRODUCT(sums[t], offset, F_ALL(x[t].scales[at] * (float)own[0]));
      sums[t] = F_TAKE_PRODUCT(sums[t], other, F_ALL(x[t].scales[at] * (float)own[1]));
    } else if (minimum) {
      const F total = F_ALL(x[t].totals[at]);
      sums[t] = has_two_levels(type) ? F_TAKE_PRODUCT(sums[t], offset, total)
                                     : F_ADD_PRODUCT(sums[t], offset, total);
    }
  }
}

#define AT_ONCE (LANES > 1 ? ROWS / LANES : 1)
/* With so many rows of inputs, products keep the processor busy for so long that nothing reads ahead,
 * and it would wait for memory at every page. With fewer, it reads ahead itself. */
#define FEW_INPUTS 4
#define AHEAD 2048
/* Products of `parts` vectors of a tile's rows, from vector `first` on. */
INLINE void JOIN(parts, NAME)(const int type, const int count, const int parts,
                              const uint8_t *tile, size_t blocks, const Inputs *x, const int first,
                              float *y) {
  const int pieces = block_of(type) / PIECE, minimum = has_minimum(type);
  F sums[AT_ONCE][MOST], scales[AT_ONCE], least[AT_ONCE]; /* `parts` of them */
#pragma GCC unroll 4
  for (int part = 0; part < parts; part++)
    for (int t = 0; t < count; t++) sums[part][t] = F_ZERO();
  for (size_t block = 0; block < blocks; block++, tile += tile_bytes(type)) {
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++) {
      const uint8_t *halves = tile + scale_bytes(type) * LANES * (first + part);
      scales[part] = has_power(type) ? F_POWERS(halves)
                     : has_float_levels(type) ? F_LOAD(halves) : F_HALVES(halves);
      if (share_of(type) != 1) scales[part] = F_TIMES(scales[part], F_ALL(share_of(type)));
      least[part] = minimum ? F_HALVES(halves + 2 * ROWS) : F_ZERO();
    }
    const uint8_t *levels = tile + scale_bytes(type) * ROWS * (1 + minimum) + LANES * first;
    const uint8_t *codes = tile + head_bytes(type) + 4 * LANES * first;
    for (int piece = 0; piece < pieces; piece++, codes += piece_bytes(type)) {
      /* Of few rows, one piece ahead where lines are not read in their order; else the first line. */
      const int is_far = count >= FEW_INPUTS, is_mixed = LANES == ROWS && bits_of(type) == 6;
      if (is_far || is_mixed) {
#pragma GCC unroll 8
        for (int line = 0; line < piece_bytes(type); line += 64)
          __builtin_prefetch(codes + (is_far ? AHEAD : piece_bytes(type)) + line);
      } else if (LANES == ROWS || bits_of(type) == 5) {
        __builtin_prefetch(codes);
      }
#pragma GCC unroll 4
      for (int part = 0; part < parts; part++)
        JOIN(add_piece, NAME)(type, count, levels + LANES * part, codes + 4 * LANES * part, x,
                              block * pieces + piece, piece, scales[part], least[part], sums[part]);
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < parts; part++)
    for (int t = 0; t < count; t++)
      F_STORE(y + ROWS * t + LANES * (first + part), sums[part][t]);
}

#define PARTS(type, count, at_once)                                                            \
  _Pragma("GCC unroll 1") for (int part = 0; part < ROWS / LANES; part += at_once)             \
      JOIN(parts, NAME)(type, count, at_once, tiles, blocks, x, part, y)
/* The first rows of inputs take all rows of a tile at once, as it comes from memory. Further ones
 * take a vector of these after the other. */
#define PRODUCTS(type)                                                                         \
  static void JOIN(JOIN(products, type), NAME)(const uint8_t *tiles, size_t blocks,      \
                                                      const Inputs *x, int count, float *y) {  \
    if (AT_ONCE > 1 && count >= MOST) {                                                        \
      PARTS(type, MOST, AT_ONCE);                                                              \
      count -= MOST, x += MOST, y += MOST * ROWS;                                              \
    }                                                                                          \
    for (; count >= MOST; count -= MOST, x += MOST, y += MOST * ROWS) PARTS(type, MOST, 1);    \
    if (MOST > 4 && count >= 4) {                                                              \
      PARTS(type, 4, 1);                                                                       \
      count -= 4, x += 4, y += 4 * ROWS;                                                       \
    }                                                                                          \
    if (MOST > 2 && count >= 2) {                                                              \
      PARTS(type, 2, AT_ONCE);                                                                 \
      count -= 2, x += 2, y += 2 * ROWS;                                                       \
    }                                                                                          \
    if (count) PARTS(type, 1, AT_ONCE);                                                        \
  }
PRODUCTS(Q4_0)
PRODUCTS(Q4_1)
PRODUCTS(Q5_0)
PRODUCTS(Q5_1)
PRODUCTS(Q8_0)
PRODUCTS(IQ4_NL)
PRODUCTS(MXFP4)
PRODUCTS(Q2_K)
PRODUCTS(Q3_K)
PRODUCTS(Q4_K)
PRODUCTS(Q5_K)
PRODUCTS(Q6_K)
PRODUCTS(IQ4_XS)
PRODUCTS(IQ2_XXS)
PRODUCTS(IQ2_XS)
PRODUCTS(IQ2_S)
PRODUCTS(IQ3_XXS)
PRODUCTS(IQ3_S)
PRODUCTS(NVFP4)

/* Whole numbers are compared, as their order is that of positive floats; so NaN is the largest. */
static void JOIN(round, NAME)(const float *x, size_t columns, size_t padded, int8_t *codes,
                              float *scales, int32_t *sums, float *totals, float *rest) {
  for (size_t piece = 0; piece < padded / PIECE; piece++, codes += PIECE) {
    const size_t at = PIECE * piece;
    const size_t there = at >= columns ? 0 : columns - at < PIECE ? columns - at : PIECE;
    float values[PIECE] = {0};
    memcpy(values, x + at, there * sizeof *x);
    int32_t peak = 0;
    for (int i = 0; i < PIECE; i++) {
      int32_t bits;
      memcpy(&bits, values + i, sizeof bits);
      bits &= INT32_MAX;
      peak = bits > peak ? bits : peak;
    }
    float largest;
    memcpy(&largest, &peak, sizeof largest);
    const int is_finite = peak < 0x7f800000, is_nothing = largest < SMALLEST_PEAK;
    const float by = is_finite && !is_nothing ? LARGEST_CODE / largest : 0;
    const float scale = !is_finite ? NAN : is_nothing ? 0 : largest / LARGEST_CODE;
    int32_t found[PIECE];
    for (int i = 0; i < PIECE; i++) found[i] = is_finite ? (int32_t)rintf(values[i] * by) : 0;
    int32_t first = 0, second = 0;
    for (int i = 0; i < PIECE; i++) codes[i] = (int8_t)found[i];
    for (int i = 0; i < 16; i++) first += found[i], second += found[16 + i];
    scales[piece] = scale;
    sums[2 * piece] = first;
    sums[2 * piece + 1] = second;
    totals[piece] = scale * (float)(first + second);
    if (rest)
      for (size_t i = 0; i < there; i++) rest[at + i] = values[i] - scale * (float)found[i];
  }
}

const Kernels *JOIN(NAME, kernels)(void) {
#define OF(type) JOIN(JOIN(products, type), NAME)
  static const Kernels found = {
      STRING(NAME), JOIN(round, NAME),
      {OF(Q4_0), OF(Q4_1), OF(Q5_0), OF(Q5_1), OF(Q8_0), OF(IQ4_NL), OF(MXFP4), OF(Q2_K),
       OF(Q3_K), OF(Q4_K), OF(Q5_K), OF(Q6_K), OF(IQ4_XS), OF(IQ2_XXS), OF(IQ2_XS), OF(IQ2_S),
       OF(IQ3_XXS), OF(IQ3_S), OF(NVFP4)}};
  return &found;
}
