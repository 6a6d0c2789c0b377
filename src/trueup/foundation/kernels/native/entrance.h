/* What other extension modules of Trueup call, without going through Python: the capsule `_native.entrance`. */
#ifndef TRUEUP_ENTRANCE_H
#define TRUEUP_ENTRANCE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define TRUEUP_ENTRANCE "trueup.foundation.kernels._native.entrance"
enum { TRUEUP_PACKED = 74 }; /* float64 of a row of statistics */

/* `measure` does what `_native.measure` does: `shape` and `strides` are tuples of int, `out` may be NULL, and so may `digest`; it
 * returns -1 with an exception set. The caller holds the interpreter's lock. */
typedef struct {
    int (*measure)(const void *base, long kind, PyObject *shape, PyObject *strides, double *out, long threads, uint64_t *digest);
    PyObject *(*result)(double **row); /* a new object that keeps a row of statistics, and where to put them */
} TrueupEntrance;

#endif
