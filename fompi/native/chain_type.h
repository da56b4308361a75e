/* The loops of chain.c for elements of one TYPE. chain.c includes this once for each; OF(name) is the name for this one. */

/* Packs strips of `strip` columns of a matrix, strip by strip, each row by row, filled with zeros. Its k rows are `step`
 * apart, its n columns `across`. */
ALWAYS void OF(strip)(
    const TYPE *from, int64_t step, int64_t across, int64_t k, int64_t here, int strip, TYPE *to) {
    if (across == 1) {
        for (int64_t p = 0; p < k; p++, to += strip, from += step) {
            for (int64_t i = 0; i < strip; i += 64 / sizeof(TYPE)) __builtin_prefetch(from + strip + i);
            for (int64_t i = 0; i < here; i++) to[i] = from[i];
            for (int64_t i = here; i < strip; i++) to[i] = 0;
        }
        return;
    }
    for (int64_t at = 0; at < k; at += STEPS, to += STEPS * strip, from += STEPS * step) {
        int64_t steps = least(STEPS, k - at);
        for (int64_t i = 0; i < here; i++)
            for (int64_t p = 0; p < steps; p++) to[p * strip + i] = from[p * step + i * across];
        for (int64_t i = here; i < strip; i++)
            for (int64_t p = 0; p < steps; p++) to[p * strip + i] = 0;
    }
}

ALWAYS void OF(part)(const TYPE *from, int64_t step, int64_t across, int64_t k, int64_t here, int strip, TYPE *to,
                     void (*turn)(const TYPE *, int64_t, int64_t, int64_t, int64_t, TYPE *)) {
    int64_t at = turn && step == 1 && here == strip ? k - k % (64 / (int64_t)sizeof(TYPE)) : 0;
    if (at) turn(from, across, at, strip, strip, to);
    from += at * step, to += at * strip, k -= at;
    switch (here) { /* the usual numbers as constants */
    case 12: OF(strip)(from, step, across, k, 12, strip, to); break;
    case 16: OF(strip)(from, step, across, k, 16, strip, to); break;
    case 32: OF(strip)(from, step, across, k, 32, strip, to); break;
    default: OF(strip)(from, step, across, k, here, strip, to);
    }
}

static void OF(pack)(const TYPE *from, int64_t step, int64_t across, int64_t k, int64_t n, int strip, TYPE *to,
                     void (*turn)(const TYPE *, int64_t, int64_t, int64_t, int64_t, TYPE *)) {
    int64_t depth = across == 1 ? SHALLOW : k; /* of these rows all columns, which lie side by side */
    for (int64_t p = 0; p < k; p += depth)
        for (int64_t j = 0; j < n; j += strip)
            OF(part)(from + p * step + j * across, step, across, least(depth, k - p), least(strip, n - j),
                     strip, to + j * k + p * strip, turn);
}

typedef struct {
    const Product *p;
    Tiles tiles;
    const TYPE *w;
    TYPE *b, *a, *sums; /* packed w, packed x, and the sums of the tree */
    int64_t i, m, j, n; /* the block: its first row and column, and how many it has */
    int reads_w;
    int64_t depth;
} OF(Work);

/* What the first leaf begins with. */
static void OF(begin)(const OF(Work) *o) {
    const Product *p = o->p;
    int64_t rows = o->tiles.rows, columns = o->tiles.columns, high = up(o->m, rows);
    memset(o->sums, 0, (size_t)(high * up(o->n, columns)) * sizeof(TYPE));
    for (int64_t c = 0; c < o->n; c++)
        for (int64_t r = 0; r < o->m; r++)
            o->sums[(c / columns * high + r) * columns + c % columns] =
                p->adds ? ((TYPE *)p->y)[(o->i + r) * p->y_step + o->j + c] : ((const TYPE *)p->bias)[o->j + c];
}

static void OF(finish)(const OF(Work) *o) {
    int64_t rows = o->tiles.rows, columns = o->tiles.columns;
    const TYPE *sums = o->sums;
    for (int64_t c = 0; c < o->n; c += columns)
        for (int64_t r = 0; r < up(o->m, rows); r++, sums += columns)
            if (r < o->m)
                memcpy((TYPE *)o->p->y + (o->i + r) * o->p->y_step + o->j + c, sums,
                       (size_t)least(columns, o->n - c) * sizeof(TYPE));
}

/* One leaf: chains from `begin` to `end`. Where there are sums before, they are added to these. */
static void OF(leaf)(const OF(Work) *o, int64_t begin, int64_t end, TYPE *sums, int fresh, TYPE *before) {
    const Product *p = o->p;
    int64_t rows = o->tiles.rows, columns = o->tiles.columns, at = begin;
    do {
        int64_t depth = least(o->depth, end - at), tile = 0;
        int is_last = at + depth == end;
        OF(pack)((const TYPE *)p->x + o->i * p->x_step + at * p->x_across, p->x_across, p->x_step, depth, o->m,
                 o->tiles.rows, o->a, NULL);
        for (int64_t c = 0; c < o->n; c += columns) {
            const TYPE *from = o->w + at * p->w_step + c * p->w_across, *b = o->b;
            int is_read = o->reads_w && c + columns <= o->n;
            if (is_read)
                b = from;
            else if (packs_strips(p->m))
                OF(pack)(from, p->w_step, p->w_across, depth, least(columns, o->n - c), o->tiles.columns, o->b,
                         o->tiles.OF(turn));
            else
                b += c * p->k + at * columns;
            for (int64_t r = 0; r < o->m; r += rows, tile += rows * columns)
                o->tiles.OF(tile)(depth, o->a + r * depth, b, is_read ? p->w_step : columns, sums + tile,
                                  fresh && at == begin, is_last && before ? before + tile : NULL);
        }
        at += depth;
    } while (at < end);
}

static void OF(block)(const OF(Work) *o) {
    const Product *p = o->p;
    int64_t length = p->k / p->leaves, area = up(o->m, o->tiles.rows) * up(o->n, o->tiles.columns);
    int64_t top = 0, sizes[64];
    for (int64_t leaf = 0; leaf < p->leaves; leaf++) {
        int has_first = leaf == 0 && (p->bias || p->adds), is_last = leaf + 1 == p->leaves;
        int merges = top && (sizes[top - 1] == 1 || is_last);
        TYPE *sums = o->sums + top * area;
        if (has_first) OF(begin)(o);
        OF(leaf)(o, leaf * length, (leaf + 1) * length, sums, !has_first, merges ? sums - area : NULL);
        if (merges)
            sizes[top - 1]++;
        else
            sizes[top++] = 1;
        for (; top > 1 && (sizes[top - 2] == sizes[top - 1] || is_last); top--) {
            TYPE *a = o->sums + (top - 2) * area, *b = a + area;
            for (int64_t e = 0; e < area; e++) a[e] += b[e];
            sizes[top - 2] += sizes[top - 1];
        }
    }
}

static void OF(run)(const Product *p, TYPE *scratch) {
    const int64_t most = BYTES_ACROSS / sizeof(TYPE), rows = rows_of_block(p->m);
    OF(Work) o = {.p = p, .tiles = tiles_of(sizeof(TYPE) == 8, p->m), .b = scratch};
    o.reads_w = reads_w(p, o.tiles);
    o.depth = packs_strips(p->m) && p->w_across == 1 && p->w_step * (int64_t)sizeof(TYPE) % 4096 == 0 ? SHALLOW : DEPTH;
    o.a = o.b + packed_elements(p->m, p->n, p->k, most, o.tiles.columns);
    o.sums = o.a + up(rows, o.tiles.rows) * DEPTH;
    for (o.j = 0; o.j < p->n; o.j += most) {
        o.n = least(most, p->n - o.j), o.w = (const TYPE *)p->w + o.j * p->w_across;
        if (!packs_strips(p->m))
            OF(pack)(o.w, p->w_step, p->w_across, p->k, o.n, o.tiles.columns, o.b, o.tiles.OF(turn));
        for (o.i = 0; o.i < p->m; o.i += rows) {
            o.m = least(rows, p->m - o.i);
            OF(block)(&o);
            OF(finish)(&o);
        }
    }
}
