/* A tensor in memory, read in logical C order whatever its strides. */
#ifndef TRUEUP_STRIDES_H
#define TRUEUP_STRIDES_H

#include <stdlib.h>

#include "base.h"

enum { DIMENSIONS = 64 }; /* as many as PyTorch and NumPy have */

typedef struct {
    const char *base;
    int64_t elements;
    int unit;  /* bytes of an element */
    int ndim;  /* 0: contiguous */
    int64_t size[DIMENSIONS], step[DIMENSIONS]; /* step in bytes */
} Source;

/* Add a dimension inside the others: merged with the one before where memory allows. */
static void source_dimension(Source *s, int64_t size, int64_t step)
{
    if (size == 1)
        return;
    int last = s->ndim - 1;
    if (last >= 0 && s->step[last] == step * size) {
        s->size[last] *= size;
        s->step[last] = step;
    } else {
        s->size[s->ndim] = size;
        s->step[s->ndim++] = step;
    }
}

static void source_settle(Source *s)
{
    if (s->elements == 0 || (s->ndim == 1 && s->step[0] == s->unit))
        s->ndim = 0;
}

typedef struct { uint64_t parts[2]; } Sixteen;

#define COPY_STRIDED(type)                            \
    for (int64_t i = 0; i < count; i++, from += step) \
        memcpy(to + i * (int64_t)sizeof(type), from, sizeof(type))

static void copy_run(char *to, const char *from, int64_t count, int64_t step, int unit)
{
    if (step == unit) {
        memcpy(to, from, (size_t)(count * unit));
        return;
    }
    if (step == 0 && unit == 1) {
        memset(to, *from, (size_t)count);
        return;
    }
    switch (unit) {
    case 1: COPY_STRIDED(uint8_t); break;
    case 2: COPY_STRIDED(uint16_t); break;
    case 4: COPY_STRIDED(uint32_t); break;
    case 8: COPY_STRIDED(uint64_t); break;
    default: COPY_STRIDED(Sixteen); break;
    }
}

enum { TILE = 8 }; /* cache lines at a time: rows a power of two apart share the eight places of one cache set */

#define COPY_TILES(type)                                                                                          \
    for (int64_t i = 0; i < inner; i += TILE)                                                                     \
        for (int64_t j = 0; j < outer; j += TILE)                                                                 \
            for (int64_t q = j; q < outer && q < j + TILE; q++)                                                   \
                for (int64_t r = i; r < inner && r < i + TILE; r++)                                               \
                    memcpy(to + (q * inner + r) * (int64_t)sizeof(type), from + q * outer_step + r * inner_step, sizeof(type))

#if defined(__x86_64__)
/* Up to a line of four-byte elements from each of up to 16 runs, both multiples of four, transposed in registers: a quarter of the
 * loads and stores. They go by way of a tile of their own, since rows a power of two apart share the eight places of a cache set. */
static ALWAYS_INLINE void copy_line(char *to, int64_t to_step, int columns, const char *from, int64_t from_step, int rows)
{
    __m128 tile[16][4];
    for (int r = 0; r < rows; r += 4) {
        const float *x = (const float *)(from + r * from_step), *y = (const float *)(from + (r + 1) * from_step);
        const float *z = (const float *)(from + (r + 2) * from_step), *w = (const float *)(from + (r + 3) * from_step);
        for (int q = 0; q < columns; q += 4) {
            __m128 a = _mm_loadu_ps(x + q), b = _mm_loadu_ps(y + q), c = _mm_loadu_ps(z + q), d = _mm_loadu_ps(w + q);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            tile[q][r / 4] = a, tile[q + 1][r / 4] = b, tile[q + 2][r / 4] = c, tile[q + 3][r / 4] = d;
        }
    }
    for (int q = 0; q < columns; q++)
        memcpy(to + q * to_step, tile[q], (size_t)rows * 4);
}

/* Transpose four-byte elements of outer runs that are neighbours in memory. Returns how many of these runs it has done. */
static int64_t copy_lines(char *to, const char *from, int64_t outer, int64_t inner, int64_t inner_step)
{
    if (inner % 4)
        return 0;
    for (int64_t j = 0; j + 4 <= outer; j += 16) {
        const int columns = outer - j < 16 ? (int)(outer - j) / 4 * 4 : 16;
        for (int64_t i = 0; i < inner; i += 16) {
            char *there = to + (j * inner + i) * 4;
            const char *here = from + j * 4 + i * inner_step;
            if (columns == 16 && i + 16 <= inner)
                copy_line(there, inner * 4, 16, here, inner_step, 16);
            else
                copy_line(there, inner * 4, columns, here, inner_step, inner - i < 16 ? (int)(inner - i) : 16);
        }
    }
    return outer / 4 * 4;
}
#else
static int64_t copy_lines(char *to, const char *from, int64_t outer, int64_t inner, int64_t inner_step)
{
    (void)to, (void)from, (void)outer, (void)inner, (void)inner_step;
    return 0;
}
#endif

/* Transpose: `outer` runs of `inner` elements each, of which memory holds the outer ones closer together. */
static void copy_tiles(char *to, const char *from, int64_t outer, int64_t outer_step, int64_t inner, int64_t inner_step, int unit)
{
    if (unit == 4 && outer_step == 4) {
        int64_t done = copy_lines(to, from, outer, inner, inner_step);
        to += done * inner * 4;
        from += done * 4;
        outer -= done;
    }
    switch (unit) {
    case 1: COPY_TILES(uint8_t); break;
    case 2: COPY_TILES(uint16_t); break;
    case 4: COPY_TILES(uint32_t); break;
    case 8: COPY_TILES(uint64_t); break;
    default: COPY_TILES(Sixteen); break;
    }
}

static ALWAYS_INLINE int source_transposed(const Source *s)
{
    return s->ndim > 1 && llabs(s->step[s->ndim - 2]) < llabs(s->step[s->ndim - 1]);
}

/* Write `count` elements from the `first` on to `to`. */
static void source_gather(const Source *s, int64_t first, int64_t count, char *to)
{
    int64_t index[DIMENSIONS];
    const int inner = s->ndim - 1;
    const int64_t width = s->size[inner], step = s->step[inner];
    const int transposed = source_transposed(s);
    const char *from = s->base;
    for (int k = inner; k >= 0; k--) {
        index[k] = first % s->size[k];
        first /= s->size[k];
        from += index[k] * s->step[k];
    }
    while (count > 0) {
        int64_t run = width - index[inner], runs = 1;
        if (transposed && index[inner] == 0 && count >= 2 * width) {
            int64_t left = s->size[inner - 1] - index[inner - 1];
            runs = count / width < left ? count / width : left;
            copy_tiles(to, from, runs, s->step[inner - 1], width, step, s->unit);
            run = runs * width;
        } else {
            run = run < count ? run : count;
            copy_run(to, from, run, step, s->unit);
        }
        count -= run;
        to += run * s->unit;
        from -= index[inner] * step;
        index[inner] = 0;
        for (int k = inner - 1; k >= 0; k--, runs = 1) {
            from += runs * s->step[k];
            if ((index[k] += runs) < s->size[k])
                break;
            from -= index[k] * s->step[k];
            index[k] = 0;
        }
    }
}

#endif
