/* How partial results become one, and the one what a record holds. */
#ifndef TRUEUP_TOTALS_H
#define TRUEUP_TOTALS_H

#include "kernel.h"

static void totals_clear(Totals *t)
{
    memset(t, 0, sizeof *t);
    t->low = INFINITY;
    t->high = -INFINITY;
}

/* The order of these calls is that of the chunks, whoever measured them. */
static void totals_add(Totals *t, const Totals *chunk)
{
    for (int j = 0; j < LANES; j++)
        t->lanes[j] += chunk->lanes[j];
    for (int j = 0; j < 8; j++) { /* Knuth's two-sum */
        double next = t->sum[j] + chunk->sum[j], taken = next - t->sum[j];
        t->rest[j] += chunk->rest[j] + ((t->sum[j] - (next - taken)) + (chunk->sum[j] - taken));
        t->sum[j] = next;
        t->square[j] += chunk->square[j];
    }
    t->low = chunk->low < t->low ? chunk->low : t->low;
    t->high = chunk->high > t->high ? chunk->high : t->high;
    t->nan += chunk->nan;
    t->posinf += chunk->posinf;
    t->neginf += chunk->neginf;
    t->zero += chunk->zero;
    t->small += chunk->small;
    t->saturated += chunk->saturated;
}

static double eight_of(const double *v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* The power of two to measure again with when squares or sums may have left float64; else 1. */
static double totals_scale(const Totals *t)
{
    double largest = fmax(-t->low, t->high);
    if (!(t->low <= t->high) || largest == 0.0 || (1e-120 < largest && largest < 1e120))
        return 1.0;
    int exponent;
    frexp(largest, &exponent);
    exponent = exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
    return ldexp(1.0, -exponent);
}

/* Fill out[74]; sums, taken with their values multiplied by scale, give mean and l2. */
static void totals_fill(const Totals *t, const Totals *sums, double scale, int64_t reals, const Kind *kind, double *out)
{
    int64_t counted = reals - t->nan - t->posinf - t->neginf - (kind->masking ? t->saturated : 0);
    out[0] = counted ? t->low : NAN;
    out[1] = counted ? t->high : NAN;
    out[2] = counted ? (eight_of(sums->sum) + eight_of(sums->rest)) / (double)counted / scale : NAN;
    out[3] = counted ? sqrt(eight_of(sums->square)) / scale : NAN;
    out[4] = (double)t->nan;
    out[5] = (double)t->posinf;
    out[6] = (double)t->neginf;
    out[7] = (double)t->zero;
    out[8] = (double)(t->small - t->zero);
    out[9] = (double)t->saturated;
    memcpy(out + NUMBERS, t->lanes, sizeof t->lanes);
}

#endif
