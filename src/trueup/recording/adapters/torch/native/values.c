/* The arguments that are no tensors: found again by what they are, and encoded by `trueup.recording.adapters.torch.tensors` when first met. */
#include "calls.h"

enum { DEEPEST = 4 };

static PyObject *frozen(const Quick *q, PyObject *value, int depth);

static PyObject *frozen_slice(const Quick *q, PyObject *value, int depth)
{
    PyObject *names[] = {s_start, s_stop, s_step}, *all = depth > DEEPEST ? NULL : PyTuple_New(4);
    if (all != NULL && PyTuple_SetItem(all, 3, Py_NewRef((PyObject *)&PySlice_Type)))
        Py_CLEAR(all);
    for (int k = 0; all != NULL && k < 3; k++) {
        PyObject *part = PyObject_GetAttr(value, names[k]), *one = part == NULL ? NULL : frozen(q, part, depth + 1);
        Py_XDECREF(part);
        if (one == NULL || PyTuple_SetItem(all, k, one))
            Py_CLEAR(all);
    }
    return all;
}

/* Something hashable that is equal for values that are encoded alike; NULL without an exception where there is nothing so simple. */
static PyObject *frozen(const Quick *q, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (value == Py_None || type == &PyBool_Type || type == &PyUnicode_Type)
        return Py_NewRef(value == Py_True ? (PyObject *)&PyBool_Type : value == Py_False ? Py_Ellipsis : value);
    if (type == &PyLong_Type) /* which True, False and floats equal */
        return Py_NewRef(value);
    if (type == &PyFloat_Type) { /* by its bits: -0.0 is not 0.0, and NaN equals itself */
        double number = PyFloat_AsDouble(value);
        return PyBytes_FromStringAndSize((const char *)&number, sizeof number);
    }
    if (type == &PySlice_Type)
        return frozen_slice(q, value, depth);
    int simple = PySet_Contains(q->simple_types, (PyObject *)type);
    if (simple)
        return simple < 0 ? NULL : Py_NewRef(value);
    if (type != &PyTuple_Type && type != &PyList_Type && (PyObject *)type != q->size_type)
        return NULL;
    int tuple = type != &PyList_Type;
    Py_ssize_t count = depth > DEEPEST ? -1 : tuple ? PyTuple_Size(value) : PyList_Size(value);
    PyObject *all = count < 0 ? NULL : PyTuple_New(count);
    for (Py_ssize_t k = 0; all != NULL && k < count; k++) {
        PyObject *one = frozen(q, tuple ? PyTuple_GetItem(value, k) : PyList_GetItem(value, k), depth + 1);
        if (one == NULL || PyTuple_SetItem(all, k, one))
            Py_CLEAR(all);
    }
    return all;
}

/* Add a name and a value to a key: 1, 0 where there is nothing so simple, or -1 with an exception set. */
static int add(const Quick *q, PyObject *key, PyObject *name, PyObject *value)
{
    PyObject *one = name == NULL ? NULL : frozen(q, value, 0);
    int done = one == NULL ? (PyErr_Occurred() ? -1 : 0) : PyList_Append(key, name) || PyList_Append(key, one) ? -1 : 1;
    Py_XDECREF(one);
    return done;
}

static int add_all(const Quick *q, PyObject *key, PyObject *args, PyObject *kwargs)
{
    int done = 1;
    for (Py_ssize_t k = 0; done > 0 && k < PyTuple_Size(args); k++) {
        PyObject *value = PyTuple_GetItem(args, k);
        if (is_tensor(value))
            continue;
        PyObject *name = PyLong_FromSsize_t(k);
        done = name == NULL ? -1 : add(q, key, name, value);
        Py_XDECREF(name);
    }
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (done > 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) /* what `add` calls changes no dictionary */
        if (!is_tensor(value))
            done = add(q, key, name, value);
    return done;
}

/* The encoded arguments, or None; see tensors.describe_values. */
static PyObject *described(const Quick *q, PyObject *args, PyObject *kwargs)
{
    PyObject *list = PyList_New(0), *key = NULL, *found = NULL;
    int simple = list == NULL ? -1 : add_all(q, list, args, kwargs);
    if (simple > 0 && PyList_Size(list) == 0) {
        found = Py_NewRef(Py_None);
    } else if (simple > 0 && (key = PyList_AsTuple(list)) != NULL) {
        found = PyDict_GetItemWithError(q->values, key);
        Py_XINCREF(found);
    }
    Py_XDECREF(list);
    if (found == NULL && !PyErr_Occurred()) {
        found = PyObject_CallFunctionObjArgs(q->describe_values, args, kwargs, NULL);
        if (found != NULL && key != NULL) {
            if (PyDict_Size(q->values) >= q->most_values)
                PyDict_Clear(q->values);
            if (PyDict_SetItem(q->values, key, found))
                Py_CLEAR(found);
        }
    }
    Py_XDECREF(key);
    return found;
}

PyObject *frozen_value(const Quick *q, PyObject *value) { return frozen(q, value, 0); }

int add_values(const Quick *q, PyObject *of, PyObject *func, PyObject *args, PyObject *kwargs)
{
    int briefly = func == NULL || q->invocation == Py_None;
    PyObject *text = briefly ? described(q, args, kwargs) : described_exactly(q, of, func, args, kwargs);
    int bad = text == NULL || (text != Py_None && add_row(q, of, q->arguments, text, Py_None, Py_None, Py_None));
    Py_XDECREF(text);
    return bad ? -1 : 0;
}
