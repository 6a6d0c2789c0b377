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

typedef struct {
    const char *name;
    /* Add `n` reals in a row, from the `first` (a multiple of PIECE) on, to `t`. A `scale` other than 1 multiplies them. */
    void (*piece)(const char *x, int64_t first, int n, const Kind *kind, double scale, Totals *t);
    /* Hash `count` blocks: fold them into `acc`, or, if `added` is not NULL, write there what each adds. */
    void (*blocks)(const uint8_t *p, int64_t count, uint64_t *acc, uint64_t *added);
    /* Add `n` pairs of reals, from the `first` on, to `t`; the sums again, scaled. See pair.h. */
    PairPiece pair;
    PairRescale rescale;
} Kernel;

extern HIDDEN const Kernel kernel_128, kernel_256, kernel_512;

#endif
