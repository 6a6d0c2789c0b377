/* What a monitor wants of many tensors in a row, each read once: included by each instruction set.
 *
 * Sums are of float64, 16 of them by an element's place, then by the chunk: squares and products of float32 are exact there, so
 * that all instruction sets and any number of threads give the same bits; a difference and its square may be rounded together.
 */
enum { SUMS = 16, REGISTERS_16 = SUMS / DOUBLES };

typedef struct {
    Vector_double a[REGISTERS_16], b[REGISTERS_16], c[REGISTERS_16];
    Bits_double more[REGISTERS_16]; /* signs, + minus - */
} StreamSums;

#define EACH_REGISTER _Pragma("GCC unroll 8") for (int j = 0; j < REGISTERS_16; j++)

static ALWAYS_INLINE double stream_total(const Vector_double *v)
{
    double x[SUMS], sum = 0;
    memcpy(x, v, sizeof x);
    for (int j = 0; j < SUMS; j++)
        sum += x[j];
    return sum;
}

static ALWAYS_INLINE double stream_count(const Bits_double *v)
{
    int64_t x[SUMS], sum = 0;
    memcpy(x, v, sizeof x);
    for (int j = 0; j < SUMS; j++)
        sum += x[j];
    return (double)sum;
}

/* The j-th register of doubles of the 16 floats at `x`. */
static ALWAYS_INLINE Vector_double stream_load(const float *x, int j)
{
    Vector_float v;
    memcpy(&v, x + FLOATS * (j / 2), sizeof v);
    return part_float(x + FLOATS * (j / 2), v, j % 2);
}

static ALWAYS_INLINE Bits_double stream_signs(Vector_double p)
{
    return (Bits_double)((p < 0) - (p > 0));
}

/* `n` is a multiple of 16. */
static ALWAYS_INLINE void stream_pairs(int op, const float *x, const float *y, int n, StreamSums *s)
{
    StreamSums t = *s;
    for (int i = 0; i < n; i += SUMS) {
        __builtin_prefetch((const char *)(x + i) + 4096, 0, 2);
        __builtin_prefetch((const char *)(y + i) + 4096, 0, 2);
        EACH_REGISTER {
            const Vector_double p = stream_load(x + i, j), q = stream_load(y + i, j);
            if (op == STREAM_ALIKE) {
                const Vector_double product = p * q;
                t.a[j] += p * p;
                t.b[j] += q * q;
                t.c[j] += product;
                t.more[j] += stream_signs(product);
            } else if (op == STREAM_ABOVE) {
                const Vector_double square = p * p;
                t.a[j] += square;
                t.b[j] += q * q;
                t.more[j] += stream_signs(q - square);
            } else {
                const Vector_double d = p - q;
                t.a[j] += p * p;
                t.b[j] += d * d;
            }
        }
    }
    *s = t;
}

static NOINLINE void stream_alike(const float *x, const float *y, int n, StreamSums *s) { stream_pairs(STREAM_ALIKE, x, y, n, s); }
static NOINLINE void stream_above(const float *x, const float *y, int n, StreamSums *s) { stream_pairs(STREAM_ABOVE, x, y, n, s); }
static NOINLINE void stream_apart(const float *x, const float *y, int n, StreamSums *s) { stream_pairs(STREAM_APART, x, y, n, s); }

/* Squares, extremes, what is not zero, what is beyond the ends where there are some; a NaN is in the squares. */
static ALWAYS_INLINE void stream_one(const float *x, int n, int bounded, float low, float high, StreamSums *s, StreamRow *row)
{
    Vector_double a[REGISTERS_16];
    memcpy(a, s->a, sizeof a);
    enum { EACH = SUMS / FLOATS };
    Vector_float least[EACH], most[EACH];
    Bits_float others[EACH], beyond[EACH];
    memset(others, 0, sizeof others);
    memset(beyond, 0, sizeof beyond);
    for (int k = 0; k < EACH; k++) {
        least[k] = (Vector_float){0} + (float)row->low;
        most[k] = (Vector_float){0} + (float)row->high;
    }
    for (int i = 0; i < n; i += SUMS) {
        __builtin_prefetch((const char *)(x + i) + 4096, 0, 2);
#pragma GCC unroll 8
        for (int k = 0; k < EACH; k++) {
            Vector_float v;
            memcpy(&v, x + i + FLOATS * k, sizeof v);
            least[k] = min_float(v, least[k]);
            most[k] = max_float(v, most[k]);
            others[k] = count_others_float(others[k], v);
            if (bounded)
                beyond[k] -= (Bits_float)((v < low) | (v > high));
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                const Vector_double d = part_float(x + i + FLOATS * k, v, p);
                a[2 * k + p] += d * d;
            }
        }
    }
    memcpy(s->a, a, sizeof a);
    for (int k = 0; k < EACH; k++) {
        row->others += (double)total_float(others[k]);
        row->beyond += (double)total_float(beyond[k]);
        for (int j = 0; j < FLOATS; j++) {
            row->low = least[k][j] < row->low ? least[k][j] : row->low;
            row->high = most[k][j] > row->high ? most[k][j] : row->high;
        }
    }
}

static NOINLINE void stream_spread(const float *x, int n, StreamSums *s, StreamRow *row) { stream_one(x, n, 0, 0, 0, s, row); }
static NOINLINE void stream_bounded(const float *x, int n, float low, float high, StreamSums *s, StreamRow *row)
{
    stream_one(x, n, 1, low, high, s, row);
}

/* Of the last piece of a tensor, fill up to a multiple of 16 with what counts for nothing. */
static ALWAYS_INLINE const float *stream_filled(const float *x, int n, float *to)
{
    memcpy(to, x, (size_t)n * sizeof *x);
    for (int i = n; i % SUMS; i++)
        to[i] = 0;
    return to;
}

static ALWAYS_INLINE const float *stream_widened(const char *x, const Kind *kind, int n, float *to)
{
    if (kind->real == FLOAT32)
        return n % SUMS ? stream_filled((const void *)x, n, to) : (const void *)x;
    widen_float(x, n, kind->real, to);
    return n % SUMS ? stream_filled(to, n, to) : to;
}

static void stream(int op, const StreamPair *pair, int64_t at, int64_t end, float low, float high, StreamRow *row)
{
    StreamSums s;
    memset(&s, 0, sizeof s);
    memset(row, 0, sizeof *row);
    row->low = INFINITY;
    row->high = -INFINITY;
    for (; at < end; at += PIECE) {
        float one[PIECE] ALIGNED, other[PIECE] ALIGNED;
        const int n = end - at < PIECE ? (int)(end - at) : PIECE, whole = (n + SUMS - 1) / SUMS * SUMS;
        const float *x = stream_widened(pair->x + at * pair->kind_x->width, pair->kind_x, n, one);
        if (op == STREAM_SPREAD) {
            const int full = n / SUMS * SUMS;
            if (low == -INFINITY && high == INFINITY)
                stream_spread(x, full, &s, row);
            else
                stream_bounded(x, full, low, high, &s, row);
            double *sums = (double *)s.a;
            for (int i = full; i < n; i++) {
                const float v = x[i];
                sums[i - full] += (double)v * v;
                row->low = v < row->low ? v : row->low;
                row->high = v > row->high ? v : row->high;
                row->others += v != 0;
                row->beyond += (v < low) | (v > high);
            }
            continue;
        }
        const float *y = stream_widened(pair->y + at * pair->kind_y->width, pair->kind_y, n, other);
        if (op == STREAM_ALIKE)
            stream_alike(x, y, whole, &s);
        else if (op == STREAM_ABOVE)
            stream_above(x, y, whole, &s);
        else
            stream_apart(x, y, whole, &s);
    }
    row->a = stream_total(s.a);
    row->b = stream_total(s.b);
    row->c = stream_total(s.c);
    row->more = stream_count(s.more);
}
