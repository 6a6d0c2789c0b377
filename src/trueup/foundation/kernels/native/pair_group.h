/* Pieces of two tensors in a row: included for REAL float and double by level.h, within its names.
 *
 * All that counts is taken in one loop. NaN and Inf make a sum of squares NaN or Inf, masks are the largest numbers there are:
 * a piece that has some, or that does not fill its vectors, is done again with zeros in their place, which are then subtracted.
 */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(name) JOIN(name, REAL)
#define VECTOR_OF FN(Vector)
#define BITS_OF FN(Bits)
#define EACH_PART _Pragma("GCC unroll 2") for (int p = 0; p < (int)FN(PARTS); p++)

/* The sums of a piece; relative errors are float64 quotients of float64 numbers. */
typedef struct {
    Vector_double dd, aa, bb, ab, d, relative, top_d, top_relative;
    VECTOR_OF top_a, top_b;
    BITS_OF equal, flips;
    Bits_double floored, within[2];
} FN(Sums);

/* The number of a value in its format, counted from zero: `value` is not negative, `shift` bits are rounded away, to even. */
static ALWAYS_INLINE BITS_OF FN(code)(VECTOR_OF value, VECTOR_OF tiny, int shift)
{
    const BITS_OF from = (BITS_OF)tiny, half = (BITS_OF){0} + (((FN(Word))1 << (shift - 1)) - 1);
    const BITS_OF below = (BITS_OF)(value < tiny);
    const BITS_OF normal = (BITS_OF)value - from + ((FN(Word))1 << FN(FRACTION)); /* behind the subnormals, one binade of codes */
    const BITS_OF subnormal = (BITS_OF)(value + tiny) - from;                    /* as far apart as the first binade */
    const BITS_OF number = (subnormal & below) | (normal & ~below);
    return (number + half + ((number >> shift) & 1)) >> shift;
}

static ALWAYS_INLINE void FN(pass)(
    const REAL *a, const REAL *b, const double *rest, int n, const PairRule *r, int units, uint8_t *buckets, FN(Sums) *sums)
{
    const Vector_double floor = (Vector_double){0} + r->floor, instead = (Vector_double){0} + r->instead;
    const Vector_double one = (Vector_double){0} + 0.001, five = (Vector_double){0} + 0.005;
    const VECTOR_OF tiny = (VECTOR_OF){0} + (REAL)r->tiny, zero = {0};
    const int shift = r->shift;
    Vector_double dd[FN(PARTS)], aa[FN(PARTS)], bb[FN(PARTS)], ab[FN(PARTS)], sum[FN(PARTS)], relative[FN(PARTS)];
    Vector_double top_d = {0}, top_relative = {0};
    Bits_double floored = {0}, within_one = {0}, within_five = {0};
    VECTOR_OF top_a = {0}, top_b = {0};
    BITS_OF equal = {0}, flips = {0};
    memset(dd, 0, sizeof dd);
    memset(aa, 0, sizeof aa);
    memset(bb, 0, sizeof bb);
    memset(ab, 0, sizeof ab);
    memset(sum, 0, sizeof sum);
    memset(relative, 0, sizeof relative);
    for (int i = 0; i < n; i += FN(COUNT)) {
        VECTOR_OF x, y;
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        EACH_PART {
            const Vector_double u = FN(part)(a + i, x, p), v = FN(part)(b + i, y, p);
            Vector_double d = v - u;
            if (rest) {
                Vector_double more;
                memcpy(&more, rest + i, sizeof more);
                d += more;
            }
            const Vector_double size = (Vector_double)magnitude_double(d);
            const Vector_double base = (Vector_double)magnitude_double(u);
            const Vector_double quotient = size / above(base, floor, instead);
            dd[p] += d * d;
            aa[p] += u * u;
            bb[p] += v * v;
            ab[p] += u * v;
            sum[p] += size;
            relative[p] += quotient;
            top_d = max_double(size, top_d);
            top_relative = max_double(quotient, top_relative);
            within_one = count_less_double(within_one, quotient, one);
            within_five = count_less_double(within_five, quotient, five);
            floored = count_less_double(floored, floor, base);
            if (units == WHOLE_UNITS && sizeof(REAL) == 8) { /* |d| is whole: its exponent is its length */
                const Bits_double length = ((Bits_double)size >> 52) - 1022;
                store_bytes_double(buckets + i, length & (Bits_double)(size != 0));
            }
        }
        const BITS_OF mag_x = FN(magnitude)(x), mag_y = FN(magnitude)(y);
        const BITS_OF opposite = (BITS_OF)((FN(Mask))((BITS_OF)x ^ (BITS_OF)y) >> (8 * sizeof(REAL) - 1));
        top_a = FN(max)((VECTOR_OF)mag_x, top_a);
        top_b = FN(max)((VECTOR_OF)mag_y, top_b);
        flips = FN(count_common)(flips, FN(least)(mag_x, mag_y), opposite);
        if (rest) {
            Vector_double more;
            memcpy(&more, rest + i, sizeof more);
            equal = FN(count_same)(equal, x - y, zero + (VECTOR_OF)more);
        } else {
            equal = FN(count_same)(equal, x, y);
        }
        if (units == WHOLE_UNITS) {
            if (sizeof(REAL) == 4) {
                const BITS_OF size = FN(magnitude)(y - x), length = (size >> 23) - 126;
                FN(store_bytes)(buckets + i, length & (BITS_OF)(size != 0));
            }
            continue;
        }
        const int rounded = units == ROUNDED_UNITS;
        const BITS_OF code_x = rounded ? FN(code)((VECTOR_OF)mag_x, tiny, shift) : mag_x;
        const BITS_OF code_y = rounded ? FN(code)((VECTOR_OF)mag_y, tiny, shift) : mag_y;
        const BITS_OF low = FN(least)(code_x, code_y), high = FN(most)(code_x, code_y);
        const BITS_OF apart = high - low + ((low + low) & opposite);
        FN(store_bytes)(buckets + i, FN(length)(rounded ? apart : apart >> shift));
    }
    for (int p = 1; p < (int)FN(PARTS); p++) {
        dd[0] += dd[p];
        aa[0] += aa[p];
        bb[0] += bb[p];
        ab[0] += ab[p];
        sum[0] += sum[p];
        relative[0] += relative[p];
    }
    *sums = (FN(Sums)){dd[0], aa[0], bb[0], ab[0], sum[0], relative[0], top_d, top_relative, top_a, top_b,
                       equal, flips, floored, {within_one, within_five}};
}

/* Each way of counting units is a loop of its own. What float64 cannot hold of 64-bit integers is in `rest`, else NULL. */
#define PASS(name, units)                                                                                            \
    static NOINLINE void FN(name)(                                                                                   \
        const REAL *a, const REAL *b, const double *rest, int n, const PairRule *r, uint8_t *buckets, FN(Sums) *sums) \
    {                                                                                                                \
        if (sizeof(REAL) == 8 && rest)                                                                               \
            FN(pass)(a, b, rest, n, r, units, buckets, sums);                                                        \
        else                                                                                                         \
            FN(pass)(a, b, NULL, n, r, units, buckets, sums);                                                        \
    }
PASS(pass_whole, WHOLE_UNITS)
PASS(pass_same, SAME_UNITS)
PASS(pass_rounded, ROUNDED_UNITS)
#undef PASS

static void FN(passed)(
    const REAL *a, const REAL *b, const double *rest, int n, const PairRule *r, uint8_t *buckets, FN(Sums) *sums)
{
    switch (r->units) {
    case WHOLE_UNITS: FN(pass_whole)(a, b, rest, n, r, buckets, sums); break;
    case SAME_UNITS: FN(pass_same)(a, b, rest, n, r, buckets, sums); break;
    default: FN(pass_rounded)(a, b, rest, n, r, buckets, sums); break;
    }
}

/* What a value is that does not count: 1 more than NANS ... ; the sign of a mask tells it apart too. 0: it counts. */
static ALWAYS_INLINE int FN(kind_of_special)(REAL x, const Kind *kind)
{
    if (x != x)
        return 1 + NANS;
    if (x == (REAL)INFINITY)
        return 1 + POSINFS;
    if (x == -(REAL)INFINITY)
        return 1 + NEGINFS;
    if (kind->masking && (x >= (REAL)kind->largest || x <= -(REAL)kind->largest))
        return 1 + MASKS;
    return 0;
}

static void FN(note_special)(REAL x, REAL y, int64_t place, const PairRule *r, PairTotals *t)
{
    const int of_x = FN(kind_of_special)(x, r->a), of_y = FN(kind_of_special)(y, r->b);
    const int same = of_x == of_y && (of_x != 1 + MASKS || (x > 0) == (y > 0));
    if (same) {
        t->special[of_x - 1][ON_BOTH]++;
        return;
    }
    if (of_x)
        t->special[of_x - 1][ON_FIRST]++;
    if (of_y)
        t->special[of_y - 1][ON_SECOND]++;
    if (t->differing++ == 0)
        t->first = place;
}

/* Copy a piece with zeros where a side does not count and behind its end; return how many of its pairs were left out. */
static NOINLINE int FN(clean)(
    const REAL *a, const REAL *b, const double *rest, int64_t first, int n, const PairRule *r, REAL *to_a, REAL *to_b,
    double *to_rest, PairTotals *t)
{
    const REAL most_a = r->a->masking ? (REAL)r->a->largest : (REAL)INFINITY;
    const REAL most_b = r->b->masking ? (REAL)r->b->largest : (REAL)INFINITY;
    uint8_t out[PIECE];
    int count = 0;
    for (int i = 0; i < n; i++) {
        const REAL x = a[i], y = b[i];
        const int counts = (x < most_a) & (x > -most_a) & (y < most_b) & (y > -most_b);
        out[i] = (uint8_t)!counts;
        count += !counts;
        to_a[i] = counts ? x : 0;
        to_b[i] = counts ? y : 0;
    }
    if (rest)
        for (int i = 0; i < n; i++)
            to_rest[i] = out[i] ? 0.0 : rest[i];
    for (int i = 0; count && i < n; i++)
        if (out[i])
            FN(note_special)(a[i], b[i], first + i, r, t);
    for (int i = n; i % LANES; i++) {
        to_a[i] = to_b[i] = 0;
        if (rest)
            to_rest[i] = 0.0;
    }
    return count;
}

static int64_t FN(place_of)(const REAL *a, const REAL *b, const double *rest, int n, double top)
{
    for (int i = 0; i < n; i++) {
        double d = (double)b[i] - (double)a[i];
        if (rest)
            d += rest[i];
        if (fabs(d) == top)
            return i;
    }
    return -1;
}

/* `best` is the largest |d| that any thread has found: where a smaller one lies will not be asked. */
static NOINLINE void FN(pair_run)(
    const REAL *a, const REAL *b, const double *rest, int64_t first, int n, const PairRule *r, double best, PairTotals *t)
{
    REAL clean_a[PIECE] ALIGNED, clean_b[PIECE] ALIGNED;
    double clean_rest[sizeof(REAL) == 8 ? PIECE : 1] ALIGNED;
    uint8_t buckets[PIECE] ALIGNED;
    FN(Sums) s;
    int full = n, left_out = 0, careful = n % LANES != 0;
    if (!careful) {
        FN(passed)(a, b, rest, n, r, buckets, &s);
        REAL top_a = 0, top_b = 0;
        for (int j = 0; j < (int)FN(COUNT); j++) {
            top_a = s.top_a[j] > top_a ? s.top_a[j] : top_a;
            top_b = s.top_b[j] > top_b ? s.top_b[j] : top_b;
        }
        careful = !(sum_of(s.aa) + sum_of(s.bb) < (double)INFINITY) || (r->a->masking && top_a >= (REAL)r->a->largest) ||
                  (r->b->masking && top_b >= (REAL)r->b->largest);
    }
    if (careful) {
        left_out = FN(clean)(a, b, rest, first, n, r, clean_a, clean_b, clean_rest, t);
        a = clean_a;
        b = clean_b;
        rest = rest ? clean_rest : NULL;
        full = (n + LANES - 1) / LANES * LANES;
        FN(passed)(a, b, rest, full, r, buckets, &s);
    }
    const int zeros = full - n + left_out; /* pairs of zeros that are no pairs */
    count_bytes(buckets, full, t->units);
    t->units[0] -= zeros;
    t->left_out += left_out;
    t->equal += FN(total)(s.equal) - zeros;
    t->flips += FN(total)(s.flips);
    t->floored += full - total_double(s.floored) - zeros;
    t->within[0] += total_double(s.within[0]) - zeros;
    t->within[1] += total_double(s.within[1]) - zeros;
    t->dd += sum_of(s.dd);
    t->aa += sum_of(s.aa);
    t->bb += sum_of(s.bb);
    t->ab += sum_of(s.ab);
    t->d += sum_of(s.d);
    t->relative += sum_of(s.relative);
    const double top = top_of(s.top_d), top_relative = top_of(s.top_relative);
    if (top > t->top_d) {
        t->top_d = top;
        t->at = top >= best ? first + FN(place_of)(a, b, rest, n, top) : -1;
    }
    t->top_relative = top_relative > t->top_relative ? top_relative : t->top_relative;
    for (int j = 0; j < (int)FN(COUNT); j++) {
        t->top_a = (double)s.top_a[j] > t->top_a ? (double)s.top_a[j] : t->top_a;
        t->top_b = (double)s.top_b[j] > t->top_b ? (double)s.top_b[j] : t->top_b;
    }
}

#undef JOIN_
#undef JOIN
#undef FN
#undef VECTOR_OF
#undef BITS_OF
#undef EACH_PART
#undef REAL
