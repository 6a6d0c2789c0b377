/* Two tensors compared: chunks are taken by any thread and added up in order. */
#ifndef TRUEUP_PAIRS_H
#define TRUEUP_PAIRS_H

#include <stdlib.h>

#include "kernel.h"
#include "modes.h"
#include "strides.h"
#include "team.h"

enum { MOST_CHUNKS = 1 << 12 }; /* of a tensor: a chunk's totals take 1 KB */

typedef struct {
    const Kernel *kernel;
    const PairRule *rule;
    const Source *a, *b;
    int64_t reals, chunk, chunks; /* chunk: reals in one, which depends on the size of the tensor alone */
    PairTotals *totals;
    PairScaled *scaled; /* not NULL: the second time round */
    int64_t next;
    double best;
} PairJob;

/* Bits of the significand; 64 for whole numbers, which are exact. */
static ALWAYS_INLINE int significant_bits(const Kind *kind)
{
    static const int BITS[] = {[FLOAT32] = 24, [FLOAT64] = 53, [FLOAT16] = 11, [BFLOAT16] = 8,
                               [E4M3FN] = 4, [E5M2] = 3, [E4M3FNUZ] = 4, [E5M2FNUZ] = 3};
    return kind->real <= E5M2FNUZ ? BITS[kind->real] : 64;
}

/* Units are those of the coarser format: the one with the shorter significand, or at equal length with the larger tiny. */
static void rule_of(PairRule *r, const Kind *a, const Kind *b, double floor, double instead)
{
    const int pa = significant_bits(a), pb = significant_bits(b);
    const Kind *coarse = pa < pb || (pa == pb && a->tiny >= b->tiny) ? a : b;
    const int bits = significant_bits(coarse);
    r->a = a;
    r->b = b;
    r->wide = a->wide || b->wide;
    const int own = r->wide ? 53 : 24;
    r->units = bits == 64 ? WHOLE_UNITS : ROUNDED_UNITS;
    r->shift = bits == 64 ? 0 : own - bits;
    r->tiny = coarse->tiny;
    if (bits == own || (!r->wide && a->real == BFLOAT16 && b->real == BFLOAT16)) /* the same exponents, nothing to round */
        r->units = SAME_UNITS;
    r->floor = floor;
    r->instead = instead;
}

static void pair_totals_clear(PairTotals *t)
{
    memset(t, 0, sizeof *t);
    t->at = t->first = -1;
}

static void pair_totals_add(PairTotals *t, const PairTotals *chunk)
{
    t->dd += chunk->dd;
    t->aa += chunk->aa;
    t->bb += chunk->bb;
    t->ab += chunk->ab;
    t->d += chunk->d;
    t->relative += chunk->relative;
    if (chunk->top_d > t->top_d) {
        t->top_d = chunk->top_d;
        t->at = chunk->at;
    }
    t->top_relative = fmax(t->top_relative, chunk->top_relative);
    t->top_a = fmax(t->top_a, chunk->top_a);
    t->top_b = fmax(t->top_b, chunk->top_b);
    t->left_out += chunk->left_out;
    t->equal += chunk->equal;
    t->floored += chunk->floored;
    t->flips += chunk->flips;
    t->within[0] += chunk->within[0];
    t->within[1] += chunk->within[1];
    if (t->differing == 0)
        t->first = chunk->first;
    t->differing += chunk->differing;
    for (int k = 0; k < SPECIALS; k++)
        for (int side = 0; side < SIDES; side++)
            t->special[k][side] += chunk->special[k][side];
    for (int k = 0; k < BUCKETS; k++)
        t->units[k] += chunk->units[k];
}

/* The largest of what all threads found. Doubles of one sign are ordered as integers. */
static void raise_best(double *best, double top)
{
    uint64_t *shared = (uint64_t *)(void *)best, mine, seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
    memcpy(&mine, &top, sizeof mine);
    while (seen < mine && !__atomic_compare_exchange_n(shared, &seen, mine, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static ALWAYS_INLINE double known_best(double *best)
{
    uint64_t bits = __atomic_load_n((uint64_t *)(void *)best, __ATOMIC_RELAXED);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The reals from `at` on, in a row: where they lie, or gathered in `buffer`. */
static ALWAYS_INLINE const char *row_of(const Source *s, const Kind *kind, int64_t at, int64_t n, char *buffer)
{
    if (!s->ndim)
        return s->base + at * kind->width;
    source_gather(s, at / kind->parts, n / kind->parts, buffer);
    return buffer;
}

static void pair_chunk(PairJob *job, int64_t chunk)
{
    char from_a[CHUNK * 8] ALIGNED, from_b[CHUNK * 8] ALIGNED; /* touched only as far as a strided side needs */
    const PairRule *r = job->rule;
    const int64_t first = chunk * job->chunk, end = first + job->chunk < job->reals ? first + job->chunk : job->reals;
    const int tiles = (job->a->ndim && source_transposed(job->a)) || (job->b->ndim && source_transposed(job->b));
    const int64_t grain = tiles ? CHUNK : PIECE; /* transposing uses up the lines that its columns lie in */
    for (int64_t at = first; at < end; at += grain) {
        const int64_t n = end - at < grain ? end - at : grain;
        const char *a = row_of(job->a, r->a, at, n, from_a), *b = row_of(job->b, r->b, at, n, from_b);
        for (int64_t i = 0; i < n; i += PIECE) {
            const int size = n - i < PIECE ? (int)(n - i) : PIECE;
            if (job->scaled) {
                job->kernel->rescale(a + i * r->a->width, b + i * r->b->width, size, r, &job->scaled[chunk]);
                continue;
            }
            PairTotals *t = &job->totals[chunk];
            job->kernel->pair(a + i * r->a->width, b + i * r->b->width, at + i, size, r, known_best(&job->best), t);
            raise_best(&job->best, t->top_d);
        }
    }
}

static void pair_work(void *data)
{
    PairJob *job = data;
    Modes modes = exact_modes();
    int64_t chunk;
    while ((chunk = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->chunks)
        pair_chunk(job, chunk);
    restore_modes(modes);
}

static void pair_all(PairJob *job, int threads)
{
    job->next = 0;
    if (threads < 2 || job->chunks < 2 || !team_run(pair_work, job, threads))
        pair_work(job);
}

/* What to multiply by before squaring, where squares would leave float64: else 1. */
static double scale_of(double top)
{
    int exponent;
    if (!(top > 0) || top == (double)INFINITY || (1e-120 < top && top < 1e120))
        return 1.0;
    frexp(top, &exponent);
    exponent = exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
    return ldexp(1.0, -exponent);
}

/* Cosine of the angle, NaN where a side has no length. */
static double cosine_of(double ab, double aa, double bb)
{
    return aa > 0 && bb > 0 ? fmax(-1.0, fmin(1.0, ab / (sqrt(aa) * sqrt(bb)))) : (double)NAN;
}

enum { PAIR_NUMBERS = 30, PAIR_PACKED = PAIR_NUMBERS + BUCKETS };

/* As in PACKED of _pair.py. */
static void pair_fill(const PairTotals *t, const PairScaled *s, int64_t reals, const PairRule *r, double *out)
{
    double *to = out;
    const int64_t floored = r->instead == (double)INFINITY ? t->floored : 0; /* those have no relative error */
    const double numbers[] = {
        (double)(reals - t->left_out), (double)t->equal, sqrt(s->dd) / s->d, sqrt(s->aa) / s->a, sqrt(s->bb) / s->b,
        s->ab / s->a / s->b, cosine_of(s->ab, s->aa, s->bb), s->sum / s->d, t->top_d, (double)t->at,
        t->top_relative, t->relative, (double)t->floored, (double)(t->within[0] - floored), (double)(t->within[1] - floored),
        (double)t->flips, (double)t->differing, (double)t->first,
    };
    memcpy(to, numbers, sizeof numbers);
    to += sizeof numbers / sizeof *numbers;
    for (int k = 0; k < SPECIALS; k++)
        for (int side = 0; side < SIDES; side++)
            *to++ = (double)t->special[k][side];
    for (int k = 0; k < BUCKETS; k++)
        *to++ = (double)t->units[k];
}

static void pair_rescaled(PairJob *job, const PairTotals *t, PairScaled *sums, int threads)
{
    const PairScaled start = {.a = scale_of(t->top_a), .b = scale_of(t->top_b), .d = scale_of(t->top_d)};
    if (start.a == 1.0 && start.b == 1.0 && start.d == 1.0)
        return;
    PairScaled *scaled = malloc((size_t)job->chunks * sizeof *scaled);
    if (scaled == NULL)
        return; /* the sums stay what they are: 0 or infinite */
    for (int64_t k = 0; k < job->chunks; k++)
        scaled[k] = start;
    job->scaled = scaled;
    pair_all(job, threads);
    *sums = start;
    for (int64_t k = 0; k < job->chunks; k++) {
        sums->dd += scaled[k].dd;
        sums->aa += scaled[k].aa;
        sums->bb += scaled[k].bb;
        sums->ab += scaled[k].ab;
        sums->sum += scaled[k].sum;
    }
    free(scaled);
}

/* Fill out[96]; returns 0 where there is no memory. Both sources have the same shape, both kinds as many parts. */
static int pair(const Kernel *kernel, const PairRule *rule, const Source *a, const Source *b, double *out, int threads)
{
    PairJob job = {.kernel = kernel, .rule = rule, .a = a, .b = b, .reals = a->elements * rule->a->parts, .chunk = CHUNK};
    while (job.reals / job.chunk >= MOST_CHUNKS)
        job.chunk *= 2;
    job.chunks = (job.reals + job.chunk - 1) / job.chunk;
    PairTotals one, sum, *totals = &one;
    if (job.chunks > 1 && posix_memalign((void **)&totals, 64, (size_t)job.chunks * sizeof *totals))
        return 0;
    for (int64_t k = 0; k < job.chunks; k++)
        pair_totals_clear(&totals[k]);
    job.totals = totals;
    Modes modes = exact_modes();
    pair_all(&job, threads);
    pair_totals_clear(&sum);
    for (int64_t k = 0; k < job.chunks; k++)
        pair_totals_add(&sum, &totals[k]);
    if (totals != &one)
        free(totals);
    PairScaled sums = {1.0, 1.0, 1.0, sum.dd, sum.aa, sum.bb, sum.ab, sum.d};
    if (rule->wide)
        pair_rescaled(&job, &sum, &sums, threads);
    pair_fill(&sum, &sums, job.reals, rule, out);
    restore_modes(modes);
    return 1;
}

#endif
