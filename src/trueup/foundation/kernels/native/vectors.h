/* The few operations whose instructions matter, for one instruction set: included by level_*.c, which sets LEVEL.
 *
 * A register holds as many floats (Vector_float) or doubles (Vector_double) as LEVEL / 8 bytes; the rest is written with the
 * vector extensions of GCC and Clang. Bits are compared as integers.
 */
#include "kernel.h"

#define VECTOR __attribute__((vector_size(LEVEL / 8)))
typedef float Vector_float VECTOR;
typedef double Vector_double VECTOR;
typedef uint32_t Bits_float VECTOR;
typedef int32_t Mask_float VECTOR;
typedef uint64_t Bits_double VECTOR;
typedef int64_t Mask_double VECTOR;
enum { FLOATS = LEVEL / 32, DOUBLES = LEVEL / 64 };

#if LEVEL == 512
static ALWAYS_INLINE Vector_float min_float(Vector_float a, Vector_float b) { return (Vector_float)_mm512_min_ps((__m512)a, (__m512)b); }
static ALWAYS_INLINE Vector_float max_float(Vector_float a, Vector_float b) { return (Vector_float)_mm512_max_ps((__m512)a, (__m512)b); }
static ALWAYS_INLINE Vector_double min_double(Vector_double a, Vector_double b) { return (Vector_double)_mm512_min_pd((__m512d)a, (__m512d)b); }
static ALWAYS_INLINE Vector_double max_double(Vector_double a, Vector_double b) { return (Vector_double)_mm512_max_pd((__m512d)a, (__m512d)b); }
enum { LEAST_MAGNITUDE = 2 | 2 << 2 }; /* the smaller magnitude, without its sign */
static ALWAYS_INLINE Vector_float smaller_float(Vector_float v, Vector_float least) { return (Vector_float)_mm512_range_ps((__m512)v, (__m512)least, LEAST_MAGNITUDE); }
static ALWAYS_INLINE Vector_double smaller_double(Vector_double v, Vector_double least) { return (Vector_double)_mm512_range_pd((__m512d)v, (__m512d)least, LEAST_MAGNITUDE); }
/* The p-th part of a register of floats `v`, which lie at `x`, as doubles. */
static ALWAYS_INLINE Vector_double part_float(const float *x, Vector_float v, int p)
{
#if defined(__clang__)
    (void)x;
    return (Vector_double)_mm512_cvtps_pd(p ? _mm512_extractf32x8_ps((__m512)v, 1) : _mm512_castps512_ps256((__m512)v));
#else
    (void)v; /* loading again takes less than taking a register apart, but Clang then makes half the speed of it */
    return (Vector_double)_mm512_cvtps_pd(_mm256_loadu_ps(x + DOUBLES * p));
#endif
}
/* One more where bits < limit, and whether any are; the sign bits are clear. */
static ALWAYS_INLINE Bits_float count_below_float(Bits_float count, Bits_float bits, Bits_float limit)
{
    __mmask16 m = _mm512_cmplt_epu32_mask((__m512i)bits, (__m512i)limit);
    return (Bits_float)_mm512_mask_sub_epi32((__m512i)count, m, (__m512i)count, _mm512_set1_epi32(-1));
}
static ALWAYS_INLINE Bits_double count_below_double(Bits_double count, Bits_double bits, Bits_double limit)
{
    __mmask8 m = _mm512_cmplt_epu64_mask((__m512i)bits, (__m512i)limit);
    return (Bits_double)_mm512_mask_sub_epi64((__m512i)count, m, (__m512i)count, _mm512_set1_epi64(-1));
}
static ALWAYS_INLINE int any_below_float(Bits_float bits, Bits_float limit) { return _mm512_cmplt_epu32_mask((__m512i)bits, (__m512i)limit) != 0; }
static ALWAYS_INLINE int any_below_double(Bits_double bits, Bits_double limit) { return _mm512_cmplt_epu64_mask((__m512i)bits, (__m512i)limit) != 0; }
/* One more where v is not 0. */
static ALWAYS_INLINE Bits_float count_others_float(Bits_float count, Vector_float v)
{
    __mmask16 m = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return (Bits_float)_mm512_mask_sub_epi32((__m512i)count, m, (__m512i)count, _mm512_set1_epi32(-1));
}
static ALWAYS_INLINE int reaches_float(Vector_float low, Vector_float high, float limit)
{
    return _mm512_cmp_ps_mask((__m512)low, _mm512_set1_ps(-limit), _CMP_LE_OQ) |
           _mm512_cmp_ps_mask((__m512)high, _mm512_set1_ps(limit), _CMP_GE_OQ);
}
static ALWAYS_INLINE int reaches_double(Vector_double low, Vector_double high, double limit)
{
    return _mm512_cmp_pd_mask((__m512d)low, _mm512_set1_pd(-limit), _CMP_LE_OQ) |
           _mm512_cmp_pd_mask((__m512d)high, _mm512_set1_pd(limit), _CMP_GE_OQ);
}
static ALWAYS_INLINE int64_t total_float(Bits_float v) { return _mm512_reduce_add_epi32((__m512i)v); }
static ALWAYS_INLINE int64_t total_double(Bits_double v) { return _mm512_reduce_add_epi64((__m512i)v); }
static ALWAYS_INLINE Bits_double product32(Bits_double a, Bits_double b) { return (Bits_double)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
static ALWAYS_INLINE Bits_double swap_pairs(Bits_double a) { return (Bits_double)_mm512_shuffle_epi32((__m512i)a, 0x4E); }

#else
static ALWAYS_INLINE int64_t total_float(Bits_float v)
{
    int64_t sum = 0;
    for (int j = 0; j < FLOATS; j++)
        sum += v[j];
    return sum;
}
static ALWAYS_INLINE int64_t total_double(Bits_double v)
{
    int64_t sum = 0;
    for (int j = 0; j < DOUBLES; j++)
        sum += (int64_t)v[j];
    return sum;
}
static ALWAYS_INLINE Bits_float count_below_float(Bits_float count, Bits_float bits, Bits_float limit)
{
    return count - (Bits_float)((Mask_float)bits < (Mask_float)limit);
}
static ALWAYS_INLINE Bits_double count_below_double(Bits_double count, Bits_double bits, Bits_double limit)
{
    return count - (Bits_double)((Mask_double)bits < (Mask_double)limit);
}
static ALWAYS_INLINE Bits_float count_others_float(Bits_float count, Vector_float v)
{
    return count - (Bits_float)(v != 0);
}
#endif

#if LEVEL == 256
static ALWAYS_INLINE Vector_float min_float(Vector_float a, Vector_float b) { return (Vector_float)_mm256_min_ps((__m256)a, (__m256)b); }
static ALWAYS_INLINE Vector_float max_float(Vector_float a, Vector_float b) { return (Vector_float)_mm256_max_ps((__m256)a, (__m256)b); }
static ALWAYS_INLINE Vector_double min_double(Vector_double a, Vector_double b) { return (Vector_double)_mm256_min_pd((__m256d)a, (__m256d)b); }
static ALWAYS_INLINE Vector_double max_double(Vector_double a, Vector_double b) { return (Vector_double)_mm256_max_pd((__m256d)a, (__m256d)b); }
static ALWAYS_INLINE Vector_double part_float(const float *x, Vector_float v, int p)
{
    (void)x;
    return (Vector_double)_mm256_cvtps_pd(p ? _mm256_extractf128_ps((__m256)v, 1) : _mm256_castps256_ps128((__m256)v));
}
static ALWAYS_INLINE int any_below_float(Bits_float bits, Bits_float limit)
{
    return _mm256_movemask_ps((__m256)((Mask_float)bits < (Mask_float)limit)) != 0;
}
static ALWAYS_INLINE int any_below_double(Bits_double bits, Bits_double limit)
{
    return _mm256_movemask_pd((__m256d)((Mask_double)bits < (Mask_double)limit)) != 0;
}
static ALWAYS_INLINE int reaches_float(Vector_float low, Vector_float high, float limit)
{
    return _mm256_movemask_ps((__m256)((low <= -limit) | (high >= limit)));
}
static ALWAYS_INLINE int reaches_double(Vector_double low, Vector_double high, double limit)
{
    return _mm256_movemask_pd((__m256d)((low <= -limit) | (high >= limit)));
}
static ALWAYS_INLINE Bits_double product32(Bits_double a, Bits_double b) { return (Bits_double)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
static ALWAYS_INLINE Bits_double swap_pairs(Bits_double a) { return (Bits_double)_mm256_shuffle_epi32((__m256i)a, 0x4E); }

#elif LEVEL == 128
#if defined(__aarch64__)
static ALWAYS_INLINE Vector_float min_float(Vector_float a, Vector_float b) { return (Vector_float)vminq_f32((float32x4_t)a, (float32x4_t)b); }
static ALWAYS_INLINE Vector_float max_float(Vector_float a, Vector_float b) { return (Vector_float)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
static ALWAYS_INLINE Vector_double min_double(Vector_double a, Vector_double b) { return (Vector_double)vminq_f64((float64x2_t)a, (float64x2_t)b); }
static ALWAYS_INLINE Vector_double max_double(Vector_double a, Vector_double b) { return (Vector_double)vmaxq_f64((float64x2_t)a, (float64x2_t)b); }
static ALWAYS_INLINE Vector_double part_float(const float *x, Vector_float v, int p)
{
    (void)x;
    return (Vector_double)(p ? vcvt_high_f64_f32((float32x4_t)v) : vcvt_f64_f32(vget_low_f32((float32x4_t)v)));
}
static ALWAYS_INLINE Bits_double product32(Bits_double a, Bits_double b)
{
    return (Bits_double)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}
static ALWAYS_INLINE Bits_double swap_pairs(Bits_double a) { return (Bits_double)vextq_u64((uint64x2_t)a, (uint64x2_t)a, 1); }
#else
static ALWAYS_INLINE Vector_float pick_float(Mask_float m, Vector_float a, Vector_float b)
{
    return (Vector_float)(((Mask_float)a & m) | ((Mask_float)b & ~m));
}
static ALWAYS_INLINE Vector_double pick_double(Mask_double m, Vector_double a, Vector_double b)
{
    return (Vector_double)(((Mask_double)a & m) | ((Mask_double)b & ~m));
}
static ALWAYS_INLINE Vector_float min_float(Vector_float a, Vector_float b) { return pick_float(a < b, a, b); }
static ALWAYS_INLINE Vector_float max_float(Vector_float a, Vector_float b) { return pick_float(a > b, a, b); }
static ALWAYS_INLINE Vector_double min_double(Vector_double a, Vector_double b) { return pick_double(a < b, a, b); }
static ALWAYS_INLINE Vector_double max_double(Vector_double a, Vector_double b) { return pick_double(a > b, a, b); }
static ALWAYS_INLINE Vector_double part_float(const float *x, Vector_float v, int p)
{
    (void)x;
    return (Vector_double){v[2 * p], v[2 * p + 1]};
}
#if defined(__SSE2__)
static ALWAYS_INLINE Bits_double product32(Bits_double a, Bits_double b) { return (Bits_double)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
static ALWAYS_INLINE Bits_double product32(Bits_double a, Bits_double b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif
static ALWAYS_INLINE Bits_double swap_pairs(Bits_double a) { return (Bits_double){a[1], a[0]}; }
#endif
static ALWAYS_INLINE int any_below_float(Bits_float bits, Bits_float limit)
{
    Mask_float m = (Mask_float)bits < (Mask_float)limit;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
static ALWAYS_INLINE int any_below_double(Bits_double bits, Bits_double limit)
{
    Mask_double m = (Mask_double)bits < (Mask_double)limit;
    return (m[0] | m[1]) != 0;
}
static ALWAYS_INLINE int reaches_float(Vector_float low, Vector_float high, float limit)
{
    Mask_float m = (low <= -limit) | (high >= limit);
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
static ALWAYS_INLINE int reaches_double(Vector_double low, Vector_double high, double limit)
{
    Mask_double m = (low <= -limit) | (high >= limit);
    return (m[0] | m[1]) != 0;
}
#endif

static ALWAYS_INLINE Vector_double part_double(const double *x, Vector_double v, int p)
{
    (void)x, (void)p;
    return v;
}

static ALWAYS_INLINE int all_finite(Vector_double v)
{
    const Bits_double largest = (Bits_double)((Vector_double){0} + INFINITY) - 1, unsign = ((Bits_double){0} - 1) >> 1;
    return !any_below_double(largest, (Bits_double)v & unsign);
}

/* lane + d, or lane - d where the element's sign bit is set: `signs` are a row's 8 bytes, `at` the column. A product with 1 or -1 is
 * exact, so that one instruction that rounds once does both. */
static ALWAYS_INLINE Vector_double lane_add(Vector_double lane, Vector_double d, const uint8_t *signs, int at)
{
    Vector_double sign;
    memcpy(&sign, SIGNS[signs[at / 8]] + at % 8, sizeof sign);
    return lane + d * sign;
}
