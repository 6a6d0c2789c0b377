/* Which tensors a call has: what `trueup.recording.adapters.torch.tensors.named_tensors` does, twenty to fifty times a step and module. */
#include "calls.h"
#include "functions.h"

enum { POSITIONS = 32, DEEPEST = 8 }; /* as tensors.MAX_DEPTH */

static PyObject *tensor_type, *leaves, *walk_at_length, *fields_name, *names; /* names: prefix -> tuple of "prefix.0", "prefix.1" ... */

/* "prefix.k", the same object each time for those that are common, so that its hash is known. */
static PyObject *position_name(PyObject *prefix, Py_ssize_t k)
{
    if (k >= POSITIONS)
        return PyUnicode_FromFormat("%U.%zd", prefix, k);
    PyObject *row = PyDict_GetItemWithError(names, prefix);
    if (row == NULL) {
        if (PyErr_Occurred())
            return NULL;
        if (PyDict_Size(names) >= 256) /* prefixes of nested arguments */
            PyDict_Clear(names);
        row = PyTuple_New(POSITIONS);
        for (Py_ssize_t i = 0; row != NULL && i < POSITIONS; i++) {
            PyObject *name = PyUnicode_FromFormat("%U.%zd", prefix, i);
            if (name == NULL || PyTuple_SetItem(row, i, name))
                Py_CLEAR(row);
        }
        if (row == NULL || PyDict_SetItem(names, prefix, row)) {
            Py_XDECREF(row);
            return NULL;
        }
        Py_DECREF(row); /* the dict holds it */
    }
    return Py_NewRef(PyTuple_GetItem(row, k));
}

static PyObject *key_name(PyObject *prefix, PyObject *key)
{
    if (PyUnicode_Check(key))
        return PyUnicode_FromFormat("%U.%U", prefix, key);
    if (PyLong_Check(key) || PyFloat_Check(key))
        return PyUnicode_FromFormat("%U.%S", prefix, key);
    PyObject *kind = PyObject_GetAttrString((PyObject *)Py_TYPE(key), "__name__"); /* its text may hold an address */
    PyObject *name = kind == NULL ? NULL : PyUnicode_FromFormat("%U.%U", prefix, kind);
    Py_XDECREF(kind);
    return name;
}

int is_tensor(PyObject *value) { return PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)tensor_type); }

/* Take a tensor, or what may hold some: `name` is a new reference, which is given up here. */
static int take(PyObject *name, PyObject *item, PyObject *found, int depth);

static int is_leaf(PyObject *item)
{
    PyTypeObject *type = Py_TYPE(item);
    if (item == Py_None || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type || type == &PyUnicode_Type)
        return 1;
    return is_tensor(item) ? 0 : PySet_Contains(leaves, (PyObject *)type);
}

static int walk(PyObject *prefix, PyObject *value, PyObject *found, int depth)
{
    if (PyTuple_Check(value) || PyList_Check(value)) {
        int tuple = PyTuple_Check(value);
        for (Py_ssize_t k = 0; k < (tuple ? PyTuple_Size(value) : PyList_Size(value)); k++) {
            PyObject *item = tuple ? PyTuple_GetItem(value, k) : PyList_GetItem(value, k);
            int leaf = is_leaf(item);
            if (leaf < 0 || (!leaf && take(position_name(prefix, k), item, found, depth)))
                return -1;
        }
        return 0;
    }
    if (PyDict_Check(value)) {
        PyObject *items = PyDict_Items(value); /* a list of pairs: taking them may run code that changes the dict */
        int bad = items == NULL;
        for (Py_ssize_t k = 0; !bad && k < PyList_Size(items); k++) {
            PyObject *pair = PyList_GetItem(items, k), *item = PyTuple_GetItem(pair, 1);
            int leaf = is_leaf(item);
            bad = leaf < 0 || (!leaf && take(key_name(prefix, PyTuple_GetItem(pair, 0)), item, found, depth));
        }
        Py_XDECREF(items);
        return bad ? -1 : 0;
    }
    if (!PyObject_HasAttr((PyObject *)Py_TYPE(value), fields_name)) /* of a dataclass */
        return 0;
    PyObject *level = PyLong_FromLong(depth);
    PyObject *done = level == NULL ? NULL : PyObject_CallFunctionObjArgs(walk_at_length, prefix, value, found, level, NULL);
    Py_XDECREF(level);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int take(PyObject *name, PyObject *item, PyObject *found, int depth)
{
    int bad = name == NULL;
    Py_INCREF(item);
    if (!bad && is_tensor(item)) {
        PyObject *pair = PyTuple_Pack(2, name, item);
        bad = pair == NULL || PyList_Append(found, pair);
        Py_XDECREF(pair);
    } else if (!bad && depth < DEEPEST) {
        bad = walk(name, item, found, depth + 1);
    }
    Py_DECREF(item);
    Py_XDECREF(name);
    return bad ? -1 : 0;
}

PyObject *tensors_in(PyObject *prefix, PyObject *value, PyObject *kwargs)
{
    PyObject *found = PyList_New(0);
    int bad = found == NULL;
    if (!bad)
        bad = is_tensor(value) ? take(position_name(prefix, 0), value, found, 0) : walk(prefix, value, found, 0);
    if (!bad && kwargs != NULL)
        bad = walk(prefix, kwargs, found, 0);
    if (bad)
        Py_CLEAR(found);
    return found;
}

PyObject *named_tensors(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (names == NULL || count < 2 || count > 3 || !PyUnicode_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "named_tensors(prefix, args, kwargs=None), after set_types");
        return NULL;
    }
    return tensors_in(args[0], args[1], count == 3 && args[2] != Py_None ? args[2] : NULL);
}

PyObject *set_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *tensor, *types, *at_length;
    if (!PyArg_ParseTuple(args, "OOO", &tensor, &types, &at_length))
        return NULL;
    if (!PyType_Check(tensor) || !PyAnySet_Check(types)) {
        PyErr_SetString(PyExc_TypeError, "set_types(torch.Tensor, frozenset of types that hold no tensor, the long way of a walk)");
        return NULL;
    }
    if (names == NULL && ((names = PyDict_New()) == NULL || (fields_name = PyUnicode_InternFromString("__dataclass_fields__")) == NULL))
        return NULL;
    Py_XDECREF(tensor_type);
    Py_XDECREF(leaves);
    Py_XDECREF(walk_at_length);
    tensor_type = Py_NewRef(tensor);
    leaves = Py_NewRef(types);
    walk_at_length = Py_NewRef(at_length);
    Py_RETURN_NONE;
}
