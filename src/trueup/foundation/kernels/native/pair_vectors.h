/* Counting and choosing, for one instruction set: included by level.h after vectors.h.
 *
 * count_...(count, x, y) adds one in each place where it is so. AVX-512 compares into mask registers, of which compilers make
 * vectors again unless told not to.
 */
typedef uint8_t Bytes VECTOR;

#if LEVEL == 512
#define ADD_ONES(width, count, mask) \
    _mm512_mask_sub_epi##width((__m512i)(count), mask, (__m512i)(count), _mm512_set1_epi##width(-1))
static ALWAYS_INLINE Bits_double count_less_double(Bits_double count, Vector_double x, Vector_double y)
{
    return (Bits_double)ADD_ONES(64, count, _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_LT_OQ));
}
static ALWAYS_INLINE Bits_float count_same_float(Bits_float count, Vector_float x, Vector_float y)
{
    return (Bits_float)ADD_ONES(32, count, _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_EQ_OQ));
}
static ALWAYS_INLINE Bits_double count_same_double(Bits_double count, Vector_double x, Vector_double y)
{
    return (Bits_double)ADD_ONES(64, count, _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_EQ_OQ));
}
static ALWAYS_INLINE Bits_float count_common_float(Bits_float count, Bits_float x, Bits_float y)
{
    return (Bits_float)ADD_ONES(32, count, _mm512_test_epi32_mask((__m512i)x, (__m512i)y));
}
static ALWAYS_INLINE Bits_double count_common_double(Bits_double count, Bits_double x, Bits_double y)
{
    return (Bits_double)ADD_ONES(64, count, _mm512_test_epi64_mask((__m512i)x, (__m512i)y));
}
/* x where x > floor, else instead. */
static ALWAYS_INLINE Vector_double above(Vector_double x, Vector_double floor, Vector_double instead)
{
    __mmask8 m = _mm512_cmp_pd_mask((__m512d)x, (__m512d)floor, _CMP_GT_OQ);
    return (Vector_double)_mm512_mask_blend_pd(m, (__m512d)instead, (__m512d)x);
}
static ALWAYS_INLINE Bits_float least_float(Bits_float a, Bits_float b) { return (Bits_float)_mm512_min_epu32((__m512i)a, (__m512i)b); }
static ALWAYS_INLINE Bits_float most_float(Bits_float a, Bits_float b) { return (Bits_float)_mm512_max_epu32((__m512i)a, (__m512i)b); }
static ALWAYS_INLINE Bits_double least_double(Bits_double a, Bits_double b) { return (Bits_double)_mm512_min_epu64((__m512i)a, (__m512i)b); }
static ALWAYS_INLINE Bits_double most_double(Bits_double a, Bits_double b) { return (Bits_double)_mm512_max_epu64((__m512i)a, (__m512i)b); }
/* How many bits it takes to write x. */
static ALWAYS_INLINE Bits_float length_float(Bits_float x) { return 32 - (Bits_float)_mm512_lzcnt_epi32((__m512i)x); }
static ALWAYS_INLINE Bits_double length_double(Bits_double x) { return 64 - (Bits_double)_mm512_lzcnt_epi64((__m512i)x); }
static ALWAYS_INLINE void store_bytes_float(uint8_t *to, Bits_float x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x)); }
static ALWAYS_INLINE void store_bytes_double(uint8_t *to, Bits_double x) { _mm_storel_epi64((__m128i *)to, _mm512_cvtepi64_epi8((__m512i)x)); }
static ALWAYS_INLINE Bytes count_byte(Bytes count, Bytes x, Bytes key)
{
    __mmask64 m = _mm512_cmpeq_epi8_mask((__m512i)x, (__m512i)key);
    return (Bytes)_mm512_mask_sub_epi8((__m512i)count, m, (__m512i)count, _mm512_set1_epi8(-1));
}

#else
static ALWAYS_INLINE Bits_double count_less_double(Bits_double count, Vector_double x, Vector_double y) { return count - (Bits_double)(x < y); }
static ALWAYS_INLINE Bits_float count_same_float(Bits_float count, Vector_float x, Vector_float y) { return count - (Bits_float)(x == y); }
static ALWAYS_INLINE Bits_double count_same_double(Bits_double count, Vector_double x, Vector_double y) { return count - (Bits_double)(x == y); }
static ALWAYS_INLINE Bits_float count_common_float(Bits_float count, Bits_float x, Bits_float y) { return count - (Bits_float)((x & y) != 0); }
static ALWAYS_INLINE Bits_double count_common_double(Bits_double count, Bits_double x, Bits_double y) { return count - (Bits_double)((x & y) != 0); }
#if LEVEL == 256
static ALWAYS_INLINE Vector_double above(Vector_double x, Vector_double floor, Vector_double instead)
{
    return (Vector_double)_mm256_blendv_pd((__m256d)instead, (__m256d)x, (__m256d)(x > floor));
}
static ALWAYS_INLINE Bits_float least_float(Bits_float a, Bits_float b) { return (Bits_float)_mm256_min_epu32((__m256i)a, (__m256i)b); }
static ALWAYS_INLINE Bits_float most_float(Bits_float a, Bits_float b) { return (Bits_float)_mm256_max_epu32((__m256i)a, (__m256i)b); }
/* Of numbers below 2**63: their signed order is the unsigned one. */
static ALWAYS_INLINE Bits_double least_double(Bits_double a, Bits_double b)
{
    return (Bits_double)_mm256_blendv_epi8((__m256i)a, (__m256i)b, _mm256_cmpgt_epi64((__m256i)a, (__m256i)b));
}
static ALWAYS_INLINE Bits_double most_double(Bits_double a, Bits_double b)
{
    return (Bits_double)_mm256_blendv_epi8((__m256i)b, (__m256i)a, _mm256_cmpgt_epi64((__m256i)a, (__m256i)b));
}
#else
static ALWAYS_INLINE Vector_double above(Vector_double x, Vector_double floor, Vector_double instead)
{
    Mask_double m = x > floor;
    return (Vector_double)(((Mask_double)x & m) | ((Mask_double)instead & ~m));
}
/* Of numbers below 2**63: their signed order is the unsigned one. */
static ALWAYS_INLINE Bits_float least_float(Bits_float a, Bits_float b)
{
    Bits_float m = (Bits_float)((Mask_float)a < (Mask_float)b);
    return (a & m) | (b & ~m);
}
static ALWAYS_INLINE Bits_float most_float(Bits_float a, Bits_float b)
{
    Bits_float m = (Bits_float)((Mask_float)a < (Mask_float)b);
    return (b & m) | (a & ~m);
}
static ALWAYS_INLINE Bits_double least_double(Bits_double a, Bits_double b)
{
    Bits_double m = (Bits_double)((Mask_double)a < (Mask_double)b);
    return (a & m) | (b & ~m);
}
static ALWAYS_INLINE Bits_double most_double(Bits_double a, Bits_double b)
{
    Bits_double m = (Bits_double)((Mask_double)a < (Mask_double)b);
    return (b & m) | (a & ~m);
}
#endif
/* By the exponent of x / 2 as a float, which is signed; below its leading bit one is cleared, so that rounding cannot carry. */
static ALWAYS_INLINE Bits_float length_float(Bits_float x)
{
    const Bits_float half = x >> 1, even = half & ~(half >> 8);
    const Bits_float exponent = (Bits_float)__builtin_convertvector((Mask_float)even, Vector_float) >> 23;
    return ((exponent - 126) & (Bits_float)(half != 0)) - (Bits_float)(x != 0);
}
#if LEVEL == 256
/* By its halves: the length of the upper one and 32, unless that is nothing. */
static ALWAYS_INLINE Bits_double length_double(Bits_double x)
{
    const Bits_double both = (Bits_double)length_float((Bits_float)x), upper = both >> 32;
    const Bits_double some = (Bits_double)(upper != 0);
    return ((upper + 32) & some) | (both & 0xff & ~some);
}
static ALWAYS_INLINE void store_bytes_float(uint8_t *to, Bits_float x)
{
    const __m256i first = _mm256_set1_epi32(0x0c080400); /* of each quarter */
    const __m256i v = _mm256_shuffle_epi8((__m256i)x, first);
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static ALWAYS_INLINE void store_bytes_double(uint8_t *to, Bits_double x)
{
    const __m256i v = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi16(0x0800));
    const int four = _mm_cvtsi128_si32(_mm_unpacklo_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
    memcpy(to, &four, sizeof four);
}
#else
static ALWAYS_INLINE Bits_double length_double(Bits_double x)
{
    Bits_double length;
    for (int j = 0; j < DOUBLES; j++)
        length[j] = x[j] ? 64 - (uint64_t)__builtin_clzll(x[j]) : 0;
    return length;
}
static ALWAYS_INLINE void store_bytes_float(uint8_t *to, Bits_float x)
{
    for (int j = 0; j < FLOATS; j++)
        to[j] = (uint8_t)x[j];
}
static ALWAYS_INLINE void store_bytes_double(uint8_t *to, Bits_double x)
{
    for (int j = 0; j < DOUBLES; j++)
        to[j] = (uint8_t)x[j];
}
#endif
static ALWAYS_INLINE Bytes count_byte(Bytes count, Bytes x, Bytes key) { return count - (Bytes)(x == key); }
#endif

static ALWAYS_INLINE double sum_of(Vector_double v)
{
    double eight[8] = {0};
    memcpy(eight, &v, sizeof v);
    return ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]));
}

static ALWAYS_INLINE double top_of(Vector_double v)
{
    double top = v[0];
    for (int j = 1; j < DOUBLES; j++)
        top = v[j] > top ? v[j] : top;
    return top;
}

/* Count each value of `n` bytes (a multiple of 64, at most 2048, so that a byte holds the count of one place). */
static NOINLINE void count_bytes(const uint8_t *bytes, int n, int64_t *counts)
{
    enum { WIDTH = sizeof(Bytes) };
    Bytes low, high, v;
    memcpy(&low, bytes, WIDTH);
    high = low;
    for (int i = WIDTH; i < n; i += WIDTH) {
        memcpy(&v, bytes + i, WIDTH);
        Bytes less = (Bytes)(v < low), more = (Bytes)(v > high);
        low = (v & less) | (low & ~less);
        high = (v & more) | (high & ~more);
    }
    int from = low[0], to = high[0];
    for (int j = 1; j < WIDTH; j++) {
        from = low[j] < from ? low[j] : from;
        to = high[j] > to ? high[j] : to;
    }
    for (int value = from, left = n; value <= to; value++) {
        if (value == to) { /* the others are known */
            counts[value] += left;
            break;
        }
        const Bytes key = (Bytes){0} + (uint8_t)value;
        Bytes count = {0};
        for (int i = 0; i < n; i += WIDTH) {
            memcpy(&v, bytes + i, WIDTH);
            count = count_byte(count, v, key);
        }
        int found = 0;
        for (int j = 0; j < WIDTH; j++)
            found += count[j];
        counts[value] += found;
        left -= found;
    }
}
