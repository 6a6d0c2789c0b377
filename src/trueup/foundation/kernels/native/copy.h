/* Copying a tensor of any strides to a row of memory, past the caches.
 *
 * What is copied here is read again by a disk, long after the caches have forgotten it. Stores that do not go through them leave the
 * training's data where it is, and need not read the lines that they fill. One thread fills the memory bus well enough: to wait
 * for a team, one of which the writer of the capture keeps from its core, takes longer than the team saves.
 */
#ifndef TRUEUP_COPY_H
#define TRUEUP_COPY_H

#include "strides.h"

enum { GRAIN = 1 << 18 };    /* bytes that are transposed at a time, in the second-level cache */
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

/* Strided elements are gathered first, where that transposes so many that the columns use up the lines they lie in. */
static NOINLINE void copy_gathered(const Source *s, char *to)
{
    char buffer[GRAIN] ALIGNED;
    const int64_t grain = (source_transposed(s) ? GRAIN : GATHERED) / s->unit;
    for (int64_t at = 0; at < s->elements; at += grain) {
        int64_t n = s->elements - at < grain ? s->elements - at : grain;
        source_gather(s, at, n, buffer);
        copy_streamed(to + at * s->unit, buffer, n * s->unit);
    }
}

/* Write all elements of `s` to `to`, in logical C order. */
static void copy_all(const Source *s, char *to)
{
    if (s->ndim)
        copy_gathered(s, to);
    else
        copy_streamed(to, s->base, s->elements * s->unit);
    copy_settle();
}

#endif
