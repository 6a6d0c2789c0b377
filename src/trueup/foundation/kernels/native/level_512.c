/* AVX-512 (F, BW, CD, DQ, VL). */
#if defined(__x86_64__)
#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512vl,avx512bw,avx512cd"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512vl,avx512bw,avx512cd,prefer-vector-width=512")
#endif
#define LEVEL 512
#include "level.h"
const Kernel kernel_512 = {"avx512", piece, blocks, pair_piece, pair_rescale, stream};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here; /* a translation unit must not be empty */
#endif
