/* Statistics and sketch of a contiguous tensor in one pass: what _twin.py does, at the speed of memory.
 *
 * Built with the CPython stable ABI (3.10 on) and optional: without it the NumPy twin runs. Pointers come in as integers,
 * because bfloat16 arrays have no buffer interface. Needs GCC or Clang (vector extensions); the instruction set is chosen
 * at run time.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define GROUP 512
#define GOLDEN 0x9E3779B97F4A7C15u

typedef float vf2 __attribute__((vector_size(8)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int32_t vi4 __attribute__((vector_size(16)));
typedef uint32_t vu4 __attribute__((vector_size(16)));
typedef float vf8 __attribute__((vector_size(32)));
typedef int32_t vi8 __attribute__((vector_size(32)));
typedef uint32_t vu8 __attribute__((vector_size(32)));
typedef double vd2 __attribute__((vector_size(16)));
typedef double vd4 __attribute__((vector_size(32)));
typedef double vd8 __attribute__((vector_size(64)));
typedef int64_t vl2 __attribute__((vector_size(16)));
typedef int64_t vl4 __attribute__((vector_size(32)));
typedef int64_t vl8 __attribute__((vector_size(64)));

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, KINDS }; /* as in _compiled.py */
static const int WIDTH[KINDS] = {4, 8, 2, 2};
static const double TINY[KINDS] = {0x1p-126, 0x1p-1022, 0x1p-14, 0x1p-126};
static const uint32_t TINY_BITS[KINDS] = {0x00800000, 0, 0x38800000, 0x00800000}; /* TINY as a float32 */
static const double LARGEST[KINDS] = {0x1.fffffep127, 0x1.fffffffffffffp1023, 65504.0, 0x1.fep127};

typedef struct {
    double lanes[64], sum[8], square[8], low[8], high[8];
    int64_t zeros[8], small[8]; /* small: zeros and subnormals */
} Group;

typedef struct {
    double lanes[64], sum[8], rest[8], square[8], low[8], high[8];
    int64_t zeros[8], small[8], nan, posinf, neginf;
} Totals;

/* For each byte of a sign word, what to xor into eight doubles. */
static uint64_t SIGNS[256][8] __attribute__((aligned(64)));

static ALWAYS_INLINE uint64_t splitmix64(uint64_t x)
{
    uint64_t z = x + GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* total + part, what was rounded away added to *rest (Knuth's two-sum) */
static ALWAYS_INLINE double compensated(double total, double part, double *rest)
{
    double next = total + part, taken = next - total;
    *rest += (total - (next - taken)) + (part - taken);
    return next;
}

static ALWAYS_INLINE float half_to_float(uint16_t h)
{
    uint32_t exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return h & 0x8000 ? -value : value;
    }
    bits = (uint32_t)(h & 0x8000) << 16 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE double as_double(const void *x, int64_t i, int kind)
{
    float value;
    if (kind == FLOAT64)
        return ((const double *)x)[i];
    if (kind == FLOAT32)
        return ((const float *)x)[i];
    if (kind == FLOAT16)
        return half_to_float(((const uint16_t *)x)[i]);
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define NAME(f) f##_plain
#define LEVEL 0
#include "_native_group.h"
#undef NAME
#undef LEVEL
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(f) f##_avx2
#define LEVEL 2
#include "_native_group.h"
#undef NAME
#undef LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
#define NAME(f) f##_avx512
#define LEVEL 512
#include "_native_group.h"
#undef NAME
#undef LEVEL
#pragma GCC pop_options
#endif

typedef void (*Run)(const char *, int64_t, int, Totals *);
static const char *NAMES[] = {"plain", "avx2", "avx512"};
static int chosen;

static int best(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return 1;
#endif
    return 0;
}

static void run(const char *x, int64_t n, int kind, Totals *t)
{
#if defined(__x86_64__)
    static const Run runs[] = {run_plain, run_avx2, run_avx512};
#else
    static const Run runs[] = {run_plain};
#endif
    runs[chosen](x, n, kind, t);
}

static double total(const double *v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* Fill out[74]; return 0 if the twin has to do it: magnitudes whose squares or sums may leave float64. */
static int summarize(const char *x, int64_t n, int kind, double *out)
{
    Totals t;
    memset(&t, 0, sizeof t);
    for (int j = 0; j < 8; j++)
        t.low[j] = INFINITY, t.high[j] = -INFINITY;
    run(x, n, kind, &t);
    double low = INFINITY, high = -INFINITY;
    int64_t zeros = 0, small = 0, saturated = 0;
    for (int j = 0; j < 8; j++) {
        low = t.low[j] < low ? t.low[j] : low;
        high = t.high[j] > high ? t.high[j] : high;
        zeros += t.zeros[j];
        small += t.small[j];
    }
    int64_t finite = n - t.nan - t.posinf - t.neginf;
    double magnitude = finite ? fmax(-low, high) : 0.0;
    if (magnitude != 0.0 && !(1e-120 < magnitude && magnitude < 1e120))
        return 0;
    if (magnitude >= LARGEST[kind])
        for (int64_t i = 0; i < n; i++)
            saturated += fabs(as_double(x, i, kind)) == LARGEST[kind];
    out[0] = finite ? low : NAN;
    out[1] = finite ? high : NAN;
    out[2] = finite ? (total(t.sum) + total(t.rest)) / (double)finite : NAN;
    out[3] = finite ? sqrt(total(t.square)) : NAN;
    out[4] = (double)t.nan;
    out[5] = (double)t.posinf;
    out[6] = (double)t.neginf;
    out[7] = (double)zeros;
    out[8] = (double)(small - zeros);
    out[9] = (double)saturated;
    memcpy(out + 10, t.lanes, sizeof t.lanes);
    return 1;
}

static PyObject *py_summarize(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "summarize(pointer, elements, kind, out_pointer)");
        return NULL;
    }
    const char *x = PyLong_AsVoidPtr(args[0]);
    int64_t n = PyLong_AsLongLong(args[1]);
    long kind = PyLong_AsLong(args[2]);
    double *out = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (n < 0 || kind < 0 || kind >= KINDS) {
        PyErr_SetString(PyExc_ValueError, "no such size or kind");
        return NULL;
    }
    int done;
    if (n > 4096) { /* below that, giving up the GIL costs more than the work */
        Py_BEGIN_ALLOW_THREADS
        done = summarize(x, n, (int)kind, out);
        Py_END_ALLOW_THREADS
    } else {
        done = summarize(x, n, (int)kind, out);
    }
    return PyBool_FromLong(done);
}

static PyObject *py_target(PyObject *self, PyObject *name)
{
    (void)self;
    if (name != Py_None) {
        PyObject *bytes = PyUnicode_AsUTF8String(name);
        if (bytes == NULL)
            return NULL;
        int wanted = -1;
        for (int k = 0; k <= best(); k++)
            if (strcmp(PyBytes_AsString(bytes), NAMES[k]) == 0)
                wanted = k;
        Py_DECREF(bytes);
        if (wanted < 0) {
            PyErr_SetString(PyExc_ValueError, "this processor has no such instruction set");
            return NULL;
        }
        chosen = wanted;
    }
    return PyUnicode_FromString(NAMES[chosen]);
}

static PyMethodDef METHODS[] = {
    {"summarize", (PyCFunction)(void (*)(void))py_summarize, METH_FASTCALL,
     "summarize(pointer, elements, kind, out_pointer) -> bool: fill 74 float64; False where the twin must."},
    {"target", py_target, METH_O, "target(None) -> name of the instruction set in use; target(name) sets it, for tests."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "Compiled statistics kernel.", -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    chosen = best();
    for (int byte = 0; byte < 256; byte++)
        for (int j = 0; j < 8; j++)
            SIGNS[byte][j] = (uint64_t)(byte >> j & 1) << 63;
    return PyModule_Create(&MODULE);
}
