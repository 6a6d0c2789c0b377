/* XXH3, 64 bits, seed 0, default secret, from the published specification (Collet, xxHash 0.8).
 *
 * More than 240 bytes are hashed in blocks of 1024: what a block adds to the eight accumulators does not depend on them, so
 * that blocks can be summed up on any thread; only xxh3_fold, a few operations a block, has to go in order.
 */
#ifndef TRUEUP_XXH3_H
#define TRUEUP_XXH3_H

#include "secret.h"

static const uint64_t XXH_START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

static ALWAYS_INLINE uint64_t read64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static ALWAYS_INLINE uint32_t read32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static ALWAYS_INLINE uint64_t fold128(uint64_t a, uint64_t b)
{
    __extension__ unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static ALWAYS_INLINE uint64_t avalanche64(uint64_t h)
{
    h = (h ^ (h >> 33)) * P64_2;
    h = (h ^ (h >> 29)) * P64_3;
    return h ^ (h >> 32);
}

static ALWAYS_INLINE uint64_t avalanche3(uint64_t h)
{
    h = (h ^ (h >> 37)) * 0x165667919E3779F9u;
    return h ^ (h >> 32);
}

static ALWAYS_INLINE uint64_t mix16(const uint8_t *p, int at)
{
    return fold128(read64(p) ^ read64(SECRET + at), read64(p + 8) ^ read64(SECRET + at + 8));
}

static uint64_t xxh3_upto_16(const uint8_t *p, int64_t n)
{
    if (n > 8) {
        uint64_t low = read64(p) ^ (read64(SECRET + 24) ^ read64(SECRET + 32));
        uint64_t high = read64(p + n - 8) ^ (read64(SECRET + 40) ^ read64(SECRET + 48));
        return avalanche3((uint64_t)n + __builtin_bswap64(low) + high + fold128(low, high));
    }
    if (n >= 4) {
        uint64_t h = (read32(p + n - 4) + ((uint64_t)read32(p) << 32)) ^ (read64(SECRET + 8) ^ read64(SECRET + 16));
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25u;
        h = (h ^ ((h >> 35) + (uint64_t)n)) * 0x9FB21C651E98DF25u;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        uint32_t combined = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
        return avalanche64(combined ^ (uint64_t)(read32(SECRET) ^ read32(SECRET + 4)));
    }
    return avalanche64(read64(SECRET + 56) ^ read64(SECRET + 64));
}

/* At most 240 bytes. */
static uint64_t xxh3_short(const uint8_t *p, int64_t n)
{
    if (n <= 16)
        return xxh3_upto_16(p, n);
    uint64_t h = (uint64_t)n * P64_1;
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; i--)
            h += mix16(p + 16 * i, 32 * i) + mix16(p + n - 16 * (i + 1), 32 * i + 16);
        return avalanche3(h);
    }
    for (int i = 0; i < 8; i++)
        h += mix16(p + 16 * i, 16 * i);
    h = avalanche3(h);
    for (int i = 8; i < (int)n / 16; i++)
        h += mix16(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche3(h + mix16(p + n - 16, 136 - 17));
}

/* Enter what one block adds, then stir. */
static ALWAYS_INLINE void xxh3_fold(uint64_t *acc, const uint64_t *added)
{
    for (int j = 0; j < 8; j++) {
        uint64_t a = acc[j] + added[j];
        acc[j] = (a ^ (a >> 47) ^ read64(SECRET + 128 + 8 * j)) * P32_1;
    }
}

static ALWAYS_INLINE void xxh3_stripe(uint64_t *acc, const uint8_t *p, const uint8_t *secret)
{
    for (int j = 0; j < 8; j++) {
        uint64_t value = read64(p + 8 * j), key = value ^ read64(secret + 8 * j);
        acc[j ^ 1] += value;
        acc[j] += (key & 0xffffffffu) * (key >> 32);
    }
}

/* How many blocks of n bytes (more than 240) are folded; what remains, 1 to 1024 bytes, goes to xxh3_finish. */
static ALWAYS_INLINE int64_t xxh3_blocks(int64_t n)
{
    return n > XXH_SHORT ? (n - 1) / XXH_BLOCK : 0;
}

/* The digest of n bytes, of which `tail` is what follows the folded blocks, with 64 bytes before `tail` if any was folded. */
static uint64_t xxh3_finish(const uint64_t *folded, const uint8_t *tail, int64_t n)
{
    if (n <= XXH_SHORT)
        return xxh3_short(tail, n);
    uint64_t acc[8], h = (uint64_t)n * P64_1;
    int64_t left = n - XXH_BLOCK * xxh3_blocks(n);
    memcpy(acc, folded, sizeof acc);
    for (int64_t i = 0; i < (left - 1) / XXH_STRIPE; i++)
        xxh3_stripe(acc, tail + XXH_STRIPE * i, SECRET + 8 * i);
    xxh3_stripe(acc, tail + left - XXH_STRIPE, SECRET + 192 - XXH_STRIPE - 7);
    for (int i = 0; i < 4; i++)
        h += fold128(acc[2 * i] ^ read64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    return avalanche3(h);
}

#endif
