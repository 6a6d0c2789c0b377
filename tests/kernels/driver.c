/* The kernel without Python, to be run on an emulated processor: reads cases from stdin, writes digest and 74 numbers each.
 *
 * A case: kind, elements, stride, bytes as int64, then the bytes.
 */
#include <stdio.h>

#include "measure.h"

int main(void)
{
    int64_t head[4];
    make_tables();
    team_init();
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const Kind *kind = &KIND[head[0]];
        char *x = malloc((size_t)head[3] + 1);
        if (x == NULL || fread(x, 1, (size_t)head[3], stdin) != (size_t)head[3])
            return 1;
        Source source = {.base = x, .elements = head[1], .unit = kind->width * kind->parts};
        source_dimension(&source, head[1], head[2] * source.unit);
        source_settle(&source);
        double out[74];
        uint64_t digest = measure(&kernel_128, kind, &source, out, 1, 1);
        fwrite(&digest, sizeof digest, 1, stdout);
        fwrite(out, sizeof out, 1, stdout);
        free(x);
    }
    return 0;
}
