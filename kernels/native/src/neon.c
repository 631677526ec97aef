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

INLINE int8x16_t four_of(const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

#include "tile.h"
