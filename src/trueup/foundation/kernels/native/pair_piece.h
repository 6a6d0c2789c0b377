/* Pieces of two tensors of any kinds: read as float32 or float64, whichever holds both. Included by level.h. */

/* A 64-bit integer is the nearest float64 and what that leaves, a small integer. */
static void split_whole(const char *x, int n, int real, double *to, double *rest)
{
    for (int i = 0; i < n; i++) {
        uint64_t bits, nearest;
        memcpy(&bits, x + 8 * i, sizeof bits);
        const double value = real == INT64 ? (double)(int64_t)bits : (double)bits;
        nearest = value < 0 ? (uint64_t)(int64_t)value : value < 0x1p64 ? (uint64_t)value : 0;
        to[i] = value;
        rest[i] = (double)(int64_t)(bits - nearest);
    }
}

static ALWAYS_INLINE int is_long(const Kind *kind) { return kind->real == INT64 || kind->real == UINT64; }

/* Whether float64 does not hold all of them. */
static int needs_split(const char *x, int n, const Kind *kind)
{
    uint64_t seen = 0;
    if (!is_long(kind))
        return 0;
    for (int i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, x + 8 * i, sizeof bits);
        seen |= kind->real == INT64 ? bits ^ (0 - (bits >> 63)) : bits;
    }
    return seen >> 53 != 0;
}

/* The reals at `x` as float64; a row of them that is one already is not copied. `rest` is NULL where nothing can be left of them. */
static const double *as_doubles(const char *x, int n, const Kind *kind, double *to, double *rest)
{
    float narrow[PIECE] ALIGNED;
    if (kind->real == FLOAT64)
        return (const void *)x;
    if (rest) {
        split_whole(x, n, kind->real, to, rest);
        return to;
    }
    if (kind->wide) {
        widen_double(x, n, kind->real, to);
        return to;
    }
    const float *from = (const void *)x;
    if (kind->real != FLOAT32) {
        widen_float(x, n, kind->real, narrow);
        from = narrow;
    }
    for (int i = 0; i < n; i++)
        to[i] = from[i];
    return to;
}

typedef struct {
    double a[PIECE] ALIGNED, b[PIECE] ALIGNED, rest[PIECE] ALIGNED, other[PIECE] ALIGNED;
    const double *x, *y, *more; /* the two sides, and what is to be added to their difference or NULL */
} WideBlock;

static void read_wide(WideBlock *w, const char *a, const char *b, int n, const PairRule *r)
{
    const int of_a = needs_split(a, n, r->a), of_b = needs_split(b, n, r->b);
    w->x = as_doubles(a, n, r->a, w->a, of_a ? w->other : NULL);
    w->y = as_doubles(b, n, r->b, w->b, of_b ? w->rest : NULL);
    w->more = of_a || of_b ? w->rest : NULL;
    if (of_a)
        for (int i = 0; i < n; i++)
            w->rest[i] = (of_b ? w->rest[i] : 0.0) - w->other[i];
}

static void pair_wide(const char *a, const char *b, int64_t first, int n, const PairRule *r, double best, PairTotals *t)
{
    WideBlock w;
    read_wide(&w, a, b, n, r);
    pair_run_double(w.x, w.y, w.more, first, n, r, best, t);
}

static void pair_narrow(const char *a, const char *b, int64_t first, int n, const PairRule *r, double best, PairTotals *t)
{
    float block_a[PIECE] ALIGNED, block_b[PIECE] ALIGNED;
    const float *x = (const void *)a, *y = (const void *)b;
    if (r->a->real != FLOAT32) {
        widen_float(a, n, r->a->real, block_a);
        x = block_a;
    }
    if (r->b->real != FLOAT32) {
        widen_float(b, n, r->b->real, block_b);
        y = block_b;
    }
    pair_run_float(x, y, NULL, first, n, r, best, t);
}

static void pair_piece(const char *a, const char *b, int64_t first, int n, const PairRule *r, double best, PairTotals *t)
{
    if (r->wide)
        pair_wide(a, b, first, n, r, best, t);
    else
        pair_narrow(a, b, first, n, r, best, t);
}

/* The sums of squares again, of float64 that would leave the range of float64 or fall below it. */
static void pair_rescale(const char *a, const char *b, int n, const PairRule *r, PairScaled *s)
{
    WideBlock w;
    read_wide(&w, a, b, n, r);
    for (int i = 0; i < n; i++) {
        if (kind_of_special_double(w.x[i], r->a) || kind_of_special_double(w.y[i], r->b))
            continue;
        const double x = w.x[i] * s->a, y = w.y[i] * s->b;
        const double d = (w.y[i] - w.x[i] + (w.more ? w.more[i] : 0.0)) * s->d;
        s->aa += x * x;
        s->bb += y * y;
        s->ab += x * y;
        s->dd += d * d;
        s->sum += fabs(d);
    }
}
