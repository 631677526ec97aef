/* Vectors of four rows, for ARM64 with products of bytes (FEAT_DotProd). */
#include "blocks.h"

#include <arm_neon.h>

#define NAME neon
#define MOST 4
#define LANES 4
#define F float32x4_t
#define I int32x4_t
#define B uint8x16_t
#define P int
#define F_ZERO() vdupq_n_f32(0)
#define F_ALL(value) vdupq_n_f32(value)
#define F_TIMES(a, b) vmulq_f32(a, b)
#define F_ADD_PRODUCT(sum, a, b) vfmaq_f32(sum, a, b)
#define F_TAKE_PRODUCT(sum, a, b) vfmsq_f32(sum, a, b)
#define F_OF(whole) vcvtq_f32_s32(whole)
#define F_HALVES(at) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(at))))
#define F_POWERS(at) powers(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(at)))))
#define F_BYTES(at) vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(at)))))
#define F_SIGNED_BYTES(at) \
  vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(at))))))
#define F_LOAD(at) vreinterpretq_f32_u8(vld1q_u8(at))
#define F_FLOATS8(at) floats8(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(at)))))
#define F_STORE(at, value) vst1q_f32(at, value)
#define I_ALL(value) vdupq_n_s32(value)
#define B_LOAD(at) vld1q_u8(at)
#define B_AND(bytes, mask) vandq_u8(bytes, vdupq_n_u8(mask))
#define B_OR(a, b) vorrq_u8(a, b)
#define B_LEFT(bytes, by) vshlq_u8(bytes, vdupq_n_s8(by))
#define B_RIGHT(bytes, by) vshlq_u8(bytes, vdupq_n_s8(-(by)))
#define B_MOVE(bytes, from, to) B_LEFT(bytes, (to) - (from))
#define B_LOOK_UP(table, codes) vqtbl1q_u8(vld1q_u8(table), codes)
#define B_SIGNED(bytes) veorq_u8(bytes, vdupq_n_u8(0x80))
#define B_XOR(a, b) veorq_u8(a, b)
#define B_SIGN(bytes, signs, bit, twice)               \
  vbslq_u8(vtstq_u8(signs, vdupq_n_u8(1 << (bit))),    \
           vsubq_u8(vdupq_n_u8((uint8_t)(twice)), bytes), bytes)
#define WORDS(bytes) vreinterpretq_u32_u8(bytes)
#define W_ALL(value) vreinterpretq_u8_u32(vdupq_n_u32(value))
#define W_AND(words, mask) vandq_u8(words, W_ALL(mask))
#define W_LEFT(words, by) vreinterpretq_u8_u32(vshlq_u32(WORDS(words), vdupq_n_s32(by)))
#define W_RIGHT(words, by) W_LEFT(words, -(by))
#define W_BYTES(at) vreinterpretq_u8_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(at)))))
#define W_POINTS(points, count, even, odd) (*(even) = points_at(points, *(even)), *(odd) = points_at(points, *(odd)))
#define F_OF_W(words) vcvtq_f32_u32(WORDS(words))
#define P_ZERO() 0
#define SIGNED(bits) ((bits) == 8)
#define STEP(sum, pairs, weights, inputs, bits) \
  (sum = vdotq_s32(sum, vreinterpretq_s8_u8(weights), four_of(inputs)))
#define FLUSHES(bits, run, i) 0
#define FLUSH(sum, pairs) (void)0

INLINE uint8x8_t four_bytes(const uint8_t *at) {
  uint32_t four;
  memcpy(&four, at, sizeof four);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}

INLINE float32x4_t powers(uint32x4_t bytes) { /* POWER_BITS */
  const int32x4_t own = vreinterpretq_s32_u32(bytes), one = vdupq_n_s32(1);
  const int32x4_t few = vshlq_s32(vdupq_n_s32(0x200000), vminq_s32(own, one));
  return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(own, one), 23), few));
}

INLINE float32x4_t floats8(int16x4_t signed_bytes) { /* FLOAT8_BITS: the second bit is a sign, too */
  const uint16x4_t shifted = vreinterpret_u16_s16(vshl_n_s16(signed_bytes, 7));
  return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(shifted, vdup_n_u16(0xbfff))));
}

/* Of two numbers of 16 bits in each row. */
INLINE uint8x16_t points_at(const uint16_t *points, uint8x16_t numbers) {
  uint16_t each[8];
  vst1q_u16(each, vreinterpretq_u16_u8(numbers));
  for (int i = 0; i < 8; i++) each[i] = points[each[i]];
  return vreinterpretq_u8_u16(vld1q_u16(each));
}

INLINE int8x16_t four_of(const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

#include "tile.h"
