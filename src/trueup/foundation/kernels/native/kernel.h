/* What one instruction set offers to measure.h: each level_*.c fills one Kernel. */
#ifndef TRUEUP_KERNEL_H
#define TRUEUP_KERNEL_H

#include "base.h"
#include "pair.h"
#include "secret.h"

/* What has been seen of a tensor. */
typedef struct {
    double lanes[LANES], sum[8], rest[8], square[8]; /* rest: what the additions to sum rounded away */
    double low, high;                                /* of the elements that count */
    int64_t nan, posinf, neginf, zero, small, saturated; /* small: zeros and subnormals */
} ALIGNED Totals;

/* What `stream` sees of one tensor, or of a pair: low, high, others and beyond of STREAM_SPREAD alone. */
enum { STREAM_SPREAD, STREAM_ALIKE, STREAM_ABOVE, STREAM_APART, STREAMS };
typedef struct {
    const char *x, *y; /* contiguous, or both dense in the same order */
    const Kind *kind_x, *kind_y;
    int64_t size;
} StreamPair;
typedef struct {
    double a, b, c, more;              /* squares of x; squares of y, or of x - y; products; signs of products, or of y - x * x */
    double low, high, others, beyond; /* extremes; elements that are not 0; elements outside of the ends */
} StreamRow;

typedef struct {
    const char *name;
    /* Add `n` reals in a row, from the `first` (a multiple of PIECE) on, to `t`. A `scale` other than 1 multiplies them. */
    void (*piece)(const char *x, int64_t first, int n, const Kind *kind, double scale, Totals *t);
    /* Hash `count` blocks: fold them into `acc`, or, if `added` is not NULL, write there what each adds. */
    void (*blocks)(const uint8_t *p, int64_t count, uint64_t *acc, uint64_t *added);
    /* Add `n` pairs of reals, from the `first` on, to `t`; the sums again, scaled. See pair.h. */
    PairPiece pair;
    PairRescale rescale;
    /* Fill a row with the elements from `at` (a multiple of PIECE) up to `end` of a tensor or pair. */
    void (*stream)(int op, const StreamPair *pair, int64_t at, int64_t end, float low, float high, StreamRow *row);
} Kernel;

extern HIDDEN const Kernel kernel_128, kernel_256, kernel_512;

#endif
