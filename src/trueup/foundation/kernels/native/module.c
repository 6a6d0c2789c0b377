/* The extension module: statistics, sketch and digest of a tensor anywhere in memory.
 *
 * Built with the CPython stable ABI (3.10 on) and optional: without it the NumPy twin runs. Pointers come in as integers,
 * because bfloat16 has no buffer interface. Needs GCC or Clang (vector extensions); the instruction set is chosen at run time.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <time.h>

#include "copy.h"
#include "entrance.h"
#include "measure.h"
#include "pairs.h"
#include "results.h"
#include "streams.h"

/* Bytes from which on several threads work, and from which on the interpreter's lock is given up meanwhile: below, measuring
 * takes under 0.1 ms, but a busy Python thread would not give the lock back for 5 ms (sys.getswitchinterval). */
enum { SHARED = 1 << 18, LARGE = 1 << 20 };

static const Kernel *available[3];
static int count_available;
static const Kernel *chosen;

static void find_kernels(void)
{
    available[count_available++] = &kernel_128;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) { /* whoever has AVX2 has F16C */
        available[count_available++] = &kernel_256;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd"))
            available[count_available++] = &kernel_512;
    }
#endif
    chosen = available[count_available - 1];
}

/* Read shape and strides, which count `step_bytes` each; -1 with an exception set where they are none. */
static int read_source(Source *s, PyObject *shape, PyObject *strides, int unit, int64_t step_bytes)
{
    if (!PyTuple_Check(shape) || !PyTuple_Check(strides)) {
        PyErr_SetString(PyExc_TypeError, "expected shape and strides as tuples of int");
        return -1;
    }
    Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim != PyTuple_Size(strides) || ndim > DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "expected a stride for each of at most %d dimensions, got %zd and %zd",
                     (int)DIMENSIONS, ndim, PyTuple_Size(strides));
        return -1;
    }
    s->unit = unit;
    s->elements = 1;
    s->ndim = 0;
    int64_t bytes = s->unit;
    int empty = 0, overflow = 0, negative = 0;
    for (Py_ssize_t k = 0; k < ndim; k++) {
        int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape, k)), step = PyLong_AsLongLong(PyTuple_GetItem(strides, k));
        if ((size == -1 || step == -1) && PyErr_Occurred())
            return -1;
        empty |= size == 0;
        negative |= size < 0;
        overflow |= __builtin_mul_overflow(step, step_bytes, &step);
        overflow |= size > 0 && __builtin_mul_overflow(bytes, size, &bytes);
        source_dimension(s, size, step);
    }
    if (negative || (overflow && !empty)) {
        PyErr_SetString(PyExc_ValueError, "expected sizes of at least 0 and of less than 2**63 bytes");
        return -1;
    }
    s->elements = empty ? 0 : bytes / s->unit;
    source_settle(s);
    return 0;
}

/* What measuring has taken since the module was loaded, for `make bench`: asking the clock costs 40 ns. */
static long long spent_nanoseconds, spent_calls;

static int measure_at(const void *base, long kind, PyObject *shape, PyObject *strides, double *out, long threads, uint64_t *digest)
{
    Source source;
    source.base = base;
    if (kind < 0 || kind >= KINDS) {
        PyErr_Format(PyExc_ValueError, "measure: no such kind: %ld; see trueup.foundation.kernels.KINDS", kind);
        return -1;
    }
    const int unit = KIND[kind].width * KIND[kind].parts;
    if (read_source(&source, shape, strides, unit, unit))
        return -1;
    int most = source.elements < SHARED / source.unit || threads < 1 ? 1 : threads < 1024 ? (int)threads : 1024;
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    uint64_t result;
    if (source.elements < LARGE / source.unit) {
        result = measure(chosen, &KIND[kind], &source, out, digest != NULL, most);
    } else {
        Py_BEGIN_ALLOW_THREADS
        result = measure(chosen, &KIND[kind], &source, out, digest != NULL, most);
        Py_END_ALLOW_THREADS
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    spent_nanoseconds += 1000000000ll * (to.tv_sec - from.tv_sec) + to.tv_nsec - from.tv_nsec;
    spent_calls++;
    if (digest)
        *digest = result;
    return 0;
}

static PyObject *py_measure(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 6 && nargs != 7) {
        PyErr_SetString(PyExc_TypeError, "measure(pointer, kind, shape, strides, out_pointer, threads, digest=True)");
        return NULL;
    }
    const void *base = PyLong_AsVoidPtr(args[0]);
    long kind = PyLong_AsLong(args[1]);
    double *out = PyLong_AsVoidPtr(args[4]);
    long threads = PyLong_AsLong(args[5]);
    int digest = nargs == 7 ? PyObject_IsTrue(args[6]) : 1;
    uint64_t result;
    if (PyErr_Occurred() || measure_at(base, kind, args[2], args[3], out, threads, digest ? &result : NULL))
        return NULL;
    if (!digest)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(result);
}

static PyObject *py_measured(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "measured(pointer, kind, shape, strides, threads)");
        return NULL;
    }
    const void *base = PyLong_AsVoidPtr(args[0]);
    long kind = PyLong_AsLong(args[1]), threads = PyLong_AsLong(args[4]);
    uint64_t digest;
    double *row;
    PyObject *result = PyErr_Occurred() ? NULL : result_new(&row);
    if (result == NULL || measure_at(base, kind, args[2], args[3], row, threads, &digest)) {
        Py_XDECREF(result);
        return NULL;
    }
    return Py_BuildValue("NK", result, (unsigned long long)digest);
}

static PyObject *py_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "copy(pointer, itemsize, shape, strides, out_pointer)");
        return NULL;
    }
    Source source;
    source.base = PyLong_AsVoidPtr(args[0]);
    long unit = PyLong_AsLong(args[1]);
    char *to = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (unit != 1 && unit != 2 && unit != 4 && unit != 8 && unit != 16) {
        PyErr_Format(PyExc_ValueError, "copy: expected elements of 1, 2, 4, 8 or 16 bytes, got %ld", unit);
        return NULL;
    }
    if (read_source(&source, args[2], args[3], (int)unit, 1))
        return NULL;
    if (source.elements >= LARGE / unit) {
        Py_BEGIN_ALLOW_THREADS
        copy_all(&source, to);
        Py_END_ALLOW_THREADS
    } else {
        copy_all(&source, to);
    }
    Py_RETURN_NONE;
}

/* A side of a pair: pointer, kind, strides in bytes. Where an element does not lie on a multiple of its size it is gathered. */
static int read_side(Source *s, const Kind **kind, PyObject *const *args, PyObject *shape)
{
    s->base = PyLong_AsVoidPtr(args[0]);
    const long number = PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return -1;
    if (number < 0 || number >= KINDS) {
        PyErr_Format(PyExc_ValueError, "pair: no such kind: %ld; see trueup.foundation.kernels.KINDS", number);
        return -1;
    }
    *kind = &KIND[number];
    if (read_source(s, shape, args[2], (*kind)->width * (*kind)->parts, 1))
        return -1;
    if (s->ndim == 0 && s->elements > 0 && (uintptr_t)s->base % (unsigned)(*kind)->width) {
        s->ndim = 1;
        s->size[0] = s->elements;
        s->step[0] = s->unit;
    }
    return 0;
}

static PyObject *py_pair(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 11) {
        PyErr_SetString(PyExc_TypeError, "pair(pointer, kind, strides, pointer, kind, strides, shape, floor, instead, out_pointer, threads)");
        return NULL;
    }
    Source a, b;
    PairRule rule;
    const Kind *kind_a, *kind_b;
    if (read_side(&a, &kind_a, args, args[6]) || read_side(&b, &kind_b, args + 3, args[6]))
        return NULL;
    const double floor = PyFloat_AsDouble(args[7]), instead = PyFloat_AsDouble(args[8]);
    double *out = PyLong_AsVoidPtr(args[9]);
    const long threads = PyLong_AsLong(args[10]);
    if (PyErr_Occurred())
        return NULL;
    if (kind_a->parts != kind_b->parts) {
        PyErr_SetString(PyExc_ValueError, "pair: expected both sides complex or both real");
        return NULL;
    }
    rule_of(&rule, kind_a, kind_b, floor, instead);
    const int64_t bytes = a.elements * (a.unit + b.unit);
    const int most = bytes < SHARED || threads < 1 ? 1 : threads < 1024 ? (int)threads : 1024;
    int done;
    if (bytes < LARGE) {
        done = pair(chosen, &rule, &a, &b, out, most);
    } else {
        Py_BEGIN_ALLOW_THREADS
        done = pair(chosen, &rule, &a, &b, out, most);
        Py_END_ALLOW_THREADS
    }
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Squared distances of rows of 64 float64, each side given by the addresses of its rows. NaN: one has the address 0, or the squares of
 * all differences underflow. */
static void squared_distances(const int64_t *a, const int64_t *b, int64_t count, double *out)
{
    for (int64_t k = 0; k < count; k++) {
        const double *x = (const double *)(uintptr_t)a[k], *y = (const double *)(uintptr_t)b[k];
        if (k + 4 < count && a[k + 4] && b[k + 4])
            for (int line = 0; line < 8; line++) {
                __builtin_prefetch((const double *)(uintptr_t)a[k + 4] + 8 * line);
                __builtin_prefetch((const double *)(uintptr_t)b[k + 4] + 8 * line);
            }
        double sums[8] = {0};
        if (x == NULL || y == NULL)
            sums[0] = NAN;
        else
            for (int lane = 0; lane < 64; lane += 8)
                for (int j = 0; j < 8; j++) {
                    const double d = x[lane + j] - y[lane + j];
                    sums[j] += d * d;
                }
        out[k] = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
        if (out[k] == 0) { /* equal, or the squares are too small for a float64 */
            int differ = 0;
            for (int lane = 0; lane < 64; lane++)
                differ |= x[lane] != y[lane];
            if (differ)
                out[k] = NAN;
        }
    }
}

static PyObject *py_squared_distances(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "squared_distances(addresses_pointer, addresses_pointer, count, out_pointer)");
        return NULL;
    }
    const int64_t *a = PyLong_AsVoidPtr(args[0]), *b = PyLong_AsVoidPtr(args[1]);
    const long long count = PyLong_AsLongLong(args[2]);
    double *out = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    squared_distances(a, b, count, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_streams(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError, "streams(what, table_pointer, count, low, high, out_pointer, threads)");
        return NULL;
    }
    const long what = PyLong_AsLong(args[0]), threads = PyLong_AsLong(args[6]);
    const StreamEntry *entries = PyLong_AsVoidPtr(args[1]);
    const long long count = PyLong_AsLongLong(args[2]);
    const double low = PyFloat_AsDouble(args[3]), high = PyFloat_AsDouble(args[4]);
    double *out = PyLong_AsVoidPtr(args[5]);
    if (PyErr_Occurred())
        return NULL;
    int64_t bytes = 0;
    for (long long k = 0; k < count; k++) {
        const StreamEntry *e = &entries[k];
        const int64_t kinds[2] = {e->kind_x, e->kind_y};
        for (int side = 0; side < (what == STREAM_SPREAD ? 1 : 2); side++)
            if (kinds[side] != FLOAT32 && kinds[side] != FLOAT16 && kinds[side] != BFLOAT16) {
                PyErr_SetString(PyExc_ValueError, "streams: expected float32, float16 or bfloat16");
                return NULL;
            }
        bytes += e->size * 4;
    }
    if (what < 0 || what >= STREAMS || count < 0) {
        PyErr_SetString(PyExc_ValueError, "streams: no such thing to take");
        return NULL;
    }
    const int most = bytes < SHARED || threads < 1 ? 1 : threads < 1024 ? (int)threads : 1024;
    int done;
    if (bytes < LARGE) {
        done = streams(chosen, (int)what, entries, count, (float)low, (float)high, out, most);
    } else {
        Py_BEGIN_ALLOW_THREADS
        done = streams(chosen, (int)what, entries, count, (float)low, (float)high, out, most);
        Py_END_ALLOW_THREADS
    }
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_spent(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return Py_BuildValue("LL", spent_nanoseconds, spent_calls);
}

static PyObject *py_target(PyObject *self, PyObject *name)
{
    (void)self;
    if (name != Py_None) {
        PyObject *bytes = PyUnicode_AsUTF8String(name);
        if (bytes == NULL)
            return NULL;
        const Kernel *wanted = NULL;
        for (int k = 0; k < count_available; k++)
            if (strcmp(PyBytes_AsString(bytes), available[k]->name) == 0)
                wanted = available[k];
        Py_DECREF(bytes);
        if (wanted == NULL) {
            PyErr_SetString(PyExc_ValueError, "this processor has no such instruction set");
            return NULL;
        }
        chosen = wanted;
    }
    return PyUnicode_FromString(chosen->name);
}

static PyMethodDef METHODS[] = {
    {"measure", (PyCFunction)(void (*)(void))py_measure, METH_FASTCALL,
     "measure(pointer, kind, shape, strides, out_pointer, threads, digest=True) -> int | None\n\n"
     "Fill the 74 float64 at out_pointer (0: none) and return the digest; see trueup.foundation.kernels.measure."},
    {"measured", (PyCFunction)(void (*)(void))py_measured, METH_FASTCALL,
     "measured(pointer, kind, shape, strides, threads) -> (Result, digest): measure, into memory of the kernel's own."},
    {"copy", (PyCFunction)(void (*)(void))py_copy, METH_FASTCALL,
     "copy(pointer, itemsize, shape, strides, out_pointer)\n\n"
     "Write a tensor in logical C order to out_pointer; strides in bytes; see trueup.foundation.kernels.copy."},
    {"pair", (PyCFunction)(void (*)(void))py_pair, METH_FASTCALL,
     "pair(pointer, kind, strides, pointer, kind, strides, shape, floor, instead, out_pointer, threads)\n\n"
     "Compare two tensors and fill the 96 float64 at out_pointer; strides in bytes; see trueup.foundation.kernels.pair."},
    {"squared_distances", (PyCFunction)(void (*)(void))py_squared_distances, METH_FASTCALL,
     "squared_distances(addresses_pointer, addresses_pointer, count, out_pointer): of sketches; see trueup.foundation.kernels.distances."},
    {"streams", (PyCFunction)(void (*)(void))py_streams, METH_FASTCALL,
     "streams(what, table_pointer, count, low, high, out_pointer, threads): sums of many tensors; see trueup.foundation.kernels.streams."},
    {"spent", py_spent, METH_NOARGS, "spent() -> (nanoseconds, calls) that measuring has taken in this process."},
    {"target", py_target, METH_O, "target(None) -> name of the instruction set in use; target(name) sets it, for tests."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "Compiled statistics kernel.", -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    static int ready; /* the tables are the process's, not an interpreter's */
    if (!ready) {
        make_tables();
        find_kernels();
        team_init();
        ready = 1;
    }
    static const TrueupEntrance entrance = {measure_at, result_new};
    if (result_type == NULL && (result_type = PyType_FromSpec(&RESULT_SPEC)) == NULL)
        return NULL;
    PyObject *module = PyModule_Create(&MODULE), *capsule = PyCapsule_New((void *)&entrance, TRUEUP_ENTRANCE, NULL);
    if (module == NULL || capsule == NULL || PyModule_AddObject(module, "entrance", capsule)) {
        Py_XDECREF(module);
        Py_XDECREF(capsule);
        return NULL;
    }
    return module;
}
