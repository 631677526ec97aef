/* As avx2.c, with products of bytes that are added in 32 bits at once. */
#include "blocks.h"
#include "avx2.h"

#define NAME avx_vnni
#define MOST 4
#define P int
#define P_ZERO() 0
#define SIGNED(bits) 0
#define STEP(sum, pairs, weights, inputs, bits) \
  (sum = _mm256_dpbusd_avx_epi32(sum, weights, four_of(inputs)))
#define FLUSHES(bits, run, i) 0
#define FLUSH(sum, pairs) (void)0

#include "tile.h"
