/* Vectors of eight rows, for processors with AVX2, FMA and F16C. */
#include <immintrin.h>

#define LANES 8
#define F __m256
#define I __m256i
#define B __m256i
#define F_ZERO() _mm256_setzero_ps()
#define F_ALL(value) _mm256_set1_ps(value)
#define F_TIMES(a, b) _mm256_mul_ps(a, b)
#define F_ADD_PRODUCT(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#define F_TAKE_PRODUCT(sum, a, b) _mm256_fnmadd_ps(a, b, sum)
#define F_OF(whole) _mm256_cvtepi32_ps(whole)
#define F_HALVES(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
#define F_POWERS(at) powers(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define F_BYTES(at) \
  _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define F_SIGNED_BYTES(at) \
  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at))))
#define F_STORE(at, value) _mm256_storeu_ps(at, value)
#define I_ALL(value) _mm256_set1_epi32(value)
#define B_LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define B_AND(bytes, mask) _mm256_and_si256(bytes, _mm256_set1_epi8(mask))
#define B_OR(a, b) _mm256_or_si256(a, b)
#define B_LEFT(bytes, by) _mm256_slli_epi16(bytes, by)
#define B_RIGHT(bytes, by) _mm256_srli_epi16(bytes, by)
#define B_MOVE(bytes, from, to) \
  ((from) < (to) ? B_LEFT(bytes, (to) - (from)) : B_RIGHT(bytes, (from) - (to)))
#define B_LOOK_UP(table, codes) \
  _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table))), codes)
#define B_SIGNED(bytes) _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x80))

INLINE __m256 powers(__m256i bytes) { /* POWER_BITS */
  const __m256i one = _mm256_set1_epi32(1), least = _mm256_set1_epi32(0x200000);
  const __m256i few = _mm256_sllv_epi32(least, _mm256_min_epi32(bytes, one));
  return _mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(bytes, one), 23), few));
}

INLINE __m256i four_of(const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, sizeof four);
  return _mm256_set1_epi32(four);
}
