/* The autograd graph of a call, walked from its outputs to the edges of its inputs: what `trueup.recording.adapters.torch.gradients` does. */
#include "calls.h"
#include "functions.h"

enum { MAX_NODES = 20000 }; /* as gradients.MAX_NODES */
static const unsigned long long ACCUMULATE = ~0ULL; /* sequence number of nodes that add to a leaf's .grad */

/* Set a default as dict.setdefault does: 0, or -1 with an exception set. `key` is a new reference, which is given up here. */
static int set_default(PyObject *dict, PyObject *key, PyObject *value)
{
    int bad = key == NULL || (PyDict_GetItemWithError(dict, key) == NULL && (PyErr_Occurred() || PyDict_SetItem(dict, key, value)));
    Py_XDECREF(key);
    return bad ? -1 : 0;
}

int note_edge(PyObject *slot, PyObject *tensor, PyObject *slots, PyObject *leaves)
{
    PyObject *requires = PyObject_GetAttr(tensor, s_requires_grad);
    Py_XDECREF(requires); /* True and False live on */
    if (requires != Py_True)
        return requires == NULL ? -1 : 0;
    PyObject *node = PyObject_GetAttr(tensor, s_grad_fn);
    if (node == NULL) { /* a view made without gradients whose base was written since: using it is an error too */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int bad;
    if (node == Py_None) {
        bad = set_default(leaves, PyLong_FromVoidPtr(tensor), slot);
    } else {
        PyObject *number = PyObject_GetAttr(tensor, s_output_nr);
        bad = set_default(slots, number == NULL ? NULL : PyTuple_Pack(2, node, number), slot);
        Py_XDECREF(number);
    }
    Py_DECREF(node);
    return bad;
}

PyObject *note_edges(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !PyList_Check(args[0]) || !PyDict_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "note_edges(list of (slot, tensor), slots by edge, slots by leaf)");
        return NULL;
    }
    for (Py_ssize_t k = 0; k < PyList_Size(args[0]); k++) {
        PyObject *slot, *tensor;
        if (pair_at(args[0], k, &slot, &tensor) || note_edge(slot, tensor, args[1], args[2]))
            return NULL;
    }
    Py_RETURN_NONE;
}

/* Mark a node as made by a call: 1, or 0 if it belongs to another already. */
int tag(PyObject *node, PyObject *context)
{
    PyObject *metadata = PyObject_GetAttr(node, s_metadata);
    if (metadata == NULL)
        return -1;
    PyObject *owner = PyDict_GetItemWithError(metadata, s_trueup);
    int mine = owner == context;
    if (owner == NULL)
        mine = PyErr_Occurred() || PyDict_SetItem(metadata, s_trueup, context) ? -1 : 1;
    Py_DECREF(metadata);
    return mine;
}

typedef struct {
    PyObject *context, *known, *leaves, *pending, *seen, *boundary;
    unsigned long long first;
    int own;
} Walk;

/* Look at one edge; `slot` is set (borrowed) where it is one of the call's inputs. */
static int follow(Walk *w, PyObject *edge, PyObject **slot)
{
    if ((*slot = PyDict_GetItemWithError(w->known, edge)) != NULL)
        return 0;
    PyObject *node = PyErr_Occurred() ? NULL : PyTuple_GetItem(edge, 0);
    int seen = node == NULL ? -1 : node == Py_None ? 1 : PySet_Contains(w->seen, node);
    if (seen)
        return seen < 0 ? -1 : 0;
    PyObject *number = PyObject_CallMethodObjArgs(node, s__sequence_nr, NULL);
    unsigned long long sequence = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    if (sequence == ACCUMULATE) {
        if (!PyDict_Size(w->leaves))
            return 0;
        PyObject *leaf = PyObject_GetAttr(node, s_variable), *address = leaf == NULL ? NULL : PyLong_FromVoidPtr(leaf);
        if (address != NULL)
            *slot = PyDict_GetItemWithError(w->leaves, address);
        Py_XDECREF(leaf);
        Py_XDECREF(address);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (sequence < w->first) /* made before */
        return 0;
    int mine = w->own ? tag(node, w->context) : 1; /* else another call inside made it */
    return mine < 0 || (mine && (PySet_Add(w->seen, node) || PyList_Append(w->pending, node))) ? -1 : 0;
}

/* Add (k, "grad_" + slot) to what a node holds of the call's edges. */
static int hold(Walk *w, PyObject *node, Py_ssize_t k, PyObject *slot)
{
    PyObject *name = PyUnicode_FromFormat("grad_%U", slot), *item = name == NULL ? NULL : Py_BuildValue("nN", k, name);
    PyObject *held = item == NULL ? NULL : PyDict_GetItemWithError(w->boundary, node);
    int bad = item == NULL || (held == NULL && PyErr_Occurred());
    if (!bad && held == NULL) {
        held = PyList_New(0);
        bad = held == NULL || PyDict_SetItem(w->boundary, node, held);
        Py_XDECREF(held); /* the dict holds it */
    }
    bad = bad || PyList_Append(held, item);
    Py_XDECREF(item);
    return bad ? -1 : 0;
}

static int walk_node(Walk *w, PyObject *node)
{
    PyObject *edges = PyObject_GetAttr(node, s_next_functions);
    int bad = edges == NULL || !PyTuple_Check(edges);
    for (Py_ssize_t k = 0; !bad && k < PyTuple_Size(edges); k++) {
        PyObject *slot = NULL;
        bad = follow(w, PyTuple_GetItem(edges, k), &slot) || (slot != NULL && hold(w, node, k, slot));
    }
    Py_XDECREF(edges);
    return bad ? -1 : 0;
}

/* Walk from the nodes in `pending`, which is emptied; a dict: node -> list of (position, name of the gradient). */
static PyObject *walk_graph(Walk *w, Py_ssize_t most)
{
    w->seen = PySet_New(w->pending);
    w->boundary = PyDict_New();
    int bad = w->seen == NULL || w->boundary == NULL;
    while (!bad && PyList_Size(w->pending) && PySet_Size(w->seen) < most) {
        Py_ssize_t last = PyList_Size(w->pending) - 1;
        PyObject *node = Py_NewRef(PyList_GetItem(w->pending, last));
        bad = PyList_SetSlice(w->pending, last, last + 1, NULL) || walk_node(w, node);
        Py_DECREF(node);
    }
    Py_XDECREF(w->seen);
    if (bad)
        Py_CLEAR(w->boundary);
    return w->boundary;
}

PyObject *boundary_of(PyObject *context, const Edges *edges, PyObject *pending, int own)
{
    Walk w = {.context = context, .known = edges->slots, .leaves = edges->leaves, .pending = pending, .own = own};
    w.first = PyLong_AsUnsignedLongLong(edges->first);
    return PyErr_Occurred() ? NULL : walk_graph(&w, MAX_NODES);
}

PyObject *boundary(PyObject *self, PyObject *args)
{
    (void)self;
    Walk w = {0};
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "OKO!O!O!pn", &w.context, &w.first, &PyDict_Type, &w.known, &PyDict_Type, &w.leaves, &PyList_Type,
                          &w.pending, &w.own, &most))
        return NULL;
    return walk_graph(&w, most);
}
