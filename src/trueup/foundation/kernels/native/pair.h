/* Two tensors, element by element: what is counted, and by which rule. */
#ifndef TRUEUP_PAIR_H
#define TRUEUP_PAIR_H

#include "base.h"

enum { NANS, POSINFS, NEGINFS, MASKS, SPECIALS };  /* what does not enter: each its own set of positions */
enum { ON_BOTH, ON_FIRST, ON_SECOND, SIDES };      /* who has one there */
enum { BUCKETS = 66 };                             /* 0, 1, 2 to 3, 4 to 7, ... units: differences of up to 2**65 - 1 */
enum { WHOLE_UNITS, SAME_UNITS, ROUNDED_UNITS };   /* how units of the last place are counted: see rule_of */

typedef struct {
    const Kind *a, *b;
    int wide;          /* both are taken as float64, else as float32 */
    int units, shift;  /* bits of the fraction that the coarser format lacks */
    double tiny;       /* its smallest normal number */
    double floor, instead; /* an |a| of at most `floor` is replaced by `instead` where it divides */
} PairRule;

/* What has been seen of two tensors a and b. d is b - a. Sums over the pairs in which both count. */
typedef struct {
    double dd, aa, bb, ab, d, relative;
    double top_d, top_relative, top_a, top_b;
    int64_t at;                       /* of the first top_d, -1 where it is 0 or another chunk has a larger one */
    int64_t left_out, equal, floored, flips;
    int64_t within[2];                /* relative error below 1/1000, 5/1000 */
    int64_t differing, first;         /* positions where what does not count is not the same, and the first of them or -1 */
    int64_t special[SPECIALS][SIDES];
    int64_t units[BUCKETS];
} ALIGNED PairTotals;

/* Powers of two by which a, b and d are multiplied before they are squared, and the sums that come of it. */
typedef struct {
    double a, b, d;
    double dd, aa, bb, ab, sum;
} PairScaled;

typedef void (*PairPiece)(const char *a, const char *b, int64_t first, int n, const PairRule *rule, double best, PairTotals *t);
typedef void (*PairRescale)(const char *a, const char *b, int n, const PairRule *rule, PairScaled *s);

#endif
