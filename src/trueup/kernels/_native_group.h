/* One group of the sketch, 512 elements, with GCC vector extensions: included once per instruction set.
 *
 * Before inclusion: NAME(f) gives a function its name in this instruction set, LEVEL is 0 (plain), 2 (AVX2), 512 (AVX-512).
 * Eight elements are a column; a VD holds as many of their doubles as a register does, PARTS of them the column. Within a
 * group no rotation changes, so a column's lanes stay in registers over its 8 rows. Every sum has at least two accumulators,
 * because one would wait for itself at each addition. Bits are compared as integers: flush-to-zero modes change no count.
 */

#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)
#if LEVEL == 512
#define VD vd8
#define VL vl8
#define PARTS 1
#define TURNS 2 /* accumulators that take turns */
#define WIDEN(v, p) ((vd8)_mm512_cvtps_pd((__m256)(v)))
#define FLIP(d, byte, p) \
    ((vd8)_mm512_mask_xor_epi64((__m512i)(d), (__mmask8)(byte), (__m512i)(d), _mm512_set1_epi64(INT64_MIN)))
#define MIND(a, b) ((vd8)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#define MAXD(a, b) ((vd8)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#elif LEVEL == 2
#define VD vd4
#define VL vl4
#define PARTS 2
#define TURNS 1
#define WIDEN(v, p) \
    ((vd4)_mm256_cvtps_pd((p) ? _mm256_extractf128_ps((__m256)(v), 1) : _mm256_castps256_ps128((__m256)(v))))
#define MIND(a, b) ((vd4)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#define MAXD(a, b) ((vd4)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#else
#define VD vd2
#define VL vl2
#define PARTS 4
#define TURNS 1
#define WIDEN(v, p) ((vd2){(v)[2 * (p)], (v)[2 * (p) + 1]})
#define PICKD(m, a, b) ((vd2)(((vl2)(a) & (m)) | ((vl2)(b) & ~(m))))
#define MIND(a, b) PICKD((a) < (b), a, b)
#define MAXD(a, b) PICKD((a) > (b), a, b)
#endif
#define SPAN (8 / PARTS)
#if LEVEL != 512
#define FLIP(d, byte, p) ((VD)((VL)(d) ^ *(const VL *)(SIGNS[byte] + SPAN * (p))))
#endif
#if LEVEL == 512
#define COUNT_BELOW(count, a, b) \
    (count) = (vi8)_mm256_mask_sub_epi32( \
        (__m256i)(count), _mm256_cmplt_epu32_mask((__m256i)(a), (__m256i)(b)), (__m256i)(count), _mm256_set1_epi32(-1))
#else
#define COUNT_BELOW(count, a, b) (count) -= ABOVE(b, a)
#endif
#if LEVEL >= 2
#define MAXU(a, b) ((vu8)_mm256_max_epu32((__m256i)(a), (__m256i)(b)))
#define MINF(a, b) ((vf8)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MAXF(a, b) ((vf8)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define EQUAL(a, b) ((vi8)_mm256_cmpeq_epi32((__m256i)(a), (__m256i)(b)))
#define ABOVE(a, b) ((vi8)_mm256_cmpgt_epi32((__m256i)(a), (__m256i)(b)))
#else
#define PICK(t, m, a, b) ((t)(((vi8)(a) & (m)) | ((vi8)(b) & ~(m))))
#define MAXU(a, b) PICK(vu8, (vi8)(a) > (vi8)(b), a, b) /* the sign bit is clear */
#define MINF(a, b) PICK(vf8, (a) < (b), a, b)
#define MAXF(a, b) PICK(vf8, (a) > (b), a, b)
#define EQUAL(a, b) ((vi8)((vi8)(a) == (vi8)(b)))
#define ABOVE(a, b) ((vi8)((vi8)(a) > (vi8)(b)))
#endif

/* Eight elements as float32: exact for the three kinds. */
static ALWAYS_INLINE vf8 NAME(load)(const void *x, int at, int kind)
{
    vf8 v;
    if (kind == FLOAT32) {
        memcpy(&v, (const float *)x + at, sizeof v);
    } else {
        uint16_t h[8];
        memcpy(h, (const uint16_t *)x + at, sizeof h);
        if (kind == BFLOAT16) {
            vu8 wide = {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
#if LEVEL >= 2
            wide = (vu8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)x + at)));
#endif
            v = (vf8)(wide << 16);
        } else {
#if LEVEL >= 2
            v = (vf8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)x + at)));
#else
            for (int j = 0; j < 8; j++)
                v[j] = half_to_float(h[j]);
#endif
        }
    }
    return v;
}

static ALWAYS_INLINE void NAME(store_sums)(VD sum[TURNS][PARTS], VD square[TURNS][PARTS], Group *g)
{
    EACH_PART {
        if (TURNS == 2) {
            sum[0][p] += sum[TURNS - 1][p];
            square[0][p] += square[TURNS - 1][p];
        }
    }
    memcpy(g->sum, sum[0], sizeof g->sum);
    memcpy(g->square, square[0], sizeof g->square);
}

/* Float32, float16, bfloat16. Returns 0 if NaN or Inf is among the elements: the result is then of no use. */
static ALWAYS_INLINE int NAME(group_float)(const void *x, int kind, const uint64_t *words, Group *g)
{
    const uint8_t *bytes = (const uint8_t *)words;
    VD sum[TURNS][PARTS], square[TURNS][PARTS];
    memset(sum, 0, sizeof sum);
    memset(square, 0, sizeof square);
    vf8 low[2], high[2];
    vu8 most = {0}, nothing = {0}, tiny = (vu8){0} + TINY_BITS[kind];
    vi8 zeros = {0}, small = {0};
    low[0] = low[1] = (vf8){0} + INFINITY;
    high[0] = high[1] = (vf8){0} - INFINITY;
    for (int c = 0; c < 8; c++) {
        VD lane[TURNS][PARTS];
        memset(lane, 0, sizeof lane);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            const int turn = r & (TURNS - 1);
            vf8 v = NAME(load)(x, 64 * r + 8 * c, kind);
            vu8 bits = (vu8)v & 0x7fffffffu;
            most = MAXU(most, bits);
            zeros -= EQUAL(bits, nothing);
            COUNT_BELOW(small, bits, tiny);
            low[r & 1] = MINF(v, low[r & 1]);
            high[r & 1] = MAXF(v, high[r & 1]);
            EACH_PART {
                VD d = WIDEN(v, p);
                sum[turn][p] += d;
                square[turn][p] += d * d;
                lane[turn][p] += FLIP(d, bytes[8 * r + c], p);
            }
        }
        EACH_PART {
            VD all = TURNS == 2 ? lane[0][p] + lane[TURNS - 1][p] : lane[0][p];
            memcpy(g->lanes + 8 * c + SPAN * p, &all, sizeof all);
        }
    }
    NAME(store_sums)(sum, square, g);
    low[0] = MINF(low[0], low[1]);
    high[0] = MAXF(high[0], high[1]);
    EACH_PART {
        VD least = WIDEN(low[0], p), greatest = WIDEN(high[0], p);
        memcpy(g->low + SPAN * p, &least, sizeof least);
        memcpy(g->high + SPAN * p, &greatest, sizeof greatest);
    }
    int32_t counts[3][8], over = 0;
    memcpy(counts[0], &zeros, sizeof zeros);
    memcpy(counts[1], &small, sizeof small);
    memcpy(counts[2], &most, sizeof most);
    for (int j = 0; j < 8; j++) {
        g->zeros[j] = counts[0][j];
        g->small[j] = counts[1][j];
        over |= counts[2][j] > 0x7f7fffff;
    }
    return !over;
}

/* Float64. Returns 0 if NaN or Inf is among the elements. */
static ALWAYS_INLINE int NAME(group_double)(const double *x, const uint64_t *words, Group *g)
{
    const uint8_t *bytes = (const uint8_t *)words;
    VD sum[TURNS][PARTS], square[TURNS][PARTS], low[PARTS], high[PARTS];
    VL zeros[PARTS], small[PARTS], bad = {0};
    memset(sum, 0, sizeof sum);
    memset(square, 0, sizeof square);
    memset(zeros, 0, sizeof zeros);
    memset(small, 0, sizeof small);
    EACH_PART {
        low[p] = (VD){0} + INFINITY;
        high[p] = (VD){0} - INFINITY;
    }
    for (int c = 0; c < 8; c++) {
        VD lane[TURNS][PARTS];
        memset(lane, 0, sizeof lane);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            const int turn = r & (TURNS - 1);
            EACH_PART {
                VD d;
                memcpy(&d, x + 64 * r + 8 * c + SPAN * p, sizeof d);
                VL bits = (VL)d & INT64_MAX;
                bad |= bits > 0x7fefffffffffffff;
                small[p] -= bits < 0x0010000000000000;
                zeros[p] -= bits == 0;
                low[p] = MIND(d, low[p]);
                high[p] = MAXD(d, high[p]);
                sum[turn][p] += d;
                square[turn][p] += d * d;
                lane[turn][p] += FLIP(d, bytes[8 * r + c], p);
            }
        }
        EACH_PART {
            VD all = TURNS == 2 ? lane[0][p] + lane[TURNS - 1][p] : lane[0][p];
            memcpy(g->lanes + 8 * c + SPAN * p, &all, sizeof all);
        }
    }
    NAME(store_sums)(sum, square, g);
    memcpy(g->low, low, sizeof low);
    memcpy(g->high, high, sizeof high);
    memcpy(g->zeros, zeros, sizeof zeros);
    memcpy(g->small, small, sizeof small);
    int64_t any = 0;
    for (int j = 0; j < SPAN; j++)
        any |= bad[j];
    return any == 0;
}

static ALWAYS_INLINE int NAME(group_fast)(const void *x, int kind, const uint64_t *words, Group *g)
{
    return kind == FLOAT64 ? NAME(group_double)(x, words, g) : NAME(group_float)(x, kind, words, g);
}

/* A group with NaN or Inf: they become zeros, and are counted, first. */
static NOINLINE void NAME(group_clean)(const void *x, int kind, int size, const uint64_t *words, Group *g, Totals *t)
{
    double clean[GROUP], low = INFINITY, high = -INFINITY;
    int64_t zeros = 0, small = 0;
    for (int i = 0; i < GROUP; i++) {
        double d = i < size ? as_double(x, i, kind) : 0.0;
        int64_t bits;
        memcpy(&bits, &d, sizeof bits);
        int64_t magnitude = bits & INT64_MAX;
        int finite = magnitude < 0x7ff0000000000000, inf = magnitude == 0x7ff0000000000000;
        t->nan += !finite & !inf;
        t->posinf += inf & (bits >= 0);
        t->neginf += inf & (bits < 0);
        clean[i] = finite ? d : 0.0;
        if (finite && i < size) {
            low = d < low ? d : low;
            high = d > high ? d : high;
            zeros += magnitude == 0;
            small += fabs(d) < TINY[kind] || magnitude == 0;
        }
    }
    NAME(group_double)(clean, words, g);
    for (int j = 0; j < 8; j++) {
        g->low[j] = low;
        g->high[j] = high;
        g->zeros[j] = g->small[j] = 0;
    }
    g->zeros[0] = zeros;
    g->small[0] = small;
}

/* The last, shorter group: padded with zeros, which are taken out of the counts and of the extremes again. */
static NOINLINE void NAME(group_last)(const void *x, int kind, int size, const uint64_t *words, Group *g, Totals *t)
{
    double padded[GROUP] = {0};
    memcpy(padded, x, (size_t)size * WIDTH[kind]);
    if (!NAME(group_fast)(padded, kind, words, g)) {
        NAME(group_clean)(x, kind, size, words, g, t);
        return;
    }
    g->zeros[0] -= GROUP - size;
    g->small[0] -= GROUP - size;
    double low = INFINITY, high = -INFINITY;
    for (int j = 0; j < 8; j++) {
        low = g->low[j] < low ? g->low[j] : low;
        high = g->high[j] > high ? g->high[j] : high;
    }
    if (low == 0.0 || high == 0.0) { /* perhaps the padding's zero */
        low = INFINITY, high = -INFINITY;
        for (int i = 0; i < size; i++) {
            double d = as_double(x, i, kind);
            low = d < low ? d : low;
            high = d > high ? d : high;
        }
    }
    for (int j = 0; j < 8; j++)
        g->low[j] = low, g->high[j] = high;
}

static ALWAYS_INLINE void NAME(run_kind)(const char *x, int64_t n, int kind, Totals *t)
{
    for (int64_t i = 0; i * GROUP < n; i++) {
        Group g;
        uint64_t words[8];
        const char *at = x + i * GROUP * WIDTH[kind];
        int64_t left = n - i * GROUP;
        for (int r = 0; r < 8; r++)
            words[r] = splitmix64((uint64_t)(8 * i + r));
        if (left < GROUP)
            NAME(group_last)(at, kind, (int)left, words, &g, t);
        else if (!NAME(group_fast)(at, kind, words, &g))
            NAME(group_clean)(at, kind, GROUP, words, &g, t);
        int shift = 8 * (int)(splitmix64((uint64_t)i ^ GOLDEN) >> 61);
        for (int c = 0; c < 64; c += 8)
            for (int j = 0; j < 8; j++)
                t->lanes[((c + shift) & 63) + j] += g.lanes[c + j];
        for (int j = 0; j < 8; j++) {
            t->sum[j] = compensated(t->sum[j], g.sum[j], &t->rest[j]);
            t->square[j] += g.square[j];
            t->low[j] = g.low[j] < t->low[j] ? g.low[j] : t->low[j];
            t->high[j] = g.high[j] > t->high[j] ? g.high[j] : t->high[j];
            t->zeros[j] += g.zeros[j];
            t->small[j] += g.small[j];
        }
    }
}

static void NAME(run)(const char *x, int64_t n, int kind, Totals *t)
{
    switch (kind) { /* each call is inlined with its kind known */
    case FLOAT32: NAME(run_kind)(x, n, FLOAT32, t); break;
    case FLOAT64: NAME(run_kind)(x, n, FLOAT64, t); break;
    case FLOAT16: NAME(run_kind)(x, n, FLOAT16, t); break;
    default: NAME(run_kind)(x, n, BFLOAT16, t); break;
    }
}

#undef EACH_PART
#undef VD
#undef VL
#undef PARTS
#undef TURNS
#undef SPAN
#undef WIDEN
#undef FLIP
#undef MIND
#undef MAXD
#undef MAXU
#undef MINF
#undef MAXF
#undef EQUAL
#undef ABOVE
#undef COUNT_BELOW
#undef PICK
#undef PICKD
