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
#define F_LOAD(at) _mm256_loadu_ps((const float *)(const void *)(at))
#define F_FLOATS8(at) floats8(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(at))))
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
#define B_XOR(a, b) _mm256_xor_si256(a, b)
#define B_SIGN(bytes, signs, bit, twice)                                                       \
  _mm256_blendv_epi8(bytes, _mm256_sub_epi8(_mm256_set1_epi8((char)(twice)), bytes),             \
                     _mm256_slli_epi16(signs, 7 - (bit)))
#define W_ALL(value) _mm256_set1_epi32(value)
#define W_AND(words, mask) _mm256_and_si256(words, _mm256_set1_epi32(mask))
#define W_LEFT(words, by) _mm256_slli_epi32(words, by)
#define W_RIGHT(words, by) _mm256_srli_epi32(words, by)
#define W_BYTES(at) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at)))
#define W_POINTS(points, count, even, odd) (*(even) = points_at(points, *(even)), *(odd) = points_at(points, *(odd)))
#define F_OF_W(words) _mm256_cvtepi32_ps(words)

INLINE __m256 powers(__m256i bytes) { /* POWER_BITS */
  const __m256i one = _mm256_set1_epi32(1), least = _mm256_set1_epi32(0x200000);
  const __m256i few = _mm256_sllv_epi32(least, _mm256_min_epi32(bytes, one));
  return _mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(bytes, one), 23), few));
}

INLINE __m256 floats8(__m128i signed_bytes) { /* FLOAT8_BITS: the second bit is a sign, too */
  const __m128i shifted = _mm_slli_epi16(signed_bytes, 7);
  return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((short)0xbfff)));
}

/* Of two numbers of 16 bits in each row. A gather reads 32 bits. */
INLINE __m256i points_at(const uint16_t *points, __m256i numbers) {
  const int *from = (const int *)(const void *)points;
  const __m256i first = _mm256_i32gather_epi32(from, W_AND(numbers, 0xffff), 2);
  const __m256i second = _mm256_i32gather_epi32(from, W_RIGHT(numbers, 16), 2);
  return _mm256_blend_epi16(first, W_LEFT(second, 16), 0xaa);
}

INLINE __m256i four_of(const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, sizeof four);
  return _mm256_set1_epi32(four);
}
