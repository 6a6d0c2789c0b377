/* How a call was made (detail `tensor`): found again by what it is made of, and described by `trueup.recording.adapters.torch.invocations` when
 * first met.
 *
 * The key is a flat tuple: the function, the grad mode and autocast, then the arguments one after the other. Each container and each
 * tensor begins with its type, so that no two structures have one key; a tensor is told by what its description says of it: whether it
 * requires gradients, its offset, and the first argument of its storage.
 */
#include <string.h>

#include "calls.h"

enum { DEEPEST = 4 };

typedef struct {
    const Quick *q;
    PyObject *key, *storages; /* lists */
} Making;

static int put(Making *m, PyObject *item) /* takes the reference */
{
    int bad = item == NULL || PyList_Append(m->key, item);
    Py_XDECREF(item);
    return bad ? -1 : 1;
}

/* Number of the first argument that has a storage, or -1 with an exception set. */
static Py_ssize_t first_with(Making *m, PyObject *storage)
{
    Py_ssize_t count = PyList_Size(m->storages);
    for (Py_ssize_t k = 0; k < count; k++)
        if (PyList_GetItem(m->storages, k) == storage)
            return k;
    return PyList_Append(m->storages, storage) ? -1 : count;
}

/* All of these: 1, 0 where the description has to be made at length, or -1 with an exception set. */
static int put_tensor(Making *m, PyObject *tensor)
{
    if (!is_dense(m->q, tensor))
        return PyErr_Occurred() ? -1 : 0;
    int gradient = is_true(tensor, s_requires_grad);
    PyObject *storage = gradient < 0 ? NULL : call(tensor, s_untyped_storage), *offset = NULL;
    Py_ssize_t first = storage == NULL ? -1 : first_with(m, storage);
    Py_XDECREF(storage);
    if (first < 0 || (offset = call(tensor, s_storage_offset)) == NULL)
        return -1;
    if (put(m, Py_NewRef(m->q->tensor)) < 0) {
        Py_DECREF(offset);
        return -1;
    }
    return put(m, offset) < 0 ? -1 : put(m, PyLong_FromSsize_t(2 * first + gradient));
}

static int put_value(Making *m, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (is_tensor(value))
        return put_tensor(m, value);
    if (value == Py_Ellipsis) /* which stands for False in a key */
        return put(m, Py_NewRef(m->q->arguments));
    if (type != &PyTuple_Type && type != &PyList_Type && (PyObject *)type != m->q->size_type) {
        PyObject *one = frozen_value(m->q, value);
        return one == NULL ? (PyErr_Occurred() ? -1 : 0) : put(m, one);
    }
    int tuple = type != &PyList_Type, done = depth > DEEPEST ? 0 : put(m, Py_NewRef((PyObject *)type));
    Py_ssize_t count = tuple ? PyTuple_Size(value) : PyList_Size(value);
    if (done > 0)
        done = put(m, PyLong_FromSsize_t(count));
    for (Py_ssize_t k = 0; done > 0 && k < count; k++)
        done = put_value(m, tuple ? PyTuple_GetItem(value, k) : PyList_GetItem(value, k), depth + 1);
    return done;
}

/* Of a mode that is asked for by a function without arguments. */
static int put_answer(Making *m, PyObject *function) { return put(m, PyObject_CallObject(function, NULL)); }

static int put_call(Making *m, PyObject *func, PyObject *args, PyObject *kwargs)
{
    int done = put(m, Py_NewRef(func));
    if (done > 0)
        done = put_answer(m, m->q->grad_enabled);
    if (done > 0)
        done = put_answer(m, m->q->autocast);
    if (done > 0)
        done = put_value(m, args, 0);
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (done > 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) { /* what `put` calls changes no dictionary */
        done = PyUnicode_CompareWithASCIIString(name, "out") == 0 ? 0 : put(m, Py_NewRef(name));
        if (done > 0)
            done = put_value(m, value, 0);
    }
    return done;
}

/* The key of a call, or NULL: with an exception set, or where it has to be described at length. */
static PyObject *key_of(const Quick *q, PyObject *func, PyObject *args, PyObject *kwargs)
{
    int inside = is_transformed(q);
    if (inside)
        return NULL;
    Making m = {q, PyList_New(0), PyList_New(0)};
    int done = m.key == NULL || m.storages == NULL ? -1 : put_call(&m, func, args, kwargs);
    PyObject *key = done > 0 ? PyList_AsTuple(m.key) : NULL;
    Py_XDECREF(m.key);
    Py_XDECREF(m.storages);
    return key;
}

/* Whether the CPU's generator has the state that was last described, in this step, and no other device has one: 1, 0, or -1 with an
 * exception set. It is asked before each function: in Python that took a third of what such a call costs. */
static int is_known_state(const Quick *q)
{
    if (PyDict_Size(q->devices) != 1)
        return 0;
    PyObject *last = PyObject_GetAttr(q->invocation, s_last), *step = NULL, *now = NULL, *state = NULL, *pointer = NULL;
    int same = last == NULL ? -1 : PyTuple_Check(last);
    if (same > 0) {
        step = PyObject_GetAttr(q->recorder, s_step);
        same = step == NULL ? -1 : PyObject_RichCompareBool(step, PyTuple_GetItem(last, 0), Py_EQ);
    }
    if (same > 0) {
        state = PyObject_CallObject(q->generator_state, NULL);
        pointer = state == NULL ? NULL : call(state, s_data_ptr);
        now = PyTuple_GetItem(last, 1); /* as many bytes as every state of this generator */
        void *bytes = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
        same = bytes == NULL ? -1 : memcmp(bytes, PyBytes_AsString(now), (size_t)PyBytes_Size(now)) == 0;
    }
    Py_XDECREF(last);
    Py_XDECREF(step);
    Py_XDECREF(state);
    Py_XDECREF(pointer);
    return same;
}

/* (value, invocation) of the row `arguments`, a new reference; see Invocations.describe. */
PyObject *described_exactly(const Quick *q, PyObject *of, PyObject *func, PyObject *args, PyObject *kwargs)
{
    PyObject *key = key_of(q, func, args, kwargs), *found = NULL;
    if (key != NULL) {
        found = PyDict_GetItemWithError(q->invocations, key);
        Py_XINCREF(found);
        if (found == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) { /* a function without a hash */
            PyErr_Clear();
            Py_CLEAR(key);
        }
    }
    if (found == NULL && !PyErr_Occurred()) {
        found = PyObject_CallMethod(q->invocation, "describe", "OOO", func, args, kwargs == NULL ? Py_None : kwargs);
        if (found != NULL && key != NULL) {
            if (PyDict_Size(q->invocations) >= q->most_values)
                PyDict_Clear(q->invocations);
            if (PyDict_SetItem(q->invocations, key, found))
                Py_CLEAR(found);
        }
    }
    int outside = key != NULL;
    Py_XDECREF(key);
    if (found == NULL)
        return NULL;
    PyObject *pair = PyTuple_GetItem(found, 0), *draws = PyTuple_GetItem(found, 1), *result = NULL;
    int asks = pair != NULL && draws == Py_True, known = asks && outside ? is_known_state(q) : 0;
    if (pair != NULL && draws != NULL && known >= 0)
        result = asks && !known ? PyObject_CallMethod(q->invocation, "with_state", "OO", of, pair) : Py_NewRef(pair);
    Py_DECREF(found);
    return result;
}
