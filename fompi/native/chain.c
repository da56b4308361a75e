/* See chain.h. Blocks of x and w are packed as in GotoBLAS (Goto, van de Geijn 2008), and a block of sums is a row of
 * tiles that lie one after the other. Tiles at an edge are filled with zeros, which no other element sees.
 */
#include "chain.h"

#include <math.h>
#include <string.h>

#include "processor.h"

enum {
    ROWS_OF_BLOCK = 96, BYTES_ACROSS = 4096, /* of a block of sums: those of some leaves stay in the second cache */
    DEPTH = 192,        /* steps of the chains between two loads of the sums */
    SHALLOW = 32,       /* where rows of w are read that are a multiple of a page apart: more of them evict each other */
    ROWS_AT_ONCE = 256, /* this many are one block: each strip of w is packed when it is used, and lies in the nearest cache */
    STEPS = 16
};

#define ALWAYS static inline __attribute__((always_inline))

/* tile[i][j]: a chain along k, begun with what the tile holds, or with 0 if it is `fresh`. a is packed column by column,
 * the rows of b are `step` apart. Where there is a sum before, tile is left alone and the chain is added to that. */
#define TILE(name, target, type, vector, load, store, spread, multiply_add, add, rows, vectors)                        \
    target static void name(                                                                                           \
        int64_t k, const type *a, const type *b, int64_t step, type *tile, int fresh, type *before) {                  \
        enum { WIDTH = sizeof(vector) / sizeof(type) };                                                                \
        vector sums[rows][vectors];                                                                                    \
        _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++)                                                        \
            _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++)                                                 \
                sums[i][v] = fresh ? spread(0) : load(tile + (i * vectors + v) * WIDTH);                               \
        for (int64_t p = 0; p < k; p++, a += rows, b += step) {                                                        \
            vector of_b[vectors];                                                                                      \
            _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {                                               \
                of_b[v] = load(b + v * WIDTH);                                                                         \
                if (rows > 1 && step != vectors * WIDTH)                                                               \
                    __builtin_prefetch(b + (vectors + v) * WIDTH); /* for the next tile, in memory */                  \
            }                                                                                                          \
            _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++) {                                                  \
                vector of_a = spread(a[i]);                                                                            \
                _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++)                                             \
                    sums[i][v] = multiply_add(of_a, of_b[v], sums[i][v]);                                              \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int i = 0; i < rows; i++)                                                        \
            _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {                                               \
                int64_t at = (i * vectors + v) * WIDTH;                                                                \
                if (before)                                                                                            \
                    store(before + at, add(load(before + at), sums[i][v]));                                            \
                else                                                                                                   \
                    store(tile + at, sums[i][v]);                                                                      \
            }                                                                                                          \
    }

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2,fma")))
TILE(f32_avx512, AVX512, float, __m512, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps, 12, 2)
TILE(f64_avx512, AVX512, double, __m512d, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_set1_pd, _mm512_fmadd_pd, _mm512_add_pd, 12, 2)
TILE(f32_avx512_1, AVX512, float, __m512, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps, 1, 2)
TILE(f64_avx512_1, AVX512, double, __m512d, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_set1_pd, _mm512_fmadd_pd, _mm512_add_pd, 1, 2)
TILE(f32_avx512_4, AVX512, float, __m512, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps, 4, 4)
TILE(f64_avx512_4, AVX512, double, __m512d, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_set1_pd, _mm512_fmadd_pd, _mm512_add_pd, 4, 4)
TILE(f32_avx2_1, AVX2, float, __m256, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps, 1, 2)
TILE(f64_avx2_1, AVX2, double, __m256d, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_set1_pd, _mm256_fmadd_pd, _mm256_add_pd, 1, 2)
TILE(f32_avx2, AVX2, float, __m256, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps, 6, 2)
TILE(f64_avx2, AVX2, double, __m256d, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_set1_pd, _mm256_fmadd_pd, _mm256_add_pd, 6, 2)
#endif

/* Rows of `to`, `strip` apart, from columns, `across` apart: square by square of as many rows and columns as a vector has
 * lanes. Each exchange swaps a bit of the row with one of the column (Eklundh 1972). */
#if defined(__x86_64__)
#define EXCHANGE(permute, d)                                                                                           \
    _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; i++) if (!(i & d)) {                                           \
        of = square[i];                                                                                                \
        square[i] = permute(of, low[d], square[i + d]), square[i + d] = permute(of, high[d], square[i + d]);           \
    }
#define TURN(name, type, integer, vector, load, store, load_lanes, permute)                                            \
    AVX512 static void name(const type *from, int64_t across, int64_t k, int64_t n, int64_t strip, type *to) {         \
        enum { WIDTH = 64 / sizeof(type) };                                                                            \
        __m512i low[WIDTH / 2 + 1], high[WIDTH / 2 + 1];                                                               \
        for (int d = 1; d < WIDTH; d *= 2) {                                                                           \
            integer lanes[2][WIDTH];                                                                                   \
            for (int i = 0; i < WIDTH; i++)                                                                            \
                lanes[0][i] = i & d ? (i ^ d) + WIDTH : i, lanes[1][i] = i & d ? i + WIDTH : i ^ d;                    \
            low[d] = load_lanes(lanes[0]), high[d] = load_lanes(lanes[1]);                                             \
        }                                                                                                              \
        for (int64_t at = 0; at < k; at += WIDTH)                                                                      \
            for (int64_t j = 0; j < n; j += WIDTH) {                                                                   \
                vector square[WIDTH], of;                                                                              \
                _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; i++)                                               \
                    square[i] = load(from + (j + i) * across + at);                                                    \
                EXCHANGE(permute, 1) EXCHANGE(permute, 2) EXCHANGE(permute, 4)                                         \
                if (WIDTH == 16) { EXCHANGE(permute, (WIDTH / 2)) }                                                    \
                _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; i++)                                               \
                    store(to + (at + i) * strip + j, square[i]);                                                       \
            }                                                                                                          \
    }
TURN(turn_f32, float, int32_t, __m512, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_loadu_si512, _mm512_permutex2var_ps)
TURN(turn_f64, double, int64_t, __m512d, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_loadu_si512, _mm512_permutex2var_pd)
#endif

/* Without these, fma of C: an instruction on processors that have it, exact in any case. */
#define LOAD(at) (*(at))
#define STORE(at, value) (*(at) = (value))
#define SAME(value) (value)
#define PLUS(a, b) ((a) + (b))
TILE(f32_plain, , float, float, LOAD, STORE, SAME, fmaf, PLUS, 4, 8)
TILE(f64_plain, , double, double, LOAD, STORE, SAME, fma, PLUS, 4, 8)

typedef struct {
    int rows, columns; /* of a tile */
    void (*tile_f32)(int64_t, const float *, const float *, int64_t, float *, int, float *);
    void (*tile_f64)(int64_t, const double *, const double *, int64_t, double *, int, double *);
    void (*turn_f32)(const float *, int64_t, int64_t, int64_t, int64_t, float *); /* or NULL */
    void (*turn_f64)(const double *, int64_t, int64_t, int64_t, int64_t, double *);
} Tiles;

/* One row, or a few, have tiles of their own: the time is that of reading w. */
static Tiles tiles_of(int32_t is_wide, int64_t m) {
#if defined(__x86_64__)
    if (processor_level() == AVX_512) {
        if (m == 1) return (Tiles){1, is_wide ? 16 : 32, f32_avx512_1, f64_avx512_1, turn_f32, turn_f64};
        if (m <= 4) return (Tiles){4, is_wide ? 32 : 64, f32_avx512_4, f64_avx512_4, turn_f32, turn_f64};
        return (Tiles){12, is_wide ? 16 : 32, f32_avx512, f64_avx512, turn_f32, turn_f64};
    }
    if (processor_level() >= X86_64_V3) {
        if (m == 1) return (Tiles){1, is_wide ? 8 : 16, f32_avx2_1, f64_avx2_1, NULL, NULL};
        return (Tiles){6, is_wide ? 8 : 16, f32_avx2, f64_avx2, NULL, NULL};
    }
#endif
    return (Tiles){4, 8, f32_plain, f64_plain, NULL, NULL};
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* How many sums a tree over `leaves` leaves has at a time, besides the leaf that is computed. */
static int64_t most_sums(int64_t leaves) {
    int64_t most = 1;
    for (; leaves; leaves >>= 1) most++;
    return most;
}

/* Few rows: w is read where it lies, but for the last columns, which do not fill a tile. */
static int reads_w(const Product *p, Tiles tiles) { return p->w_across == 1 && p->m <= tiles.rows; }

static int packs_strips(int64_t m) { return m <= ROWS_AT_ONCE; }
static int64_t rows_of_block(int64_t m) { return packs_strips(m) ? m : ROWS_OF_BLOCK; }

static int64_t packed_elements(int64_t m, int64_t n, int64_t k, int64_t most, int columns) {
    return packs_strips(m) ? (int64_t)columns * DEPTH : up(least(n, most), columns) * k;
}

int64_t chain_scratch(int32_t is_wide, int64_t m, int64_t n, int64_t k, int64_t leaves) {
    Tiles tiles = tiles_of(is_wide, m);
    int64_t width = is_wide ? 8 : 4, most = BYTES_ACROSS / width, rows = up(rows_of_block(m), tiles.rows);
    int64_t sums = rows * up(least(n, most), tiles.columns) * most_sums(leaves);
    return (packed_elements(m, n, k, most, tiles.columns) + rows * DEPTH + sums) * width;
}

#define TYPE float
#define OF(name) name##_f32
#include "chain_type.h"
#undef TYPE
#undef OF
#define TYPE double
#define OF(name) name##_f64
#include "chain_type.h"

void chain_run(int32_t is_wide, const Product *p, void *scratch) {
    if (is_wide)
        run_f64(p, scratch);
    else
        run_f32(p, scratch);
}
