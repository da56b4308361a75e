/* See kernels.h. Integers wrap, so signed ones are added as unsigned ones. Compiled without contraction of a * b + c.
 *
 * A maximum is NaN where a term is: the first one. Of zeros with two signs it is the second term, as with NumPy on x86.
 */
#include "kernels.h"

#include <string.h>

#include "half.h"
#include "wire.h"

#define COMBINE(name, type, expression)                                                 \
    static void name(const type *a, const type *b, type *c, int64_t n, type by) { \
        (void)by;                                                                       \
        for (int64_t i = 0; i < n; i++) c[i] = (type)(expression);                      \
    }
#define NUMBERS(type, suffix)                          \
    COMBINE(add_##suffix, type, a[i] + b[i])           \
    COMBINE(prod_##suffix, type, a[i] * b[i])
#define ORDERED(type, suffix)                                              \
    COMBINE(max_##suffix, type, a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]) \
    COMBINE(min_##suffix, type, a[i] < b[i] || a[i] != a[i] ? a[i] : b[i])
NUMBERS(float, f32) ORDERED(float, f32)
NUMBERS(double, f64) ORDERED(double, f64)
NUMBERS(uint8_t, u8) ORDERED(uint8_t, u8) ORDERED(int8_t, i8)
NUMBERS(uint16_t, u16) ORDERED(uint16_t, u16) ORDERED(int16_t, i16)
NUMBERS(uint32_t, u32) ORDERED(uint32_t, u32) ORDERED(int32_t, i32)
NUMBERS(uint64_t, u64) ORDERED(uint64_t, u64) ORDERED(int64_t, i64)
COMBINE(mean_f32, float, (a[i] + b[i]) / by)
COMBINE(mean_f64, double, (a[i] + b[i]) / by)

static int64_t width_of(int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, int k) {
    static const int64_t widths[] = {1, 4, 8, 2, 1, 2, 4, 8, 8, 16, 2, 1, 2, 4, 8};
    int is_complex = dtype == COMPLEX64 || dtype == COMPLEX128, is_ordering = kernel == MAX || kernel == MIN;
    if (kernel < COPY || kernel > MIN || dtype < BYTE || dtype > INT64) return 0;
    if (kernel == COPY && dtype == BYTE) return !wide;
    if (dtype == BYTE || (kernel == COPY && !is_half(dtype)) || (is_complex && (kernel == PROD || is_ordering))) return 0;
    if (dtype >= INT8 && !is_ordering) return 0;
    if (kernel == MEAN && (divisor < 1 || (dtype >= UINT8 && dtype <= UINT64))) return 0;
    if (wide < 0 || wide > 7 || (wide && !is_half(dtype)) || (dtype == FLOAT16 && !HAS_FLOAT16)) return 0;
    return wide >> k & 1 ? 4 : widths[dtype];
}

/* Operand k of a kernel of a wire: m of a DECODE has no elements. */
static int64_t wire_operand(int32_t kernel, int32_t wire, int32_t dtypes, int k, int64_t count) {
    static const int64_t widths[] = {1, 4, 8, 2, 1, 2, 4, 8, 8, 16, 2};
    int is_m = kernel == ENCODE ? k == 2 : k == 0 || (kernel == DECODE && k == 1);
    int32_t dtype = dtypes >> 4 * k & 15;
    if (is_m) return wire_nbytes(wire, count);
    return wire_has(dtype) ? widths[dtype] * count : -1;
}

int64_t kernel_nbytes(int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, int k, int64_t count) {
    if (kernel >= ENCODE && kernel <= DECODE_ADD) return wire_operand(kernel, dtype, wide, k, count);
    int64_t width = width_of(kernel, dtype, divisor, wide, k);
    return width ? width * count : -1;
}

#define APPLY(name, type, n) name((const type *)a, (const type *)b, (type *)c, n, (type)divisor)
#define MAX_OR_MIN(type, suffix) (kernel == MAX ? APPLY(max_##suffix, type, count) : APPLY(min_##suffix, type, count))
#define ANY(type, suffix)                         \
    (kernel == ADD    ? APPLY(add_##suffix, type, count)  \
     : kernel == PROD ? APPLY(prod_##suffix, type, count) \
                      : MAX_OR_MIN(type, suffix))

static void run_of_wire(int32_t kernel, int32_t wire, int32_t dtypes, const char *a, const char *b, char *c, int64_t count) {
    wire_run(kernel, wire, kernel == DECODE_ADD ? dtypes >> 4 & 15 : dtypes & 15, dtypes >> 8 & 15, a, b, c, count);
}

void kernel_run(
    int32_t kernel, int32_t dtype, int32_t divisor, int32_t wide, const char *a, const char *b, char *c, int64_t count) {
    if (kernel > MIN) {
        run_of_wire(kernel, dtype, wide, a, b, c, count);
        return;
    }
    int is_mean = kernel == MEAN;
    if (kernel == COPY && dtype == BYTE) {
        if (c != a) memcpy(c, a, (size_t)count);
        return;
    }
    switch (dtype) {
    case COMPLEX64: count *= 2; /* fall through */
    case FLOAT32: is_mean ? APPLY(mean_f32, float, count) : ANY(float, f32); break;
    case COMPLEX128: count *= 2; /* fall through */
    case FLOAT64: is_mean ? APPLY(mean_f64, double, count) : ANY(double, f64); break;
    case BFLOAT16: /* fall through */
    case FLOAT16: half_run(kernel, dtype, wide, a, b, c, count, (float)divisor); break;
    case UINT8: ANY(uint8_t, u8); break;
    case UINT16: ANY(uint16_t, u16); break;
    case UINT32: ANY(uint32_t, u32); break;
    case UINT64: ANY(uint64_t, u64); break;
    case INT8: MAX_OR_MIN(int8_t, i8); break;
    case INT16: MAX_OR_MIN(int16_t, i16); break;
    case INT32: MAX_OR_MIN(int32_t, i32); break;
    case INT64: MAX_OR_MIN(int64_t, i64); break;
    }
}
