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
    void (*f32)(int64_t, const float *, const float *, int64_t, float *, int, float *);
    void (*f64)(int64_t, const double *, const double *, int64_t, double *, int, double *);
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

/* Packs strips of `strip` columns of a matrix, strip by strip, each row by row, filled with zeros. Its k rows are `step`
 * apart, its n columns `across`. */
#define PACK(name, type)                                                                                               \
    ALWAYS void name##_strip(                                                                                          \
        const type *from, int64_t step, int64_t across, int64_t k, int64_t here, int strip, type *to) {                \
        if (across == 1) {                                                                                             \
            for (int64_t p = 0; p < k; p++, to += strip, from += step) {                                               \
                for (int64_t i = 0; i < strip; i += 64 / sizeof(type)) __builtin_prefetch(from + strip + i);           \
                for (int64_t i = 0; i < here; i++) to[i] = from[i];                                                    \
                for (int64_t i = here; i < strip; i++) to[i] = 0;                                                      \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t at = 0; at < k; at += STEPS, to += STEPS * strip, from += STEPS * step) {                         \
            int64_t steps = least(STEPS, k - at);                                                                      \
            for (int64_t i = 0; i < here; i++)                                                                         \
                for (int64_t p = 0; p < steps; p++) to[p * strip + i] = from[p * step + i * across];                   \
            for (int64_t i = here; i < strip; i++)                                                                     \
                for (int64_t p = 0; p < steps; p++) to[p * strip + i] = 0;                                             \
        }                                                                                                              \
    }                                                                                                                  \
    ALWAYS void name##_part(const type *from, int64_t step, int64_t across, int64_t k, int64_t here, int strip, type *to, \
                            void (*turn)(const type *, int64_t, int64_t, int64_t, int64_t, type *)) {                  \
        int64_t at = turn && step == 1 && here == strip ? k - k % (64 / (int64_t)sizeof(type)) : 0;                    \
        if (at) turn(from, across, at, strip, strip, to);                                                              \
        from += at * step, to += at * strip, k -= at;                                                                  \
        switch (here) { /* the usual numbers as constants */                                                           \
        case 12: name##_strip(from, step, across, k, 12, strip, to); break;                                            \
        case 16: name##_strip(from, step, across, k, 16, strip, to); break;                                            \
        case 32: name##_strip(from, step, across, k, 32, strip, to); break;                                            \
        default: name##_strip(from, step, across, k, here, strip, to);                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    static void name(const type *from, int64_t step, int64_t across, int64_t k, int64_t n, int strip, type *to,        \
                     void (*turn)(const type *, int64_t, int64_t, int64_t, int64_t, type *)) {                         \
        int64_t depth = across == 1 ? SHALLOW : k; /* of these rows all columns, which lie side by side */             \
        for (int64_t p = 0; p < k; p += depth)                                                                         \
            for (int64_t j = 0; j < n; j += strip)                                                                     \
                name##_part(from + p * step + j * across, step, across, least(depth, k - p), least(strip, n - j),      \
                            strip, to + j * k + p * strip, turn);                                                      \
    }

#define CHAIN(suffix, type)                                                                                            \
    PACK(pack_##suffix, type)                                                                                          \
    typedef struct {                                                                                                   \
        const Product *p;                                                                                              \
        Tiles tiles;                                                                                                   \
        const type *w;                                                                                                 \
        type *b, *a, *sums; /* packed w, packed x, and the sums of the tree */                                         \
        int64_t i, m, j, n; /* the block: its first row and column, and how many it has */                             \
        int reads_w;                                                                                                   \
        int64_t depth;                                                                                                 \
    } Work_##suffix;                                                                                                   \
                                                                                                                       \
    /* What the first leaf begins with. */                                                                             \
    static void begin_##suffix(const Work_##suffix *o) {                                                               \
        const Product *p = o->p;                                                                                       \
        int64_t rows = o->tiles.rows, columns = o->tiles.columns, high = up(o->m, rows);                               \
        memset(o->sums, 0, (size_t)(high * up(o->n, columns)) * sizeof(type));                                         \
        for (int64_t c = 0; c < o->n; c++)                                                                             \
            for (int64_t r = 0; r < o->m; r++)                                                                         \
                o->sums[(c / columns * high + r) * columns + c % columns] =                                            \
                    p->adds ? ((type *)p->y)[(o->i + r) * p->y_step + o->j + c] : ((const type *)p->bias)[o->j + c];   \
    }                                                                                                                  \
                                                                                                                       \
    static void finish_##suffix(const Work_##suffix *o) {                                                              \
        int64_t rows = o->tiles.rows, columns = o->tiles.columns;                                                      \
        const type *sums = o->sums;                                                                                    \
        for (int64_t c = 0; c < o->n; c += columns)                                                                    \
            for (int64_t r = 0; r < up(o->m, rows); r++, sums += columns)                                              \
                if (r < o->m)                                                                                          \
                    memcpy((type *)o->p->y + (o->i + r) * o->p->y_step + o->j + c, sums,                               \
                           (size_t)least(columns, o->n - c) * sizeof(type));                                           \
    }                                                                                                                  \
                                                                                                                       \
    /* One leaf: chains from `begin` to `end`. Where there are sums before, they are added to these. */                \
    static void leaf_##suffix(const Work_##suffix *o, int64_t begin, int64_t end, type *sums, int fresh, type *before) { \
        const Product *p = o->p;                                                                                       \
        int64_t rows = o->tiles.rows, columns = o->tiles.columns, at = begin;                                          \
        do {                                                                                                           \
            int64_t depth = least(o->depth, end - at), tile = 0;                                                       \
            int is_last = at + depth == end;                                                                           \
            pack_##suffix((const type *)p->x + o->i * p->x_step + at * p->x_across, p->x_across, p->x_step, depth, o->m, \
                          o->tiles.rows, o->a, NULL);                                                                        \
            for (int64_t c = 0; c < o->n; c += columns) {                                                              \
                const type *from = o->w + at * p->w_step + c * p->w_across, *b = o->b;                                 \
                int is_read = o->reads_w && c + columns <= o->n;                                                       \
                if (is_read)                                                                                           \
                    b = from;                                                                                          \
                else if (packs_strips(p->m))                                                                          \
                    pack_##suffix(from, p->w_step, p->w_across, depth, least(columns, o->n - c), o->tiles.columns, o->b, \
                                  o->tiles.turn_##suffix);                                                              \
                else                                                                                                   \
                    b += c * p->k + at * columns;                                                                      \
                for (int64_t r = 0; r < o->m; r += rows, tile += rows * columns)                                       \
                    o->tiles.suffix(depth, o->a + r * depth, b, is_read ? p->w_step : columns, sums + tile,            \
                                    fresh && at == begin, is_last && before ? before + tile : NULL);                   \
            }                                                                                                          \
            at += depth;                                                                                               \
        } while (at < end);                                                                                            \
    }                                                                                                                  \
                                                                                                                       \
    static void block_##suffix(const Work_##suffix *o) {                                                               \
        const Product *p = o->p;                                                                                       \
        int64_t length = p->k / p->leaves, area = up(o->m, o->tiles.rows) * up(o->n, o->tiles.columns);                \
        int64_t top = 0, sizes[64];                                                                                    \
        for (int64_t leaf = 0; leaf < p->leaves; leaf++) {                                                             \
            int has_first = leaf == 0 && (p->bias || p->adds), is_last = leaf + 1 == p->leaves;                        \
            int merges = top && (sizes[top - 1] == 1 || is_last);                                                      \
            type *sums = o->sums + top * area;                                                                         \
            if (has_first) begin_##suffix(o);                                                                          \
            leaf_##suffix(o, leaf * length, (leaf + 1) * length, sums, !has_first, merges ? sums - area : NULL);       \
            if (merges)                                                                                                \
                sizes[top - 1]++;                                                                                      \
            else                                                                                                       \
                sizes[top++] = 1;                                                                                      \
            for (; top > 1 && (sizes[top - 2] == sizes[top - 1] || is_last); top--) {                                  \
                type *a = o->sums + (top - 2) * area, *b = a + area;                                                   \
                for (int64_t e = 0; e < area; e++) a[e] += b[e];                                                       \
                sizes[top - 2] += sizes[top - 1];                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void run_##suffix(const Product *p, type *scratch) {                                                        \
        const int64_t most = BYTES_ACROSS / sizeof(type), rows = rows_of_block(p->m);                                  \
        Work_##suffix o = {.p = p, .tiles = tiles_of(sizeof(type) == 8, p->m), .b = scratch};                                \
        o.reads_w = reads_w(p, o.tiles);                                                                               \
        o.depth = packs_strips(p->m) && p->w_across == 1 && p->w_step * (int64_t)sizeof(type) % 4096 == 0 ? SHALLOW : DEPTH; \
        o.a = o.b + packed_elements(p->m, p->n, p->k, most, o.tiles.columns);                                          \
        o.sums = o.a + up(rows, o.tiles.rows) * DEPTH;                                                                 \
        for (o.j = 0; o.j < p->n; o.j += most) {                                                                       \
            o.n = least(most, p->n - o.j), o.w = (const type *)p->w + o.j * p->w_across;                               \
            if (!packs_strips(p->m))                                                                                  \
                pack_##suffix(o.w, p->w_step, p->w_across, p->k, o.n, o.tiles.columns, o.b, o.tiles.turn_##suffix);    \
            for (o.i = 0; o.i < p->m; o.i += rows) {                                                                   \
                o.m = least(rows, p->m - o.i);                                                                         \
                block_##suffix(&o);                                                                                    \
                finish_##suffix(&o);                                                                                   \
            }                                                                                                          \
        }                                                                                                              \
    }

CHAIN(f32, float)
CHAIN(f64, double)

void chain_run(int32_t is_wide, const Product *p, void *scratch) {
    if (is_wide)
        run_f64(p, scratch);
    else
        run_f32(p, scratch);
}
