/* One group of the sketch, 512 elements, with GCC vector extensions: included once per instruction set.
 *
 * Before inclusion: NAME(f) gives a function its name in this instruction set, LEVEL is 0 (plain), 2 (AVX2), 512 (AVX-512).
 * Eight elements are a column; a VF holds as many of its floats as a register does, HALVES of them the column; a VD as many
 * of its doubles, PARTS of them the column (GCC takes vectors wider than a register apart badly). Within a
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
#define WIDEN(v, p) __builtin_convertvector(((vf2){(v)[2 * (p)], (v)[2 * (p) + 1]}), vd2)
#define PICKD(m, a, b) ((vd2)(((vl2)(a) & (m)) | ((vl2)(b) & ~(m))))
#define MIND(a, b) PICKD((a) < (b), a, b)
#define MAXD(a, b) PICKD((a) > (b), a, b)
#endif
#define SPAN (8 / PARTS)
#define EACH_PART_OF_HALF _Pragma("GCC unroll 4") for (int p = 0; p < PARTS / HALVES; p++)
#define EACH_HALF _Pragma("GCC unroll 2") for (int h = 0; h < HALVES; h++)
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
#define VF vf8
#define VI vi8
#define VU vu8
#define HALVES 1
#define MAXU(a, b) ((vu8)_mm256_max_epu32((__m256i)(a), (__m256i)(b)))
#define MINF(a, b) ((vf8)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MAXF(a, b) ((vf8)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define EQUAL(a, b) ((vi8)_mm256_cmpeq_epi32((__m256i)(a), (__m256i)(b)))
#define ABOVE(a, b) ((vi8)_mm256_cmpgt_epi32((__m256i)(a), (__m256i)(b)))
#else
#define VF vf4
#define VI vi4
#define VU vu4
#define HALVES 2
#define PICK(t, m, a, b) ((t)(((vi4)(a) & (m)) | ((vi4)(b) & ~(m))))
#define MAXU(a, b) PICK(vu4, (vi4)(a) > (vi4)(b), a, b) /* the sign bit is clear */
#define MINF(a, b) PICK(vf4, (a) < (b), a, b)
#define MAXF(a, b) PICK(vf4, (a) > (b), a, b)
#define EQUAL(a, b) ((vi4)(a) == (vi4)(b))
#define ABOVE(a, b) ((vi4)(a) > (vi4)(b))
#endif

/* As many elements as a VF holds, as float32: exact for the three kinds. */
static ALWAYS_INLINE VF NAME(load)(const void *x, int at, int kind)
{
    VF v = {0};
    const uint16_t *half = (const uint16_t *)x + at;
    if (kind == FLOAT32) {
        memcpy(&v, (const float *)x + at, sizeof v);
        return v;
    }
#if LEVEL >= 2
    __m128i bits = _mm_loadu_si128((const __m128i *)half);
    return kind == BFLOAT16 ? (VF)((VU)_mm256_cvtepu16_epi32(bits) << 16) : (VF)_mm256_cvtph_ps(bits);
#else
    if (kind == BFLOAT16)
        return (VF)((VU){half[0], half[1], half[2], half[3]} << 16);
    for (int j = 0; j < 4; j++)
        v[j] = half_to_float(half[j]);
    return v;
#endif
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
    VF low[2][HALVES], high[2][HALVES];
    const VU nothing = {0}, tiny = (VU){0} + TINY_BITS[kind];
    VU most[HALVES];
    VI zeros[HALVES], small[HALVES];
    EACH_HALF {
        low[0][h] = low[1][h] = (VF){0} + INFINITY;
        high[0][h] = high[1][h] = (VF){0} - INFINITY;
        most[h] = nothing;
        zeros[h] = small[h] = (VI){0};
    }
    for (int c = 0; c < 8; c++) {
        VD lane[TURNS][PARTS];
        memset(lane, 0, sizeof lane);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            const int turn = r & (TURNS - 1);
            EACH_HALF {
                VF v = NAME(load)(x, 64 * r + 8 * c + 8 / HALVES * h, kind);
                VU bits = (VU)v & 0x7fffffffu;
                most[h] = MAXU(most[h], bits);
                zeros[h] -= EQUAL(bits, nothing);
                COUNT_BELOW(small[h], bits, tiny);
                low[r & 1][h] = MINF(v, low[r & 1][h]);
                high[r & 1][h] = MAXF(v, high[r & 1][h]);
                EACH_PART_OF_HALF {
                    const int q = PARTS / HALVES * h + p;
                    VD d = WIDEN(v, p);
                    sum[turn][q] += d;
                    square[turn][q] += d * d;
                    lane[turn][q] += FLIP(d, bytes[8 * r + c], q);
                }
            }
        }
        EACH_PART {
            VD all = TURNS == 2 ? lane[0][p] + lane[TURNS - 1][p] : lane[0][p];
            memcpy(g->lanes + 8 * c + SPAN * p, &all, sizeof all);
        }
    }
    NAME(store_sums)(sum, square, g);
    EACH_HALF {
        VF lowest = MINF(low[0][h], low[1][h]), highest = MAXF(high[0][h], high[1][h]);
        EACH_PART_OF_HALF {
            VD least = WIDEN(lowest, p), greatest = WIDEN(highest, p);
            memcpy(g->low + SPAN * (PARTS / HALVES * h + p), &least, sizeof least);
            memcpy(g->high + SPAN * (PARTS / HALVES * h + p), &greatest, sizeof greatest);
        }
    }
    int32_t counts[3][8], over = 0;
    memcpy(counts[0], zeros, sizeof zeros);
    memcpy(counts[1], small, sizeof small);
    memcpy(counts[2], most, sizeof most);
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
#undef VF
#undef VI
#undef VU
#undef HALVES
#undef EACH_HALF
#undef EACH_PART_OF_HALF
