/* What the files of kernels share: numbers and half types. */
#pragma once
#include <stdint.h>

/* The kernels, the dtypes and the wires. The module exports these numbers. */
enum { COPY, ADD, PROD, MEAN, MAX, MIN, ENCODE, DECODE, DECODE_ADD };
enum { BYTE, FLOAT32, FLOAT64, BFLOAT16, UINT8, UINT16, UINT32, UINT64, COMPLEX64, COMPLEX128, FLOAT16, INT8, INT16, INT32, INT64 };
enum { WIRE_BFLOAT16, WIRE_FLOAT16, WIRE_INT8, WIRE_FP8, WIRE_INT4 };

#ifdef __FLT16_MAX__
#define HAS_FLOAT16 1
typedef _Float16 float16;
#else
#define HAS_FLOAT16 0
typedef uint16_t float16;
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE float widen(uint16_t x) {
    union { uint32_t bits; float number; } v = {(uint32_t)x << 16};
    return v.number;
}

INLINE uint16_t narrow(float x) { /* to the nearest even; a NaN must not round to infinity */
    union { float number; uint32_t bits; } v = {x};
    uint32_t rounded = (v.bits + (0x7FFF + ((v.bits >> 16) & 1))) >> 16;
    return (v.bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)rounded;
}

int is_half(int32_t dtype);

/* c = kernel(a, b) of a half type, computed in float32. Bit k of `wide`: operand k, of two and the result, is float32. */
void half_run(
    int32_t kernel, int32_t dtype, int32_t wide, const char *a, const char *b, char *c, int64_t count, float by);
