/* The kernels of wires (fompi.base.wires) on contiguous memory. Their bits are those of fompi.backends.wires.
 *
 * A block is taken run by run: RUN elements as float32, their scale, their codes.
 */
#include "wire.h"

#include <string.h>

#include "half.h"

#define RUN 64

static const int bits_of[] = {16, 16, 8, 8, 4};
static const float top_of[] = {0, 0, 127, 448, 7};

int wire_has(int32_t dtype) { return dtype == FLOAT32 || dtype == BFLOAT16 || (dtype == FLOAT16 && HAS_FLOAT16); }

int64_t wire_nbytes(int32_t wire, int64_t count) {
    if (wire < WIRE_BFLOAT16 || wire > WIRE_INT4 || (wire == WIRE_FLOAT16 && !HAS_FLOAT16)) return -1;
    int64_t scales = top_of[wire] > 0 ? 4 * ((count + RUN - 1) / RUN) : 0;
    return scales + (count * bits_of[wire] + 31) / 32 * 4;
}

/* Elements `at` to `at + n - 1` as float32. */
INLINE void load(int32_t dtype, const char *from, int64_t at, float *x, int n) {
    if (dtype == FLOAT32) memcpy(x, (const float *)from + at, (size_t)n * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) x[i] = widen(((const uint16_t *)from)[at + i]);
    else
        for (int i = 0; i < n; i++) x[i] = (float)((const float16 *)from)[at + i];
}

INLINE void store(int32_t dtype, char *to, int64_t at, const float *x, int n) {
    if (dtype == FLOAT32) memcpy((float *)to + at, x, (size_t)n * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int i = 0; i < n; i++) ((uint16_t *)to)[at + i] = narrow(x[i]);
    else
        for (int i = 0; i < n; i++) ((float16 *)to)[at + i] = (float16)x[i];
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define LARGEST 0x7F7FFFF8 /* that of fompi.base.wires */

/* The scale of a run: NaN if it has a NaN or an infinity. As bits, a NaN is larger than an infinity, and that than all. */
INLINE float scale_of(const float *x, float top) {
    uint32_t largest = 0;
    for (int i = 0; i < RUN; i++) {
        uint32_t bits = bits_of_float(x[i]) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return largest >= 0x7F800000 ? float_of_bits(0x7FC00000) : float_of_bits(largest > LARGEST ? LARGEST : largest) / top;
}

INLINE float rounded(float x, float top) { /* to the nearest even */
    x = __builtin_rintf(x);
    x = x > top ? top : x;
    return x < -top ? -top : x;
}

INLINE uint8_t fp8_of(float x) {
    uint32_t bits = bits_of_float(x), size = bits & 0x7FFFFFFF;
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(float_of_bits(size < 0x3C800000 ? size : 0) * 512.0f); /* below 2^-6 */
    uint32_t normal = ((size + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    normal = (int32_t)normal > 0x7E ? 0x7E : normal;
    return (uint8_t)((bits >> 24 & 0x80) | (size < 0x3C800000 ? small : normal));
}

INLINE float of_fp8(uint8_t code) {
    uint32_t sign = (uint32_t)(code & 0x80) << 24;
    float small = (float)(code & 7) * 0x1p-9f, normal = float_of_bits(((uint32_t)(code & 0x7F) + (120 << 3)) << 20);
    float size = code & 0x78 ? normal : small;
    return float_of_bits(bits_of_float(size) | sign);
}

/* The codes of a run whose scale is usable, at most RUN bytes. */
INLINE void codes_of(int32_t wire, const float *x, float scale, uint8_t *codes) {
    if (wire == WIRE_INT8) {
        for (int i = 0; i < RUN; i++) codes[i] = (uint8_t)(int8_t)(int32_t)rounded(x[i] / scale, 127.0f);
    } else if (wire == WIRE_FP8) {
        for (int i = 0; i < RUN; i++) codes[i] = fp8_of(x[i] / scale);
    } else {
        uint8_t each[RUN];
        for (int i = 0; i < RUN; i++) each[i] = (uint8_t)((int8_t)(int32_t)rounded(x[i] / scale, 7.0f) & 15);
        for (int i = 0; i < RUN / 2; i++) codes[i] = (uint8_t)(each[2 * i] | each[2 * i + 1] << 4);
    }
}

INLINE void numbers_of(int32_t wire, const uint8_t *codes, float scale, float *x) {
    if (wire == WIRE_INT8) {
        for (int i = 0; i < RUN; i++) x[i] = (float)(int8_t)codes[i] * scale;
    } else if (wire == WIRE_FP8) {
        for (int i = 0; i < RUN; i++) x[i] = of_fp8(codes[i]) * scale;
    } else {
        for (int i = 0; i < RUN / 2; i++) {
            x[2 * i] = (float)((int8_t)(codes[i] << 4) >> 4) * scale;
            x[2 * i + 1] = (float)((int8_t)codes[i] >> 4) * scale;
        }
    }
}

INLINE void encode(int32_t wire, int32_t dtype, const char *a, char *m, int64_t count) {
    int64_t runs = (count + RUN - 1) / RUN;
    int each = RUN * bits_of[wire] / 8;
    float *scales = (float *)m;
    uint8_t *codes = (uint8_t *)m + 4 * runs, last[RUN];
    for (int64_t r = 0; r < runs; r++) {
        float x[RUN];
        int n = count - r * RUN < RUN ? (int)(count - r * RUN) : RUN;
        if (n < RUN) memset(x, 0, sizeof x);
        load(dtype, a, r * RUN, x, n);
        float scale = scale_of(x, top_of[wire]);
        scales[r] = scale;
        uint8_t *to = n < RUN ? last : codes + r * each;
        if (scale > 0) codes_of(wire, x, scale, to);
        else memset(to, 0, (size_t)each);
        if (n < RUN) memcpy(codes + r * each, last, ((size_t)n * (size_t)bits_of[wire] + 31) / 32 * 4);
    }
}

/* c = m, or c = m + b. */
INLINE void decode(int32_t wire, int32_t from, int32_t to, const char *m, const char *b, char *c, int64_t count) {
    int64_t runs = (count + RUN - 1) / RUN;
    int each = RUN * bits_of[wire] / 8;
    const float *scales = (const float *)m;
    const uint8_t *codes = (const uint8_t *)m + 4 * runs;
    for (int64_t r = 0; r < runs; r++) {
        float x[RUN], y[RUN];
        uint8_t last[RUN];
        const uint8_t *of = codes + r * each;
        int n = count - r * RUN < RUN ? (int)(count - r * RUN) : RUN;
        if (n < RUN) of = memcpy(last, of, ((size_t)n * (size_t)bits_of[wire] + 31) / 32 * 4);
        numbers_of(wire, of, scales[r], x);
        if (b != NULL) {
            load(from, b, r * RUN, y, n);
            if (n == RUN)
                for (int i = 0; i < RUN; i++) x[i] += y[i];
            else
                for (int i = 0; i < n; i++) x[i] += y[i];
        }
        store(to, c, r * RUN, x, n);
    }
}

/* What is finite stays finite: it is cut where rounding would make it infinite. */
static void encode_bfloat16(const float *a, uint16_t *m, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of_float(a[i]);
        m[i] = narrow(float_of_bits((bits & 0x7FFFFFFF) - 0x7F7F8000 < 0x8000 ? bits & 0xFFFF0000 : bits));
    }
}

/* The wires without scales are half types. */
static void run_half(int32_t kernel, int32_t wire, int32_t from, int32_t to, const char *a, const char *b, char *c, int64_t count) {
    int32_t half = wire == WIRE_BFLOAT16 ? BFLOAT16 : FLOAT16;
    int32_t wide = kernel == ENCODE ? 3 : kernel == DECODE ? 4 : 6; /* bits: which operands are float32 */
    (void)from, (void)to;                                           /* both are float32 */
    if (kernel == ENCODE && wire == WIRE_BFLOAT16) encode_bfloat16((const float *)a, (uint16_t *)c, count);
    else half_run(kernel == DECODE_ADD ? ADD : COPY, half, wide, a, kernel == DECODE_ADD ? b : a, c, count, 1);
    if (kernel == ENCODE) memset(c + 2 * count, 0, (size_t)(wire_nbytes(wire, count) - 2 * count));
}

#define ENCODES(wire, dtype) \
    static void encode_##wire##_##dtype(const char *a, char *m, int64_t n) { encode(wire, dtype, a, m, n); }
#define DECODES(wire, from, to)                                                                          \
    static void decode_##wire##_##from##_##to(const char *m, const char *b, char *c, int64_t n) { \
        decode(wire, from, to, m, b, c, n);                                                              \
    }
#define EACH_DTYPE(each, wire) each(wire, FLOAT32) each(wire, BFLOAT16) each(wire, FLOAT16)
#define ALL(wire) EACH_DTYPE(ENCODES, wire) DECODES(wire, FLOAT32, FLOAT32)
ALL(WIRE_INT8) ALL(WIRE_FP8) ALL(WIRE_INT4)

static void decode_any(int32_t wire, int32_t from, int32_t to, const char *m, const char *b, char *c, int64_t n) {
    decode(wire, from, to, m, b, c, n);
}

void wire_run(int32_t kernel, int32_t wire, int32_t from, int32_t to, const char *a, const char *b, char *c, int64_t count) {
    const char *other = kernel == DECODE_ADD ? b : NULL;
    int is_wide = to == FLOAT32 && (kernel == DECODE || from == FLOAT32);
    if (wire <= WIRE_FLOAT16) {
        run_half(kernel, wire, from, to, a, b, c, count);
    } else if (kernel == ENCODE) {
#define CASE(wire, dtype) case 16 * wire + dtype: encode_##wire##_##dtype(a, c, count); break;
        switch (16 * wire + from) {
            EACH_DTYPE(CASE, WIRE_INT8) EACH_DTYPE(CASE, WIRE_FP8) EACH_DTYPE(CASE, WIRE_INT4)
        }
    } else if (is_wide) {
        switch (wire) {
        case WIRE_INT8: decode_WIRE_INT8_FLOAT32_FLOAT32(a, other, c, count); break;
        case WIRE_FP8: decode_WIRE_FP8_FLOAT32_FLOAT32(a, other, c, count); break;
        case WIRE_INT4: decode_WIRE_INT4_FLOAT32_FLOAT32(a, other, c, count); break;
        }
    } else {
        decode_any(wire, from, to, a, other, c, count);
    }
}
