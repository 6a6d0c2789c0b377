/* Flush-to-zero modes of the caller would lose subnormals: off while we count. */
#ifndef TRUEUP_MODES_H
#define TRUEUP_MODES_H

#include "base.h"

#if defined(__x86_64__)
typedef unsigned Modes;
static ALWAYS_INLINE Modes exact_modes(void)
{
    Modes before = _mm_getcsr();
    if (before & 0x8040)
        _mm_setcsr(before & ~0x8040u);
    return before;
}
static ALWAYS_INLINE void restore_modes(Modes before)
{
    if (before & 0x8040)
        _mm_setcsr(before);
}
#elif defined(__aarch64__)
typedef uint64_t Modes;
static ALWAYS_INLINE Modes exact_modes(void)
{
    Modes before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before & (1u << 24))
        __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(Modes)(1u << 24)));
    return before;
}
static ALWAYS_INLINE void restore_modes(Modes before)
{
    if (before & (1u << 24))
        __asm__ volatile("msr fpcr, %0" : : "r"(before));
}
#else
typedef int Modes;
static ALWAYS_INLINE Modes exact_modes(void) { return 0; }
static ALWAYS_INLINE void restore_modes(Modes before) { (void)before; }
#endif

#endif
