/* AVX2 with FMA and F16C. */
#if defined(__x86_64__)
#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define LEVEL 256
#include "level.h"
const Kernel kernel_256 = {"avx2", piece, blocks, pair_piece, pair_rescale, stream};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here; /* a translation unit must not be empty */
#endif
