/* See kernels.h. Integers wrap, so signed ones are added as unsigned ones. Compiled without contraction of a * b + c. */
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

static inline float widen(uint16_t x) {
    union { uint32_t bits; float number; } v = {(uint32_t)x << 16};
    return v.number;
}

static inline uint16_t narrow(float x) { /* to the nearest even; a NaN must not round to infinity */
    union { float number; uint32_t bits; } v = {x};
    uint32_t rounded = (v.bits + (0x7FFF + ((v.bits >> 16) & 1))) >> 16;
    return (v.bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)rounded;
}

#define COMBINE(name, type, expression)                                                 \
    FAST static void name(const type *a, const type *b, type *c, int64_t n, type by) { \
        (void)by;                                                                       \
        for (int64_t i = 0; i < n; i++) c[i] = (type)(expression);                      \
    }
#define NUMBERS(type, suffix)                          \
    COMBINE(add_##suffix, type, a[i] + b[i])           \
    COMBINE(prod_##suffix, type, a[i] * b[i])
NUMBERS(float, f32)
NUMBERS(double, f64)
NUMBERS(uint8_t, u8)
NUMBERS(uint16_t, u16)
NUMBERS(uint32_t, u32)
NUMBERS(uint64_t, u64)
COMBINE(mean_f32, float, (a[i] + b[i]) / by)
COMBINE(mean_f64, double, (a[i] + b[i]) / by)

FAST static void half(int32_t kernel, const uint16_t *a, const uint16_t *b, uint16_t *c, int64_t n, float by) {
    if (kernel == ADD)
        for (int64_t i = 0; i < n; i++) c[i] = narrow(widen(a[i]) + widen(b[i]));
    else if (kernel == PROD)
        for (int64_t i = 0; i < n; i++) c[i] = narrow(widen(a[i]) * widen(b[i]));
    else
        for (int64_t i = 0; i < n; i++) c[i] = narrow((widen(a[i]) + widen(b[i])) / by);
}

int64_t kernel_width(int32_t kernel, int32_t dtype, int32_t divisor) {
    static const int64_t widths[] = {1, 4, 8, 2, 1, 2, 4, 8, 8, 16};
    if (kernel < COPY || kernel > MEAN || dtype < BYTE || dtype > COMPLEX128) return 0;
    if (kernel == COPY) return dtype == BYTE ? 1 : 0;
    if (dtype == BYTE || (kernel == PROD && dtype >= COMPLEX64)) return 0;
    if (kernel == MEAN && (divisor < 1 || (dtype >= UINT8 && dtype <= UINT64))) return 0;
    return widths[dtype];
}

#define RUN(name, type, n) name((const type *)a, (const type *)b, (type *)c, n, (type)divisor)
#define ADD_OR_PROD(type, suffix) \
    (kernel == ADD ? RUN(add_##suffix, type, count) : RUN(prod_##suffix, type, count))

void kernel_run(int32_t kernel, int32_t dtype, int32_t divisor, const char *a, const char *b, char *c, int64_t count) {
    int is_mean = kernel == MEAN;
    if (kernel == COPY) {
        memcpy(c, a, (size_t)count);
        return;
    }
    switch (dtype) {
    case COMPLEX64: count *= 2; /* fall through */
    case FLOAT32: is_mean ? RUN(mean_f32, float, count) : ADD_OR_PROD(float, f32); break;
    case COMPLEX128: count *= 2; /* fall through */
    case FLOAT64: is_mean ? RUN(mean_f64, double, count) : ADD_OR_PROD(double, f64); break;
    case BFLOAT16: half(kernel, (const uint16_t *)a, (const uint16_t *)b, (uint16_t *)c, count, (float)divisor); break;
    case UINT8: ADD_OR_PROD(uint8_t, u8); break;
    case UINT16: ADD_OR_PROD(uint16_t, u16); break;
    case UINT32: ADD_OR_PROD(uint32_t, u32); break;
    case UINT64: ADD_OR_PROD(uint64_t, u64); break;
    }
}
