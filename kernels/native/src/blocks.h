/* Types of blocks, and how they lie in memory.
 *
 * Sixteen rows lie side by side in a tile, so that each of a vector's sixteen lanes is a row. A tile
 * has one block of each of its rows: 32 columns, or 256 in types of two levels. See
 * edge/kernels/matmul_blocks/reference.py, which has the same in numpy.
 */
#ifndef EDGE_BLOCKS_H
#define EDGE_BLOCKS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LARGEST_CODE 127.0f
#define SMALLEST_PEAK 1e-30f
#define STRING_(name) #name
#define STRING(name) STRING_(name)

enum { LAYOUT_VERSION = 1 };   /* raised with every change of the layout */
enum { OPERATOR_VERSION = 8 }; /* and of inputs, types, attention, or quantize.c */
enum { ROWS = 16, PIECE = 32 }; /* columns whose inputs share a scale */
enum {
  Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
  IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, /* have grids */
  NVFP4, TYPES
};

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* All of these are folded where `type` is a constant. */
INLINE int bits_of(int type) {
  switch (type) {
    case Q2_K: case IQ2_XXS: case IQ2_XS: case IQ2_S: return 2;
    case Q3_K: case IQ3_XXS: case IQ3_S: return 3;
    case Q5_0: case Q5_1: case Q5_K: return 5;
    case Q6_K: return 6;
    case Q8_0: return 8;
    default: return 4;
  }
}
INLINE int has_table(int type) {
  return type == IQ4_NL || type == MXFP4 || type == IQ4_XS || type == NVFP4;
}
INLINE int has_power(int type) { return type == MXFP4; } /* a byte for a scale: its exponent */
/* The scale is a float32, and levels are floats of 8 bits. */
INLINE int has_float_levels(int type) { return type == NVFP4; }
/* The number of a point of a grid stands for several columns without signs; see grid.h. */
INLINE int has_grid(int type) { return type >= IQ2_XXS && type <= IQ3_S; }
INLINE int columns_of_point(int type) { return type >= IQ3_XXS ? 4 : 8; }
INLINE int count_of_points(int type) {
  return type == IQ2_S ? 1024 : type == IQ2_XS || type == IQ3_S ? 512 : 256;
}
/* Seven of eight signs are there, because the minus signs of eight columns are even in number. */
INLINE int has_even_signs(int type) { return type != IQ2_S && type != IQ3_S; }
INLINE int has_level_by_signs(int type) { return type == IQ2_XXS || type == IQ3_XXS; }
/* Bits of what is multiplied: a code, or what it stands for. */
INLINE int width_of(int type) {
  switch (type) {
    case MXFP4: case NVFP4: case IQ3_S: return 5;
    case IQ3_XXS: return 6;
    default: return has_table(type) || has_grid(type) ? 8 : bits_of(type);
  }
}
INLINE int has_two_levels(int type) { return type >= Q2_K; }
INLINE int has_minimum(int type) {
  return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K;
}
INLINE int run_of(int type) { /* columns that share a scale */
  switch (type) {
    case Q2_K: case Q3_K: case Q6_K: case IQ2_XS: case IQ2_S: case NVFP4: return 16;
    default: return 32;
  }
}
INLINE int zero_of(int type) { return has_minimum(type) ? 0 : 1 << (width_of(type) - 1); }
INLINE int block_of(int type) { return has_two_levels(type) ? 256 : 32; }
INLINE int piece_bytes(int type) { return 64 * bits_of(type); }
INLINE int scale_bytes(int type) { return has_power(type) ? 1 : has_float_levels(type) ? 4 : 2; }
INLINE int head_bytes(int type) { /* of a tile: its scales */
  int halves = scale_bytes(type) * ROWS * (1 + has_minimum(type));
  if (has_grid(type)) /* bytes of each piece: levels, and bits of numbers */
    return halves + 256 / PIECE * ROWS * (!has_level_by_signs(type) + !has_even_signs(type));
  return has_two_levels(type) ? halves + (256 / run_of(type)) * ROWS * (1 + has_minimum(type))
                              : halves;
}
INLINE int tile_bytes(int type) {
  return head_bytes(type) + block_of(type) / PIECE * piece_bytes(type);
}

/* What the codes of types with a table stand for, plus `zero_of` these. */
static const uint8_t TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                  129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t TABLE_OF_POWERS[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                            16, 15, 14, 13, 12, 10, 8,  4};
INLINE const uint8_t *table_of(int type) {
  return has_power(type) || has_float_levels(type) ? TABLE_OF_POWERS : TABLE;
}
/* What scales are multiplied by beside their levels, which are odd in types with a grid. */
INLINE float share_of(int type) {
  switch (type) {
    case NVFP4: return 128; /* 256, and codes are twice what they stand for */
    case IQ3_XXS: return 0.5f;
    case IQ2_XXS: case IQ2_XS: case IQ2_S: return 0.125f;
    default: return 1;
  }
}
/* The bits of a float16: an E4M3 float divided by 256. NaN is the 480 that its bits would be. */
#define FLOAT8_BITS(byte) (((byte) & 0x80) << 8 | ((byte) & 0x7f) << 7)
/* The bits of a float32: 2 to the power of a byte less 128. The least two have fewer digits. */
#define POWER_BITS(byte) \
  ((byte) > 1 ? ((uint32_t)(byte) - 1) << 23 : (uint32_t)0x200000 << (byte))

/* The inputs of one row of a product, rounded to 8 bits in pieces of 32. */
typedef struct {
  const int8_t *codes;  /* [columns] */
  const float *scales;  /* [pieces] */
  const int32_t *sums;  /* [2 * pieces]: of sixteen codes each */
  const float *totals;  /* [pieces]: scale times the sum of 32 codes */
} Inputs;

/* Products of a tile's rows, all along the columns, with `count` rows of inputs: [count][ROWS]. */
typedef void (*TileProducts)(const uint8_t *tiles, size_t blocks, const Inputs *x, int count,
                             float *y);
/* Rounds one row of inputs [columns], with zeros after it up to whole blocks. rest: NULL, or what
 * rounding takes from them [columns]. */
typedef void (*Round)(const float *x, size_t columns, size_t padded, int8_t *codes, float *scales,
                      int32_t *sums, float *totals, float *rest);

typedef struct {
  const char *name;
  Round round;
  TileProducts products[TYPES];
} Kernels;

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#define HIDDEN
#else
#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))
#endif

/* Of grids, by type less the first of these. A gather reads 32 bits at the last point. */
extern uint16_t GRID_POINTS[NVFP4 - IQ2_XXS][1024 + 32] HIDDEN;

const Kernels *plain_kernels(void);
const Kernels *avx2_kernels(void);
const Kernels *avx_vnni_kernels(void);
const Kernels *avx512_kernels(void);
const Kernels *neon_kernels(void);

#endif
