/* Vectors of sixteen rows, for processors with AVX-512 F, BW, VL and VNNI. */
#include "blocks.h"

#include <immintrin.h>

#define NAME avx512
#define MOST 8
#define LANES 16
#define F __m512
#define I __m512i
#define B __m512i
#define P int
#define F_ZERO() _mm512_setzero_ps()
#define F_ALL(value) _mm512_set1_ps(value)
#define F_TIMES(a, b) _mm512_mul_ps(a, b)
#define F_ADD_PRODUCT(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define F_TAKE_PRODUCT(sum, a, b) _mm512_fnmadd_ps(a, b, sum)
#define F_OF(whole) _mm512_cvtepi32_ps(whole)
#define F_HALVES(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
#define F_POWERS(at) powers(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define F_BYTES(at) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define F_SIGNED_BYTES(at) \
  _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at))))
#define F_LOAD(at) _mm512_loadu_ps((const float *)(const void *)(at))
#define F_FLOATS8(at) floats8(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at))))
#define F_STORE(at, value) _mm512_storeu_ps(at, value)
#define I_ALL(value) _mm512_set1_epi32(value)
#define B_LOAD(at) _mm512_loadu_si512(at)
#define B_AND(bytes, mask) _mm512_and_si512(bytes, _mm512_set1_epi8(mask))
#define B_OR(a, b) _mm512_or_si512(a, b)
#define B_LEFT(bytes, by) _mm512_slli_epi16(bytes, by)
#define B_RIGHT(bytes, by) _mm512_srli_epi16(bytes, by)
#define B_MOVE(bytes, from, to) \
  ((from) < (to) ? B_LEFT(bytes, (to) - (from)) : B_RIGHT(bytes, (from) - (to)))
#define B_LOOK_UP(table, codes) \
  _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(table))), codes)
#define B_SIGNED(bytes) bytes
#define B_XOR(a, b) _mm512_xor_si512(a, b)
#define B_SIGN(bytes, signs, bit, twice)                                                       \
  _mm512_mask_sub_epi8(bytes, _mm512_test_epi8_mask(signs, _mm512_set1_epi8((char)(1 << (bit)))), \
                       _mm512_set1_epi8((char)(twice)), bytes)
#define W_ALL(value) _mm512_set1_epi32(value)
#define W_AND(words, mask) _mm512_and_si512(words, _mm512_set1_epi32(mask))
#define W_LEFT(words, by) _mm512_slli_epi32(words, by)
#define W_RIGHT(words, by) _mm512_srli_epi32(words, by)
#define W_BYTES(at) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at)))
#define W_POINTS(points, count, even, odd) points_at(points, count, even, odd)
#define F_OF_W(words) _mm512_cvtepi32_ps(words)
#define P_ZERO() 0
#define SIGNED(bits) 0
#define STEP(sum, pairs, weights, inputs, bits) \
  (sum = _mm512_dpbusd_epi32(sum, weights, four_of(inputs)))
#define FLUSHES(bits, run, i) 0
#define FLUSH(sum, pairs) (void)0

INLINE __m512 powers(__m512i bytes) { /* POWER_BITS */
  const __m512i one = _mm512_set1_epi32(1), least = _mm512_set1_epi32(0x200000);
  const __m512i few = _mm512_sllv_epi32(least, _mm512_min_epi32(bytes, one));
  return _mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(bytes, one), 23), few));
}

INLINE __m512 floats8(__m256i signed_bytes) { /* FLOAT8_BITS: the second bit is a sign, too */
  const __m256i shifted = _mm256_slli_epi16(signed_bytes, 7);
  return _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff)));
}

INLINE __m512i chosen(__m512i numbers, const int bit, __m512i low, __m512i high) {
  const __mmask32 is_set = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16((short)bit));
  return _mm512_mask_blend_epi16(is_set, low, high);
}

/* Of two numbers of 16 bits in each row: in 64 points at once, of which further bits choose. */
INLINE void points_at(const uint16_t *points, const int count, __m512i *even, __m512i *odd) {
  __m512i first[5], second[5];
  int there = 0;
#pragma GCC unroll 16
  for (int i = 0; i < count / 64; i++, there++) {
    const __m512i low = _mm512_loadu_si512(points + 64 * i);
    const __m512i high = _mm512_loadu_si512(points + 64 * i + 32);
    first[there] = _mm512_permutex2var_epi16(low, *even, high);
    second[there] = _mm512_permutex2var_epi16(low, *odd, high);
#pragma GCC unroll 4
    for (int by = 1; i & by; by *= 2) {
      there--;
      first[there] = chosen(*even, 64 * by, first[there], first[there + 1]);
      second[there] = chosen(*odd, 64 * by, second[there], second[there + 1]);
    }
  }
  *even = first[0];
  *odd = second[0];
}

INLINE __m512i four_of(const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, sizeof four);
  return _mm512_set1_epi32(four);
}

#include "tile.h"
