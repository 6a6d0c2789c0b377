/* Tables that are worked out when the module is loaded. */
#include "base.h"

float EIGHT_VALUES[4][256];
double SIGNS[256][8] ALIGNED;

/* Exponent bits, fraction bits, bias of the eight-bit floats; fnuz: no negative zero, its code is the only NaN. */
static const struct { int exponent, fraction, bias, fnuz; } EIGHT[] = {{4, 3, 7, 0}, {5, 2, 15, 0}, {4, 3, 8, 1}, {5, 2, 16, 1}};

static float eight_value(int kind, int code)
{
    int bits = EIGHT[kind].fraction, magnitude = code & 127, last = magnitude >> bits == (1 << EIGHT[kind].exponent) - 1;
    int exponent = magnitude >> bits, fraction = magnitude & ((1 << bits) - 1);
    int nan = EIGHT[kind].fnuz ? code == 128 : bits == 3 ? magnitude == 127 : last && fraction;
    if (nan)
        return NAN;
    if (last && bits == 2 && !EIGHT[kind].fnuz)
        return code & 128 ? -INFINITY : INFINITY;
    if (exponent)
        fraction += 1 << bits;
    double value = ldexp(fraction, (exponent ? exponent : 1) - EIGHT[kind].bias - bits);
    return (float)(code & 128 ? -value : value);
}

void make_tables(void)
{
    for (int code = 0; code < 256; code++) {
        for (int j = 0; j < 8; j++)
            SIGNS[code][j] = code >> j & 1 ? -1.0 : 1.0;
        for (int kind = 0; kind < 4; kind++)
            EIGHT_VALUES[kind][code] = eight_value(kind, code);
    }
}
