/* What other extension modules of Trueup call, without going through Python: the capsule `_native.entrance`. */
#ifndef TRUEUP_ENTRANCE_H
#define TRUEUP_ENTRANCE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define TRUEUP_ENTRANCE "trueup.kernels._native.entrance"
enum { TRUEUP_PACKED = 74 }; /* float64 of a row of statistics */

/* Measure as `_native.measure` does: `shape` and `strides` are tuples of int, `out` may be NULL, and so may `digest`.
 * Returns -1 with an exception set. The caller holds the interpreter's lock. */
typedef int (*TrueupMeasure)(const void *base, long kind, PyObject *shape, PyObject *strides, double *out, long threads,
                             uint64_t *digest);

#endif
