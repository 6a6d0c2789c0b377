/* Statistics, sketch and digest of a tensor: its chunks are measured on any thread and folded in order.
 *
 * Statistics and digest take turns on each piece, so that memory is read once. A chunk's place in the ring is used again
 * when it is folded; the thread that happens to be there folds all that is ready.
 *
 * PyTorch gives each thread of the team an equal share of a tensor, in order. What the ring holds as a whole is shared out in the
 * same way: most of a thread's share lies in its own cache still. Who is done with it helps the others.
 */
#ifndef TRUEUP_MEASURE_H
#define TRUEUP_MEASURE_H

#include <stdlib.h>

#include "modes.h"
#include "strides.h"
#include "team.h"
#include "totals.h"
#include "xxh3.h"

enum { SLOTS = 16, CHUNK_BLOCKS = CHUNK * 8 / XXH_BLOCK };

typedef struct {
    Totals totals;
    uint64_t added[8 * CHUNK_BLOCKS];
    int64_t ready; /* the chunk that is in here, plus one */
} ALIGNED Slot;

typedef struct {
    const Kernel *kernel;
    const Kind *kind;
    const Source *source;
    int64_t reals, bytes, chunks;
    int statistics, digest;
    double scale;
    Totals *totals;
    uint64_t acc[8];
    Slot *slots;
    int shares;
    int64_t next[SLOTS]; /* chunk that begins next of each share */
    int64_t folded;      /* chunks folded */
    int folding;
} Job;

/* Measure the reals from `at` up to `end`, which lie in a row at `x`. The digest goes on from `acc`, or, where `added` is not
 * NULL, what each block adds is left there. Returns where the next block's share goes. */
static uint64_t *measure_row(const Job *job, int64_t at, int64_t end, const char *x, Totals *t, uint64_t *acc, uint64_t *added)
{
    const int width = job->kind->width;
    const int64_t whole = job->digest ? xxh3_blocks(job->bytes) : 0;
    for (; at < end; at += PIECE, x += PIECE * width) {
        int64_t first = at * width / XXH_BLOCK, blocks = PIECE * width / XXH_BLOCK;
        blocks = first + blocks < whole ? blocks : whole - first;
        if (blocks > 0) {
            job->kernel->blocks((const uint8_t *)x, blocks, acc, added);
            added += added ? 8 * blocks : 0;
        }
        if (job->statistics)
            job->kernel->piece(x, at, end - at < PIECE ? (int)(end - at) : PIECE, job->kind, job->scale, t);
    }
    return added;
}

/* Strided elements are copied first: by pieces to the first-level cache, or, where that transposes, by the chunk to the
 * second-level cache, so that the columns use up the lines they lie in. */
static NOINLINE void measure_gathered(const Job *job, int64_t at, int64_t end, Totals *t, uint64_t *acc, uint64_t *added)
{
    char buffer[CHUNK * 8] ALIGNED;
    const int parts = job->kind->parts, grain = source_transposed(job->source) ? CHUNK : PIECE;
    for (; at < end; at += grain) {
        int64_t n = end - at < grain ? end - at : grain;
        source_gather(job->source, at / parts, n / parts, buffer);
        added = measure_row(job, at, at + n, buffer, t, acc, added);
    }
}

static void measure_chunk(const Job *job, int64_t chunk, Totals *t, uint64_t *acc, uint64_t *added)
{
    const int64_t at = chunk * CHUNK, end = at + CHUNK < job->reals ? at + CHUNK : job->reals;
    if (job->source->ndim)
        measure_gathered(job, at, end, t, acc, added);
    else
        measure_row(job, at, end, job->source->base + at * job->kind->width, t, acc, added);
}

static void fold(Job *job, int64_t chunk, const Slot *slot)
{
    int64_t first = chunk * CHUNK * job->kind->width / XXH_BLOCK, blocks = CHUNK * job->kind->width / XXH_BLOCK;
    int64_t whole = job->digest ? xxh3_blocks(job->bytes) : 0;
    for (int64_t i = 0; i < blocks && first + i < whole; i++)
        xxh3_fold(job->acc, slot->added + 8 * i);
    if (job->statistics)
        totals_add(job->totals, &slot->totals);
}

/* Fold the chunks that are ready, unless another thread is at it. */
static void fold_ready(Job *job)
{
    int64_t next = __atomic_load_n(&job->folded, __ATOMIC_SEQ_CST);
    while (next < job->chunks && __atomic_load_n(&job->slots[next % SLOTS].ready, __ATOMIC_SEQ_CST) == next + 1) {
        if (__atomic_exchange_n(&job->folding, 1, __ATOMIC_SEQ_CST))
            return; /* who holds it looks again after letting go */
        next = __atomic_load_n(&job->folded, __ATOMIC_SEQ_CST);
        while (next < job->chunks && __atomic_load_n(&job->slots[next % SLOTS].ready, __ATOMIC_SEQ_CST) == next + 1) {
            fold(job, next, &job->slots[next % SLOTS]);
            __atomic_store_n(&job->folded, ++next, __ATOMIC_SEQ_CST);
        }
        __atomic_store_n(&job->folding, 0, __ATOMIC_SEQ_CST);
        next = __atomic_load_n(&job->folded, __ATOMIC_SEQ_CST);
    }
}

static int64_t share_begin(const Job *job, int share) { return job->chunks * share / job->shares; }

static void work_chunk(Job *job, int64_t chunk)
{
    Slot *slot = &job->slots[chunk % SLOTS];
    while (__atomic_load_n(&job->folded, __ATOMIC_SEQ_CST) + SLOTS <= chunk) {
        fold_ready(job);
        team_yield();
    }
    totals_clear(&slot->totals);
    measure_chunk(job, chunk, &slot->totals, job->acc, slot->added);
    __atomic_store_n(&slot->ready, chunk + 1, __ATOMIC_SEQ_CST);
    fold_ready(job);
}

static void work(void *data)
{
    Job *job = data;
    Modes modes = exact_modes();
    const int own = team_number();
    for (int k = 0; k < job->shares; k++) {
        const int share = (own + k) % job->shares;
        const int64_t end = share_begin(job, share + 1);
        int64_t chunk;
        while ((chunk = __atomic_fetch_add(&job->next[share], 1, __ATOMIC_SEQ_CST)) < end)
            work_chunk(job, chunk);
    }
    restore_modes(modes);
}

static void measure_alone(Job *job)
{
    Totals t;
    for (int64_t chunk = 0; chunk < job->chunks; chunk++) {
        totals_clear(&t);
        measure_chunk(job, chunk, chunk ? &t : job->totals, job->acc, NULL);
        if (chunk && job->statistics)
            totals_add(job->totals, &t);
    }
}

static Slot *spare_slots; /* kept from job to job: fresh memory would cost as much as a small tensor */

static int measure_together(Job *job, int threads)
{
    Slot *slots = __atomic_exchange_n(&spare_slots, NULL, __ATOMIC_SEQ_CST);
    if (slots == NULL && posix_memalign((void **)&slots, 64, SLOTS * sizeof(Slot)))
        return 0;
    for (int i = 0; i < SLOTS; i++)
        slots[i].ready = 0;
    job->slots = slots;
    job->shares = job->chunks > SLOTS ? 1 : threads < job->chunks ? threads : (int)job->chunks;
    for (int share = 0; share < job->shares; share++)
        job->next[share] = share_begin(job, share);
    int done = team_run(work, job, threads);
    free(__atomic_exchange_n(&spare_slots, slots, __ATOMIC_SEQ_CST));
    return done;
}

static void measure_once(Job *job, int threads)
{
    if (job->statistics)
        totals_clear(job->totals);
    memcpy(job->acc, XXH_START, sizeof job->acc);
    job->folded = 0;
    job->folding = 0;
    if (threads < 2 || job->chunks < 2 || !measure_together(job, threads))
        measure_alone(job);
}

static uint64_t digest_end(const Job *job)
{
    char buffer[XXH_BLOCK + XXH_STRIPE];
    int64_t folded = XXH_BLOCK * xxh3_blocks(job->bytes), before = folded ? XXH_STRIPE : 0;
    const int unit = job->source->unit;
    int64_t first = (folded - before) / unit;
    const char *x = buffer;
    if (job->source->ndim)
        source_gather(job->source, first, job->source->elements - first, buffer);
    else
        x = job->source->base + first * unit;
    return xxh3_finish(job->acc, (const uint8_t *)x + before, job->bytes);
}

/* Fill out[74] unless it is NULL; return the digest if it is wanted. */
static uint64_t measure(const Kernel *kernel, const Kind *kind, const Source *source, double *out, int digest, int threads)
{
    Totals totals, scaled;
    Job job = {.kernel = kernel, .kind = kind, .source = source, .reals = source->elements * kind->parts, .scale = 1.0,
               .statistics = out != NULL, .digest = digest, .totals = &totals};
    uint64_t result = 0;
    job.bytes = job.reals * kind->width;
    job.chunks = (job.reals + CHUNK - 1) / CHUNK;
    Modes modes = exact_modes();
    measure_once(&job, threads);
    if (digest)
        result = digest_end(&job);
    if (out) {
        double scale = kind->real == FLOAT64 ? totals_scale(&totals) : 1.0;
        if (scale != 1.0) { /* squares or sums may have left float64 */
            job.scale = scale;
            job.digest = 0;
            job.totals = &scaled;
            measure_once(&job, threads);
        }
        totals_fill(&totals, scale == 1.0 ? &totals : &scaled, scale, job.reals, kind, out);
    }
    restore_modes(modes);
    return result;
}

#endif
