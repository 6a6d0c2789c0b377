/* What every part of the kernel shares: vector types, the table of kinds, the signs of the sketch. */
#ifndef TRUEUP_BASE_H
#define TRUEUP_BASE_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel reads little-endian numbers; the NumPy twin serves this machine"
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))

enum { LANES = 64, ROWS = 8, GROUP = LANES * ROWS, NUMBERS = 10 };
enum { PIECE = 4 * GROUP };  /* elements taken at a time: 2 to 16 KB, which the first-level cache holds */
enum { CHUNK = 16 * PIECE }; /* elements of a partial result: fixed, so that no sum depends on the number of threads */

/* As in KINDS of _compiled.py. */
enum {
    FLOAT32, FLOAT64, FLOAT16, BFLOAT16, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ,
    INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64, BOOL, COMPLEX64, COMPLEX128, COMPLEX32, KINDS
};

/* How a kind is read. Reals of up to 24 bits are taken as float32, the others as float64. */
typedef struct {
    int real;             /* the kind of one real: its own, but for complex kinds */
    int width, parts;     /* bytes of a real; reals in an element */
    int wide;             /* taken as float64 */
    int masking;          /* what is saturated can only be a mask: left out like Inf */
    double tiny, largest; /* smallest normal number, and from where on a finite one is saturated; 0 and Inf: there is no such thing */
} Kind;

/* A mask made in bfloat16 and cast to float32 is one there, too. */
#define SINGLE 1, 0x1p-126, 0x1.fep127
#define DOUBLE 1, 0x1p-1022, 0x1.fffffffffffffp1023
#define HALF 0, 0x1p-14, 65504.0
#define WHOLE 0, 0.0, INFINITY
static const Kind KIND[KINDS] = {
    [FLOAT32] = {FLOAT32, 4, 1, 0, SINGLE},
    [FLOAT64] = {FLOAT64, 8, 1, 1, DOUBLE},
    [FLOAT16] = {FLOAT16, 2, 1, 0, HALF},
    [BFLOAT16] = {BFLOAT16, 2, 1, 0, 1, 0x1p-126, 0x1.fep127},
    [E4M3FN] = {E4M3FN, 1, 1, 0, 0, 0x1p-6, 448.0},
    [E5M2] = {E5M2, 1, 1, 0, 0, 0x1p-14, 57344.0},
    [E4M3FNUZ] = {E4M3FNUZ, 1, 1, 0, 0, 0x1p-7, 240.0},
    [E5M2FNUZ] = {E5M2FNUZ, 1, 1, 0, 0, 0x1p-15, 57344.0},
    [INT8] = {INT8, 1, 1, 0, WHOLE},
    [INT16] = {INT16, 2, 1, 0, WHOLE},
    [INT32] = {INT32, 4, 1, 1, WHOLE},
    [INT64] = {INT64, 8, 1, 1, WHOLE},
    [UINT8] = {UINT8, 1, 1, 0, WHOLE},
    [UINT16] = {UINT16, 2, 1, 0, WHOLE},
    [UINT32] = {UINT32, 4, 1, 1, WHOLE},
    [UINT64] = {UINT64, 8, 1, 1, WHOLE},
    [BOOL] = {BOOL, 1, 1, 0, WHOLE},
    [COMPLEX64] = {FLOAT32, 4, 2, 0, SINGLE},
    [COMPLEX128] = {FLOAT64, 8, 2, 1, DOUBLE},
    [COMPLEX32] = {FLOAT16, 2, 2, 0, HALF},
};

#define HIDDEN __attribute__((visibility("hidden")))
extern HIDDEN float EIGHT_VALUES[4][256];   /* the eight-bit floats by kind - E4M3FN and code */
extern HIDDEN double SIGNS[256][8] ALIGNED;   /* for each byte of a sign word, 1 or -1 for eight doubles */
HIDDEN void make_tables(void);

#define GOLDEN 0x9E3779B97F4A7C15u

static ALWAYS_INLINE uint64_t splitmix64(uint64_t x)
{
    uint64_t z = x + GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

#endif
