/* Sums of half types: in float32, rounded once. See half.h. */
#include "half.h"

INLINE float combined(int32_t kernel, float a, float b, float by) {
    if (kernel == MAX) return a > b || a != a ? a : b;
    if (kernel == MIN) return a < b || a != a ? a : b;
    return kernel == COPY ? a : kernel == ADD ? a + b : kernel == PROD ? a * b : (a + b) / by;
}

/* The switch makes a loop without branches for each kernel and each choice of wide operands. */
#define LOOPS(loop, kernel) \
    LOOP(loop, kernel, 0) LOOP(loop, kernel, 1) LOOP(loop, kernel, 2) LOOP(loop, kernel, 3) \
    LOOP(loop, kernel, 4) LOOP(loop, kernel, 5) LOOP(loop, kernel, 6) LOOP(loop, kernel, 7)
#define LOOP(loop, kernel, wide) \
    case 8 * kernel + wide: loop(kernel, wide, a, b, c, n, by); break;
#define HALF(name, type, to_float, from_float)                                                                         \
    INLINE void name##_loop(                                                                                           \
        int32_t kernel, int32_t wide, const char *a, const char *b, char *c, int64_t n, float by) {                    \
        _Pragma("GCC ivdep") /* c may be a or b, but nothing between */                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            float x = wide & 1 ? ((const float *)a)[i] : to_float(((const type *)a)[i]);                               \
            float y = wide & 2 ? ((const float *)b)[i] : to_float(((const type *)b)[i]);                               \
            float z = combined(kernel, x, y, by);                                                                      \
            if (wide & 4)                                                                                              \
                ((float *)c)[i] = z;                                                                                   \
            else                                                                                                       \
                ((type *)c)[i] = from_float(z);                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    static void name(int32_t kernel, int32_t wide, const char *a, const char *b, char *c, int64_t n, float by) {  \
        switch (8 * kernel + wide) { LOOPS(name##_loop, COPY) LOOPS(name##_loop, ADD) LOOPS(name##_loop, PROD)         \
                                     LOOPS(name##_loop, MEAN) LOOPS(name##_loop, MAX) LOOPS(name##_loop, MIN) }                                                        \
    }
HALF(half_bf16, uint16_t, widen, narrow)
#define FLOAT_OF(x) ((float)(x))
#define FLOAT16_OF(x) ((float16)(x))
HALF(half_f16, float16, FLOAT_OF, FLOAT16_OF)

#if HAS_FLOAT16 && defined(IS_V3)
/* GCC makes no vectors of conversions of float16. So they are made here, a block at a time: the sums are those of float32. */
#include <immintrin.h>
#define BLOCK 512

static void widen_f16(const float16 *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = (float)from[i];
}

static void narrow_f16(const float *from, float16 *to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) to[i] = (float16)from[i];
}

static void blocks_f16(int32_t kernel, int32_t wide, const char *a, const char *b, char *c, int64_t n, float by) {
    float x[BLOCK], y[BLOCK], z[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t count = n - at < BLOCK ? n - at : BLOCK;
        if (!(wide & 1)) widen_f16((const float16 *)a + at, x, count);
        if (!(wide & 2) && kernel != COPY) widen_f16((const float16 *)b + at, y, count);
        half_f16(kernel, 7, wide & 1 ? a + 4 * at : (char *)x, wide & 2 ? b + 4 * at : (char *)y,
                 wide & 4 ? c + 4 * at : (char *)z, count, by);
        if (!(wide & 4)) narrow_f16(z, (float16 *)c + at, count);
    }
}
#else
#define blocks_f16 half_f16
#endif

int is_half(int32_t dtype) { return dtype == BFLOAT16 || (dtype == FLOAT16 && HAS_FLOAT16); }

void half_run(
    int32_t kernel, int32_t dtype, int32_t wide, const char *a, const char *b, char *c, int64_t count, float by) {
    (dtype == BFLOAT16 ? half_bf16 : blocks_f16)(kernel, wide, a, b, c, count, by);
}
