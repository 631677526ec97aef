/* Pairs of products are added in 16 bits, and these in 32 before they overflow. */
#include "blocks.h"
#include "avx2.h"

#define NAME avx2
#define MOST 4
#define P __m256i
#define P_ZERO() _mm256_setzero_si256()
#define SIGNED(bits) ((bits) == 8)
#define WIDE(pairs) _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
#define STEP(sum, pairs, weights, inputs, bits)                                                \
  do {                                                                                         \
    if ((bits) == 8) /* 128 * 127 * 2 is the most that a pair can be */                        \
      sum = _mm256_add_epi32(                                                                  \
          sum, WIDE(_mm256_maddubs_epi16(_mm256_abs_epi8(weights),                             \
                                         _mm256_sign_epi8(four_of(inputs), weights))));        \
    else                                                                                       \
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights, four_of(inputs)));         \
  } while (0)
/* 8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 are below 2^15. Of 6 bits, a run of 32
 * adds two at once. */
#define FLUSHES(bits, run, i) \
  ((bits) == 8 ? 0 : (bits) == 6 && (run) == 32 ? 1 : (bits) <= 4 ? (i) == 3 : (i) & 1)
#define FLUSH(sum, pairs) (sum = _mm256_add_epi32(sum, WIDE(pairs)), pairs = P_ZERO())

#include "tile.h"
