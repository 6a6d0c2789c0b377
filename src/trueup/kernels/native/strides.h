/* A tensor in memory, read in logical C order whatever its strides. */
#ifndef TRUEUP_STRIDES_H
#define TRUEUP_STRIDES_H

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

#define COPY_STRIDED(type)                            \
    for (int64_t i = 0; i < count; i++, from += step) \
        memcpy(to + i * (int64_t)sizeof(type), from, sizeof(type))

static void copy_run(char *to, const char *from, int64_t count, int64_t step, int unit)
{
    typedef struct { uint64_t parts[2]; } Sixteen;
    if (step == unit) {
        memcpy(to, from, (size_t)(count * unit));
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

/* Write `count` elements from the `first` on to `to`. */
static void source_gather(const Source *s, int64_t first, int64_t count, char *to)
{
    int64_t index[DIMENSIONS];
    int inner = s->ndim - 1;
    const char *from = s->base;
    for (int k = inner; k >= 0; k--) {
        index[k] = first % s->size[k];
        first /= s->size[k];
        from += index[k] * s->step[k];
    }
    while (1) {
        int64_t run = s->size[inner] - index[inner];
        run = run < count ? run : count;
        copy_run(to, from, run, s->step[inner], s->unit);
        count -= run;
        if (count == 0)
            return;
        to += run * s->unit;
        from -= index[inner] * s->step[inner];
        index[inner] = 0;
        for (int k = inner - 1; k >= 0; k--) {
            from += s->step[k];
            if (++index[k] < s->size[k])
                break;
            from -= s->size[k] * s->step[k];
            index[k] = 0;
        }
    }
}

/* Where `count` elements from the `first` on lie in a row: in the tensor itself, or copied to `buffer`. */
static ALWAYS_INLINE const char *source_read(const Source *s, int64_t first, int64_t count, char *buffer)
{
    if (s->ndim == 0)
        return s->base + first * s->unit;
    source_gather(s, first, count, buffer);
    return buffer;
}

#endif
