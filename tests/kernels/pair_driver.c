/* The pairwise kernel without Python, to be run on an emulated processor: reads pairs from stdin, writes 96 numbers each.
 *
 * A pair: two kinds, elements, bytes of each side as int64, then the bytes of both.
 */
#include <stdio.h>

#include "pairs.h"

static char *side(Source *source, const Kind *kind, int64_t elements, int64_t bytes)
{
    char *x = malloc((size_t)bytes + 1);
    if (x == NULL || fread(x, 1, (size_t)bytes, stdin) != (size_t)bytes)
        exit(1);
    *source = (Source){.base = x, .elements = elements, .unit = kind->width * kind->parts};
    source_dimension(source, elements, source->unit);
    source_settle(source);
    return x;
}

int main(void)
{
    int64_t head[5];
    make_tables();
    team_init();
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const Kind *a = &KIND[head[0]], *b = &KIND[head[1]];
        Source first, second;
        char *x = side(&first, a, head[2], head[3]), *y = side(&second, b, head[2], head[4]);
        PairRule rule;
        double out[PAIR_PACKED];
        rule_of(&rule, a, b, 0.0, 1e-7);
        if (!pair(&kernel_128, &rule, &first, &second, out, 1))
            return 1;
        fwrite(out, sizeof out, 1, stdout);
        free(x);
        free(y);
    }
    return 0;
}
