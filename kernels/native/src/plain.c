/* Any processor: slow, and what the others are compared with. */
#include "blocks.h"

#define NAME plain
#define MOST 1
#define LANES 1
#define F float
#define I int32_t
#define P int
#define F_ZERO() 0
#define F_ALL(value) (value)
#define F_TIMES(a, b) ((a) * (b))
#define F_ADD_PRODUCT(sum, a, b) fmaf(a, b, sum)
#define F_TAKE_PRODUCT(sum, a, b) fmaf(-(a), b, sum)
#define F_OF(whole) ((float)(whole))
#define F_HALVES(at) half_at(at)
#define F_POWERS(at) power_at(at)
#define F_BYTES(at) ((float)*(at))
#define F_SIGNED_BYTES(at) ((float)(int8_t) * (at))
#define F_LOAD(at) float_at(at)
#define F_FLOATS8(at) half_of(FLOAT8_BITS((uint32_t)*(at)))
#define F_STORE(at, value) (*(at) = (value))
#define I_ALL(value) (value)
#define B uint32_t
#define B_LOAD(at) four_bytes(at)
#define B_AND(bytes, mask) ((bytes) & (0x01010101u * (mask)))
#define B_OR(a, b) ((a) | (b))
#define B_LEFT(bytes, by) ((bytes) << (by))
#define B_RIGHT(bytes, by) ((bytes) >> (by))
#define B_MOVE(bytes, from, to) \
  ((from) < (to) ? B_LEFT(bytes, (to) - (from)) : B_RIGHT(bytes, (from) - (to)))
#define B_LOOK_UP(table, codes) look_up(table, codes)
#define B_SIGNED(bytes) (bytes)
#define B_XOR(a, b) ((a) ^ (b))
#define B_SIGN(bytes, signs, bit, twice) with_signs(bytes, (signs) >> (bit), twice)
#define W_ALL(value) (value)
#define W_AND(words, mask) ((words) & (mask))
#define W_LEFT(words, by) ((words) << (by))
#define W_RIGHT(words, by) ((words) >> (by))
#define W_BYTES(at) ((uint32_t)*(at))
#define W_POINTS(points, count, even, odd) \
  (*(even) = points_at(points, *(even)), *(odd) = points_at(points, *(odd)))
#define F_OF_W(words) ((float)(words))
#define P_ZERO() 0
#define SIGNED(bits) 0
#define STEP(sum, pairs, weights, inputs, bits) (sum += product_of_four(weights, inputs))
#define FLUSHES(bits, run, i) 0
#define FLUSH(sum, pairs) (void)0

INLINE uint32_t four_bytes(const uint8_t *at) {
  return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

INLINE uint32_t look_up(const uint8_t *table, uint32_t codes) {
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= (uint32_t)table[codes >> 8 * i & 15] << 8 * i;
  return found;
}

INLINE uint32_t points_at(const uint16_t *points, uint32_t numbers) {
  return points[numbers & 0xffff] | (uint32_t)points[numbers >> 16] << 16;
}

INLINE uint32_t with_signs(uint32_t bytes, uint32_t signs, int twice) {
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) {
    const int own = (int)(bytes >> 8 * i & 255);
    found |= (uint32_t)((signs >> 8 * i & 1 ? twice - own : own) & 255) << 8 * i;
  }
  return found;
}

INLINE int32_t product_of_four(uint32_t weights, const int8_t *inputs) {
  int32_t sum = 0;
  for (int i = 0; i < 4; i++) sum += (int32_t)(weights >> 8 * i & 255) * inputs[i];
  return sum;
}

INLINE float power_at(const uint8_t *at) {
  const uint32_t bits = POWER_BITS(*at);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE float float_at(const uint8_t *at) {
  float value;
  memcpy(&value, at, sizeof value);
  return value;
}

INLINE float half_of(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? ldexpf((float)(fraction | 1024), (int)exponent - 25)
                               : ldexpf((float)fraction, -24);
  return half >> 15 ? -value : value;
}

INLINE float half_at(const uint8_t *at) { return half_of(at[0] | (uint32_t)at[1] << 8); }

#include "tile.h"
