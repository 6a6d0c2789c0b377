/* What the files of the short way share: the object that works for a session, and how it looks at Python objects. */
#ifndef TRUEUP_QUICK_H
#define TRUEUP_QUICK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../kernels/native/entrance.h"

/* Names of attributes, as interned strings: s_shape is "shape". */
#define NAMES(X) \
    X(__enter__) X(__exit__) X(_closed) X(_new) X(_rows) X(_version) X(active) X(added) X(backward) X(backward_call) X(busy) X(call) \
    X(complex) X(data_ptr) X(device) X(device_name) X(dtype) X(failed) X(failure) X(forget) X(host_kind) X(is_neg) X(kind) X(known) \
    X(level) X(op) X(produced) X(producer) X(producers) X(readable) X(reads) X(recorded) X(seq) X(shape) X(slots) X(state) X(step) \
    X(storage_offset) X(stride) X(task) X(uninitialised) X(untyped_storage) X(version) X(view)
#define DECLARE(name) extern PyObject *s_##name;
NAMES(DECLARE)

/* Objects that a `Quick` works on, by the names its constructor knows them. */
#define HELD(X) \
    X(session) X(threads) X(recorder) X(buffers) X(slot_at_length) X(storage_at_length) X(in_flight) X(storages) X(devices) X(layouts) \
    X(tensor) X(parameter) X(statistics) X(transforms) X(count_threads) X(graph_task) X(no_overrides)
#define MEMBER(name) PyObject *name;

typedef struct {
    PyObject_HEAD
    HELD(MEMBER)
    TrueupEntrance kernel;
    int digest_only, keeps_bytes, sees_writes;
} Quick;

static inline PyObject *call(PyObject *object, PyObject *name) { return PyObject_CallMethodObjArgs(object, name, NULL); }

/* Take a pair out of a list: 0, or -1 with an exception set. What is taken is borrowed from the list. */
static inline int pair_at(PyObject *list, Py_ssize_t k, PyObject **first, PyObject **second)
{
    PyObject *pair = PyList_GetItem(list, k);
    if (pair == NULL || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a list of pairs");
        return -1;
    }
    *first = PyTuple_GetItem(pair, 0);
    *second = PyTuple_GetItem(pair, 1);
    return 0;
}

/* observing.c: nothing that executes behind the wall is a call, and no override of functions applies. Of a thread's `state`. */
typedef struct {
    PyObject *state, *before, *plain;
} Wall;
int wall_raise(const Quick *q, Wall *wall); /* 0, or -1 with an exception set */
int wall_lower(const Wall *wall);
void wall_clear(Wall *wall);

/* rows.c */
int is_true(PyObject *object, PyObject *name);                  /* of an attribute: 1, 0, or -1 with an exception set */
PyObject *storage_of(const Quick *q, PyObject *tensor);         /* what is known of a tensor's storage, or None */
PyObject *producer_of(PyObject *storage, PyObject *level);      /* the call and slot that last wrote it, or None */
int set_producer(const Quick *q, PyObject *tensor, PyObject *storage, PyObject *level, PyObject *of, PyObject *name);
int record_at_length(const Quick *q, PyObject *of, PyObject *name, PyObject *tensor, PyObject *storage, PyObject *producer,
                     PyObject *step);                           /* add a row, whichever way: 0, or -1 with an exception set */

/* Methods of Quick, and the types that some of them make. */
PyObject *quick_storage(PyObject *self, PyObject *tensor);
PyObject *quick_slot(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_inputs(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_outputs(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_produced(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_hook(PyObject *self, PyObject *const *args, Py_ssize_t count); /* gradients.c */
int gradients_init(void);
PyObject *quick_observing(PyObject *self, PyObject *const *args, Py_ssize_t count); /* observing.c */
int observing_init(void);

#endif
