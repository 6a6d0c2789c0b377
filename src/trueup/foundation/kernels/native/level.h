/* The whole kernel for one instruction set: included by level_*.c, which sets LEVEL and the compiler's target. */
#include "vectors.h"

typedef uint32_t Word_float;
typedef uint64_t Word_double;
#define REAL float
#include "group.h"
#define REAL double
#include "group.h"
#include "pair_vectors.h"
enum { FRACTION_float = 23, FRACTION_double = 52 };
#define REAL float
#include "pair_group.h"
#define REAL double
#include "pair_group.h"

static ALWAYS_INLINE float half_value(uint16_t h)
{
    uint32_t exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return h & 0x8000 ? -value : value;
    }
    bits = (uint32_t)(h & 0x8000) << 16 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void widen_half(const uint16_t *x, int n, float *to)
{
    int i = 0;
#if LEVEL == 512
    for (; i + 16 <= n; i += 16)
        _mm512_store_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
#elif LEVEL == 256
    for (; i + 8 <= n; i += 8)
        _mm256_store_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#elif defined(__aarch64__)
    for (; i + 4 <= n; i += 4)
        vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i))));
#endif
    for (; i < n; i++)
        to[i] = half_value(x[i]);
}

/* Eight-bit floats are halves with fewer bits of either part: what a shift makes of one is a power of two away from its value, and
 * halves are widened by an instruction, subnormals too. Those of 5 bits of exponent and bias 16 are in the table: halves have no such. */
static void widen_eight(const uint8_t *x, int n, int real, float *to)
{
    const float *values = EIGHT_VALUES[(real - E4M3FN) & 3];
    int i = 0;
#if LEVEL >= 256
    if (real != E5M2FNUZ) {
        const __m256 scale = _mm256_set1_ps(real == E5M2 ? 1.0f : real == E4M3FN ? 256.0f : 128.0f);
        const __m256i magnitude = _mm256_set1_epi16(127), nan = _mm256_set1_epi16(0x7e00);
        const __m256i odd = _mm256_set1_epi16(real == E4M3FN ? 127 : 128); /* the code of NaN, without a sign or with it */
        const __m256i asked = _mm256_set1_epi16(real == E4M3FN ? 127 : 255);
        for (; i + 16 <= n; i += 16) {
            const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(x + i)));
            __m256i half = _mm256_slli_epi16(code, 8);
            if (real != E5M2) {
                const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi16(0x7fff), half);
                half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(code, magnitude), 7));
                half = _mm256_or_si256(half, _mm256_and_si256(_mm256_cmpeq_epi16(_mm256_and_si256(code, asked), odd), nan));
            }
            _mm256_store_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale));
            _mm256_store_ps(to + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale));
        }
    }
#endif
    for (; i < n; i++)
        to[i] = values[x[i]];
}

static void widen_brain(const uint16_t *x, int n, float *to)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

#define WIDEN(type, value)                 \
    do {                                   \
        const type *from = (const void *)x; \
        for (int i = 0; i < n; i++)        \
            to[i] = value;                 \
    } while (0)

static void widen_float(const char *x, int n, int real, float *to)
{
    switch (real) {
    case FLOAT16: widen_half((const void *)x, n, to); break;
    case BFLOAT16: widen_brain((const void *)x, n, to); break;
    case INT8: WIDEN(int8_t, from[i]); break;
    case INT16: WIDEN(int16_t, from[i]); break;
    case UINT8: WIDEN(uint8_t, from[i]); break;
    case UINT16: WIDEN(uint16_t, from[i]); break;
    case BOOL: WIDEN(uint8_t, from[i] != 0); break;
    default: widen_eight((const void *)x, n, real, to); break;
    }
}

static void widen_double(const char *x, int n, int real, double *to)
{
    switch (real) {
    case INT32: WIDEN(int32_t, from[i]); break;
    case UINT32: WIDEN(uint32_t, from[i]); break;
    case INT64: WIDEN(int64_t, (double)from[i]); break;
    default: WIDEN(uint64_t, (double)from[i]); break;
    }
}

static void piece(const char *x, int64_t first, int n, const Kind *kind, double scale, Totals *t)
{
    const int64_t group = first / GROUP;
    const char *ahead = x + PIECE * kind->width;
    if (kind->real == FLOAT32) {
        run_float((const void *)x, ahead, group, n, kind, scale, t);
    } else if (kind->real == FLOAT64) {
        run_double((const void *)x, ahead, group, n, kind, scale, t);
    } else if (kind->wide) {
        double block[PIECE] ALIGNED;
        widen_double(x, n, kind->real, block);
        run_double(block, ahead, group, n, kind, scale, t);
    } else {
        float block[PIECE] ALIGNED;
        widen_float(x, n, kind->real, block);
        run_float(block, ahead, group, n, kind, scale, t);
    }
}

#include "pair_piece.h"
#include "stream.h"

enum { REGISTERS = 8 / DOUBLES }; /* that hold the accumulators of XXH3 */

static void blocks(const uint8_t *p, int64_t count, uint64_t *acc, uint64_t *added)
{
    Bits_double sum[REGISTERS], stir[REGISTERS];
    memcpy(sum, acc, sizeof sum);
    memcpy(stir, SECRET + 128, sizeof stir);
    for (; count > 0; count--, p += XXH_BLOCK) {
        Bits_double straight[REGISTERS], crossed[REGISTERS];
        memset(straight, 0, sizeof straight);
        memset(crossed, 0, sizeof crossed);
#pragma GCC unroll 16
        for (int s = 0; s < XXH_STRIPES; s++)
#pragma GCC unroll 4
            for (int j = 0; j < REGISTERS; j++) {
                Bits_double value, key;
                memcpy(&value, p + XXH_STRIPE * s + sizeof value * j, sizeof value);
                memcpy(&key, SECRET + 8 * s + sizeof key * j, sizeof key);
                key ^= value;
                straight[j] += product32(key, key >> 32);
                crossed[j] += value; /* all are swapped as one */
            }
        for (int j = 0; j < REGISTERS; j++) {
            Bits_double a = straight[j] + swap_pairs(crossed[j]);
            if (added) {
                memcpy(added + DOUBLES * j, &a, sizeof a);
                continue;
            }
            a += sum[j];
            a ^= (a >> 47) ^ stir[j];
            const Bits_double prime = (Bits_double){0} + P32_1;
            sum[j] = product32(a, prime) + (product32(a >> 32, prime) << 32);
        }
        if (added)
            added += 8;
    }
    if (!added)
        memcpy(acc, sum, sizeof sum);
}
