/* 128 bits: SSE2 on x86-64, NEON on aarch64, whatever the compiler makes of it elsewhere. */
#define LEVEL 128
#include "level.h"
#if defined(__aarch64__)
const Kernel kernel_128 = {"neon", piece, blocks, pair_piece, pair_rescale, stream};
#else
const Kernel kernel_128 = {"plain", piece, blocks, pair_piece, pair_rescale, stream};
#endif
