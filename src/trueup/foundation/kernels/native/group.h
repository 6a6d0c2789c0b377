/* Groups of 512 elements, rows of 64: included for REAL float and double by each instruction set.
 *
 * Within a group no rotation changes, so that a column's lanes stay in registers over its 8 rows. NaN or Inf anywhere make
 * the sum of squares NaN or Inf: nothing else looks for them, and a group that has some is done again without them.
 */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(name) JOIN(name, REAL)
#define VECTOR_OF FN(Vector)
#define BITS_OF FN(Bits)
enum { FN(COUNT) = LEVEL / 8 / sizeof(REAL), FN(PARTS) = sizeof(double) / sizeof(REAL) };
#define EACH_PART _Pragma("GCC unroll 2") for (int p = 0; p < (int)FN(PARTS); p++)

typedef struct {
    double lanes[LANES];
    Vector_double sum, square;
    VECTOR_OF low, high; /* those so far enter */
    int64_t small, zero;
} ALIGNED FN(Group);

static ALWAYS_INLINE BITS_OF FN(magnitude)(VECTOR_OF v)
{
    return (BITS_OF)v & ((BITS_OF){0} + (((FN(Word))1 << (8 * sizeof(REAL) - 1)) - 1));
}

#if LEVEL < 512
/* The smaller magnitude; that of NaN is none. */
static ALWAYS_INLINE VECTOR_OF FN(smaller)(VECTOR_OF v, VECTOR_OF least) { return FN(min)((VECTOR_OF)FN(magnitude)(v), least); }
#endif

/* Count the elements of `rows` rows whose magnitude has bits below `tiny`, and the zeros among them. */
static NOINLINE void FN(count_small)(const REAL *x, int rows, FN(Word) tiny, FN(Group) *g)
{
    BITS_OF small = {0}, zero = {0};
    const BITS_OF limit = (BITS_OF){0} + tiny, one = (BITS_OF){0} + 1;
    for (int i = 0; i < LANES * rows; i += FN(COUNT)) {
        VECTOR_OF v;
        memcpy(&v, x + i, sizeof v);
        small = FN(count_below)(small, FN(magnitude)(v), limit);
        zero = FN(count_below)(zero, FN(magnitude)(v), one);
    }
    g->small = FN(total)(small);
    g->zero = FN(total)(zero);
}

/* Lanes, sums and extremes of `rows` rows. Memory at `ahead`, what comes one piece later, is fetched meanwhile: going down the
 * columns, no processor would guess it, and it would halve the speed on what no cache holds. */
static ALWAYS_INLINE void FN(rows)(const REAL *x, const char *ahead, int rows, FN(Word) tiny, const uint64_t *words, FN(Group) *g)
{
    const uint8_t *signs = (const uint8_t *)words;
    const BITS_OF limit = (BITS_OF){0} + tiny;
    Vector_double sum[FN(PARTS)], square[FN(PARTS)];
    memset(sum, 0, sizeof sum);
    memset(square, 0, sizeof square);
    VECTOR_OF low = g->low, high = g->high;
    VECTOR_OF least = (VECTOR_OF){0} + (REAL)INFINITY;
    for (int c = 0; c < LANES; c += FN(COUNT)) {
        Vector_double all[FN(PARTS)], lane[FN(PARTS)]; /* all: longer chains of additions would lose more */
        memset(all, 0, sizeof all);
        memset(lane, 0, sizeof lane);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            VECTOR_OF v;
            memcpy(&v, x + LANES * r + c, sizeof v);
            if (r % (sizeof(v) < 64 ? 64 / sizeof v : 1) == 0)
                __builtin_prefetch(ahead + sizeof v * r + 8 * sizeof(REAL) * c, 0, 2); /* to the second level */
            low = FN(min)(v, low);
            high = FN(max)(v, high);
            least = FN(smaller)(v, least);
            EACH_PART {
                Vector_double d = FN(part)(x + LANES * r + c, v, p);
                all[p] += d;
                square[p] += d * d;
                lane[p] = lane_add(lane[p], d, signs + 8 * r, c + DOUBLES * p);
            }
        }
        EACH_PART {
            memcpy(g->lanes + c + DOUBLES * p, &lane[p], sizeof lane[p]);
            sum[p] += all[p];
        }
    }
    g->sum = sum[0];
    g->square = square[0];
    if (FN(PARTS) == 2) {
        g->sum += sum[FN(PARTS) - 1];
        g->square += square[FN(PARTS) - 1];
    }
    g->low = low;
    g->high = high;
    g->small = g->zero = 0;
    if (FN(any_below)((BITS_OF)least, limit))
        FN(count_small)(x, rows, tiny, g);
}

/* Elements of `rows` rows whose magnitude has just these bits. */
static NOINLINE int64_t FN(count_equal)(const REAL *x, int rows, FN(Word) bits)
{
    BITS_OF count = {0};
    const BITS_OF wanted = (BITS_OF){0} + bits;
    for (int i = 0; i < LANES * rows; i += FN(COUNT)) {
        VECTOR_OF v;
        memcpy(&v, x + i, sizeof v);
        count -= (BITS_OF)(FN(magnitude)(v) == wanted);
    }
    return FN(total)(count);
}

static ALWAYS_INLINE FN(Word) FN(bits_of)(REAL value)
{
    FN(Word) bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Write the elements times `scale`, and zeros for those that do not count, to `clean`; count these; return how many. */
static NOINLINE int64_t FN(cleaned)(const REAL *x, int rows, const Kind *kind, REAL scale, REAL *clean, FN(Group) *g, Totals *t)
{
    const FN(Word) inf = FN(bits_of)((REAL)INFINITY), largest = FN(bits_of)((REAL)kind->largest);
    const BITS_OF infs = (BITS_OF){0} + inf, tops = (BITS_OF){0} + largest, nothing = {0};
    const BITS_OF plus = (BITS_OF)((VECTOR_OF){0} + (REAL)INFINITY), minus = (BITS_OF)((VECTOR_OF){0} - (REAL)INFINITY);
    BITS_OF nan = {0}, posinf = {0}, neginf = {0}, saturated = {0};
    for (int i = 0; i < LANES * rows; i += FN(COUNT)) {
        VECTOR_OF v;
        memcpy(&v, x + i, sizeof v);
        BITS_OF bits = FN(magnitude)(v), bad = (BITS_OF)((FN(Mask))bits >= (FN(Mask))infs);
        BITS_OF masked = largest == inf ? nothing : (BITS_OF)((FN(Mask))bits >= (FN(Mask))tops) & ~bad;
        nan -= (BITS_OF)((FN(Mask))bits > (FN(Mask))infs);
        posinf -= (BITS_OF)((BITS_OF)v == plus);
        neginf -= (BITS_OF)((BITS_OF)v == minus);
        saturated -= masked;
        bad |= kind->masking ? masked : nothing;
        g->low = FN(min)((VECTOR_OF)(((BITS_OF)v & ~bad) | (plus & bad)), g->low);
        g->high = FN(max)((VECTOR_OF)(((BITS_OF)v & ~bad) | (minus & bad)), g->high);
        v = (VECTOR_OF)((BITS_OF)v & ~bad) * scale;
        memcpy(clean + i, &v, sizeof v);
    }
    int64_t nans = FN(total)(nan), pos = FN(total)(posinf), neg = FN(total)(neginf), tops_seen = FN(total)(saturated);
    t->nan += nans;
    t->posinf += pos;
    t->neginf += neg;
    t->saturated += tops_seen;
    return nans + pos + neg + (kind->masking ? tops_seen : 0);
}

/* A group that is not full, has NaN, Inf or masks in it, or is to be scaled. */
static NOINLINE void FN(careful)(const REAL *x, int size, const Kind *kind, REAL scale, const uint64_t *words, FN(Group) *g, Totals *t)
{
    REAL padded[GROUP] ALIGNED, clean[GROUP] ALIGNED;
    const int rows = (size + LANES - 1) / LANES, padding = LANES * rows - size;
    const FN(Word) tiny = kind->tiny == 0.0 ? 1 : FN(bits_of)((REAL)kind->tiny);
    if (padding) {
        memcpy(padded, x, (size_t)size * sizeof(REAL));
        for (int i = size; i < LANES * rows; i++)
            padded[i] = NAN;
        x = padded;
    }
    int64_t left_out = FN(cleaned)(x, rows, kind, scale, clean, g, t);
    VECTOR_OF low = g->low, high = g->high;
    FN(rows)(clean, (const char *)clean, rows, tiny, words, g);
    g->low = low;
    g->high = high;
    t->nan -= padding;
    g->zero -= left_out;
    g->small -= left_out;
}

static ALWAYS_INLINE void FN(enter)(const FN(Group) *g, int64_t group, Totals *t)
{
    int shift = 8 * (int)(splitmix64((uint64_t)group ^ GOLDEN) >> 61);
    for (int at = 0; at < LANES; at += DOUBLES) {
        Vector_double lane, share;
        double *to = t->lanes + ((at + shift) & (LANES - 1));
        memcpy(&lane, to, sizeof lane);
        memcpy(&share, g->lanes + at, sizeof share);
        lane += share;
        memcpy(to, &lane, sizeof lane);
    }
    Vector_double sum, rest, square;
    memcpy(&sum, t->sum, sizeof sum);
    memcpy(&rest, t->rest, sizeof rest);
    memcpy(&square, t->square, sizeof square);
    Vector_double next = sum + g->sum, taken = next - sum; /* Knuth's two-sum */
    rest += (sum - (next - taken)) + (g->sum - taken);
    square += g->square;
    memcpy(t->sum, &next, sizeof next);
    memcpy(t->rest, &rest, sizeof rest);
    memcpy(t->square, &square, sizeof square);
    t->small += g->small;
    t->zero += g->zero;
}

static NOINLINE void FN(run)(const REAL *x, const char *ahead, int64_t group, int n, const Kind *kind, double scale, Totals *t)
{
    const FN(Word) tiny = kind->tiny == 0.0 ? 1 : FN(bits_of)((REAL)kind->tiny), largest = FN(bits_of)((REAL)kind->largest);
    FN(Group) g;
    VECTOR_OF low = (VECTOR_OF){0} + (REAL)INFINITY, high = (VECTOR_OF){0} - (REAL)INFINITY;
    for (; n > 0; n -= GROUP, x += GROUP, ahead += GROUP * kind->width, group++) {
        uint64_t words[ROWS] ALIGNED;
        int size = n < GROUP ? n : GROUP, rows = size / LANES, careful = size % LANES != 0 || scale != 1.0;
        for (int r = 0; r < ROWS; r++)
            words[r] = splitmix64((uint64_t)(ROWS * group + r));
        g.low = low;
        g.high = high;
        if (!careful) {
            if (size == GROUP)
                FN(rows)(x, ahead, ROWS, tiny, words, &g);
            else
                FN(rows)(x, ahead, rows, tiny, words, &g);
            int saturated = FN(reaches)(g.low, g.high, (REAL)kind->largest);
            careful = !all_finite(g.square) || (saturated && kind->masking);
            if (!careful && saturated)
                t->saturated += FN(count_equal)(x, rows, largest);
        }
        if (careful) {
            g.low = low;
            g.high = high;
            FN(careful)(x, size, kind, (REAL)scale, words, &g, t);
        }
        low = g.low;
        high = g.high;
        FN(enter)(&g, group, t);
    }
    for (int j = 0; j < (int)FN(COUNT); j++) {
        t->low = (double)low[j] < t->low ? (double)low[j] : t->low;
        t->high = (double)high[j] > t->high ? (double)high[j] : t->high;
    }
}

#undef JOIN_
#undef JOIN
#undef FN
#undef VECTOR_OF
#undef BITS_OF
#undef EACH_PART
#undef REAL
