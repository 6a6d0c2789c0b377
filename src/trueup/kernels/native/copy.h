/* Copying a tensor of any strides to a row of memory: by several threads, past the caches.
 *
 * What is copied here is read again by a disk, long after the caches have forgotten it. Stores that do not go through them leave the
 * training's data where it is, and need not read the lines that they fill.
 */
#ifndef TRUEUP_COPY_H
#define TRUEUP_COPY_H

#include "strides.h"
#include "team.h"

enum { GRAIN = 1 << 18 };    /* bytes that a thread takes at a time */
enum { GATHERED = 1 << 14 }; /* bytes that are gathered in the first-level cache before they are stored */

#if defined(__x86_64__)
enum { LINE = 64 };

static void copy_streamed(char *to, const char *from, int64_t bytes)
{
    int64_t head = (int64_t)(-(uintptr_t)to % LINE);
    head = head < bytes ? head : bytes;
    memcpy(to, from, (size_t)head);
    to += head, from += head, bytes -= head;
    for (; bytes >= LINE; bytes -= LINE, to += LINE, from += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1),
                c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, (size_t)bytes);
}
static ALWAYS_INLINE void copy_settle(void) { _mm_sfence(); } /* such stores wait for nobody unless told to */
#else
static ALWAYS_INLINE void copy_streamed(char *to, const char *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }
static ALWAYS_INLINE void copy_settle(void) {}
#endif

typedef struct {
    const Source *source;
    char *to;
    int64_t next; /* the first element that no thread has taken */
} Copy;

/* Copy elements `at` to `end`. Strided ones are gathered first, where it transposes so many that the columns use up the lines they
 * lie in. */
static NOINLINE void copy_gathered(const Copy *copy, int64_t at, int64_t end)
{
    char buffer[GRAIN] ALIGNED;
    const Source *s = copy->source;
    const int64_t grain = (source_transposed(s) ? GRAIN : GATHERED) / s->unit;
    for (; at < end; at += grain) {
        int64_t n = end - at < grain ? end - at : grain;
        source_gather(s, at, n, buffer);
        copy_streamed(copy->to + at * s->unit, buffer, n * s->unit);
    }
}

static void copy_work(void *data)
{
    Copy *copy = data;
    const Source *s = copy->source;
    const int64_t grain = GRAIN / s->unit;
    int64_t at;
    while ((at = __atomic_fetch_add(&copy->next, grain, __ATOMIC_SEQ_CST)) < s->elements) {
        int64_t n = s->elements - at < grain ? s->elements - at : grain;
        if (s->ndim)
            copy_gathered(copy, at, at + n);
        else
            copy_streamed(copy->to + at * s->unit, s->base + at * s->unit, n * s->unit);
    }
    copy_settle();
}

/* Write all elements of `source` to `to`, in logical C order. */
static void copy_all(const Source *source, char *to, int threads)
{
    const int64_t bytes = source->elements * source->unit;
    Copy copy = {.source = source, .to = to};
    if (threads < 2 || bytes < 4 * GRAIN || !team_run(copy_work, &copy, threads))
        copy_work(&copy);
}

#endif
