/* Many tensors, or pairs of them, by one call: chunks on any thread, folded in order. */
#ifndef TRUEUP_STREAMS_H
#define TRUEUP_STREAMS_H

#include <stdlib.h>

#include "modes.h"
#include "team.h"
#include "kernel.h"

/* A row of the caller's table. */
typedef struct {
    int64_t x, kind_x, y, kind_y, size;
} StreamEntry;

typedef struct {
    const Kernel *kernel;
    const StreamEntry *entries;
    StreamRow *rows;       /* of chunks */
    const int64_t *starts; /* the first chunk of each entry, and after the last one how many there are */
    int64_t count, next;
    int op;
    float low, high;
} Streaming;

static void streams_work(void *data)
{
    Streaming *job = data;
    Modes modes = exact_modes();
    int64_t chunk, k = 0;
    while ((chunk = __atomic_fetch_add(&job->next, 1, __ATOMIC_SEQ_CST)) < job->starts[job->count]) {
        while (job->starts[k + 1] <= chunk)
            k++;
        const StreamEntry *e = &job->entries[k];
        const StreamPair pair = {(const char *)(uintptr_t)e->x, (const char *)(uintptr_t)e->y, &KIND[e->kind_x], &KIND[e->kind_y], e->size};
        const int64_t at = (chunk - job->starts[k]) * CHUNK, end = at + CHUNK < e->size ? at + CHUNK : e->size;
        job->kernel->stream(job->op, &pair, at, end, job->low, job->high, &job->rows[chunk]);
    }
    restore_modes(modes);
}

/* Fill out[count][8] with rows of `StreamRow`; 0 where memory ran out. */
static int streams(const Kernel *kernel, int op, const StreamEntry *entries, int64_t count, float low, float high, double *out, int threads)
{
    int64_t *starts = malloc((size_t)(count + 1) * sizeof *starts);
    if (starts == NULL)
        return 0;
    starts[0] = 0;
    for (int64_t k = 0; k < count; k++)
        starts[k + 1] = starts[k] + (entries[k].size + CHUNK - 1) / CHUNK;
    StreamRow *rows = malloc((size_t)(starts[count] ? starts[count] : 1) * sizeof *rows);
    if (rows == NULL) {
        free(starts);
        return 0;
    }
    Streaming job = {kernel, entries, rows, starts, count, 0, op, low, high};
    if (threads < 2 || starts[count] < 2 || !team_run(streams_work, &job, threads))
        streams_work(&job);
    for (int64_t k = 0; k < count; k++) {
        StreamRow sum = {0, 0, 0, 0, INFINITY, -INFINITY, 0, 0};
        for (int64_t chunk = starts[k]; chunk < starts[k + 1]; chunk++) {
            const StreamRow *row = &rows[chunk];
            sum.a += row->a;
            sum.b += row->b;
            sum.c += row->c;
            sum.more += row->more;
            sum.low = row->low < sum.low ? row->low : sum.low;
            sum.high = row->high > sum.high ? row->high : sum.high;
            sum.others += row->others;
            sum.beyond += row->beyond;
        }
        if (sum.a != sum.a)
            sum.low = sum.high = NAN;
        memcpy(out + 8 * k, &sum, sizeof sum);
    }
    free(rows);
    free(starts);
    return 1;
}

#endif
