/* Level api: a function between the record of its inputs and that of its outputs; what functions.py does.
 *
 * Functions of which more is to be known than their name are not in `names`, and go to the Python code, as does every call while a
 * collective is under way.
 */
#include "calls.h"

typedef struct {
    PyObject *state, *name, *func, *args, *kwargs; /* borrowed */
    PyObject *inputs, *context, *call, *result;
    Edges edges;
    long *versions;
    int recorded;
} Function;

static void function_clear(Function *f)
{
    Py_CLEAR(f->inputs);
    Py_CLEAR(f->context);
    Py_CLEAR(f->call);
    edges_clear(&f->edges);
    PyMem_Free(f->versions);
    f->versions = NULL;
}

/* The version of a tensor; -1 where it tracks none (an inference tensor), -2 with an exception set. */
static long version_of(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttr(tensor, s__version);
    if (version == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return -1;
    }
    long found = version == NULL ? -2 : PyLong_AsLong(version);
    Py_XDECREF(version);
    return found == -1 ? -2 : found;
}

static int take_versions(Function *f)
{
    Py_ssize_t count = PyList_Size(f->inputs);
    f->versions = PyMem_Malloc(sizeof(long) * (size_t)(count + 1));
    if (f->versions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *slot, *tensor;
        if (pair_at(f->inputs, k, &slot, &tensor) || (f->versions[k] = version_of(tensor)) == -2)
            return -1;
    }
    return 0;
}

/* Begin the call: 0, or -1 with an exception set. */
static int begin(const Quick *q, Function *f)
{
    PyObject *task = NULL, *site = NULL;
    long number;
    Place place = {0};
    int found = running_task(q, &task, &number) ? -1 : place_of(q, f->state, number, &place);
    if (found == 0 || found == 2) {
        f->context = PyObject_CallFunctionObjArgs(q->begin_function, f->state, f->name, NULL);
        f->call = f->context == NULL ? NULL : PyObject_GetAttr(f->context, s_call);
    } else if (found > 0 && (site = site_of(q, f->state)) != NULL) {
        f->call = begin_call(q, s_api, &place, f->name, site, Py_None);
        if (f->call != NULL && link_runs(q, f->state, f->call) == 0)
            f->context = context_of(q, f->call, place.parent, place.scope, task);
    }
    Py_XDECREF(task);
    Py_XDECREF(site);
    place_clear(&place);
    return f->context == NULL || f->call == NULL || (f->recorded = is_recorded(f->call)) < 0 ? -1 : 0;
}

static int before(const Quick *q, void *data)
{
    Function *f = data;
    if ((f->inputs = tensors_in(s_input, f->args, f->kwargs)) == NULL || begin(q, f))
        return -1;
    if (f->recorded && (record_inputs(q, f->call, f->inputs, q->producing) ||
                        (PyList_Size(f->inputs) && add_values(q, f->call, f->func, f->args, f->kwargs))))
        return -1;
    if (f->recorded && q->invocation != Py_None && !PyList_Size(f->inputs)) { /* perhaps a factory */
        PyObject *heard = PyObject_CallMethod(q->invocation, "waits", "OO", f->call, f->func);
        Py_XDECREF(heard);
        if (heard == NULL)
            return -1;
    }
    return edges_take(q, &f->edges, f->inputs) || take_versions(f) ? -1 : 0;
}

/* Whether a tensor is among the first `count` of a list of (slot, tensor). */
static int is_among(PyObject *tensors, Py_ssize_t count, PyObject *tensor)
{
    for (Py_ssize_t k = 0; k < count; k++)
        if (PyTuple_GetItem(PyList_GetItem(tensors, k), 1) == tensor)
            return 1;
    return 0;
}

/* Add the inputs that the call wrote to and that are not among its results. */
static int add_written(Function *f, PyObject *outputs)
{
    Py_ssize_t results = PyList_Size(outputs);
    for (Py_ssize_t k = 0; k < PyList_Size(f->inputs); k++) {
        PyObject *slot, *tensor;
        if (pair_at(f->inputs, k, &slot, &tensor))
            return -1;
        long now = f->versions[k] < 0 ? f->versions[k] : version_of(tensor);
        if (now == f->versions[k] || is_among(outputs, results, tensor))
            continue;
        PyObject *rest = PyUnicode_Substring(slot, PyUnicode_GetLength(s_input), PyUnicode_GetLength(slot));
        PyObject *name = rest == NULL ? NULL : PyUnicode_FromFormat("output.written%U", rest), *pair = NULL;
        int bad = now == -2 || name == NULL || (pair = PyTuple_Pack(2, name, tensor)) == NULL || PyList_Append(outputs, pair);
        Py_XDECREF(rest);
        Py_XDECREF(name);
        Py_XDECREF(pair);
        if (bad)
            return -1;
    }
    return 0;
}

/* Note what produced one output, and record it; see Slots.results. `known`: whether it shares its storage with an input. */
static int add_result(const Quick *q, Function *f, PyObject *slot, PyObject *tensor, PyObject *storage, int known)
{
    int in_place = is_among(f->inputs, PyList_Size(f->inputs), tensor);
    if (q->follows && in_place && !q->has_aten && note_written(q, tensor))
        return -1;
    if (q->follows && (in_place || !known)) {
        if (f->recorded) {
            if (set_producer(q, tensor, is_plain(q, tensor) ? storage : Py_None, s_api, f->call, slot))
                return -1;
        } else {
            PyObject *done = PyObject_CallMethodObjArgs(q->buffers, s_produced, tensor, s_api, f->call, slot, NULL);
            Py_XDECREF(done);
            if (done == NULL)
                return -1;
        }
    }
    int fresh = !f->recorded ? 1 : known ? is_true(storage, s_uninitialised) : 0; /* a view of what nobody has written */
    return fresh < 0 || (!fresh && record_at_length(q, f->call, slot, tensor, storage, Py_None, Py_None)) ? -1 : 0;
}

static int add_results(const Quick *q, Function *f, PyObject *outputs)
{
    PyObject *before = PyList_New(0); /* the inputs' storages, which their dictionary holds */
    int bad = before == NULL;
    for (Py_ssize_t k = 0; !bad && k < PyList_Size(f->inputs); k++) {
        PyObject *slot, *tensor, *storage = pair_at(f->inputs, k, &slot, &tensor) ? NULL : storage_of(q, tensor);
        bad = storage == NULL || PyList_Append(before, storage);
        Py_XDECREF(storage);
    }
    for (Py_ssize_t k = 0; !bad && k < PyList_Size(outputs); k++) {
        PyObject *slot, *tensor, *storage = pair_at(outputs, k, &slot, &tensor) ? NULL : storage_of(q, tensor);
        int known = 0;
        for (Py_ssize_t i = 0; storage != NULL && storage != Py_None && !known && i < PyList_Size(before); i++)
            known = PyList_GetItem(before, i) == storage;
        bad = storage == NULL || add_result(q, f, slot, tensor, storage, known);
        Py_XDECREF(storage);
    }
    Py_XDECREF(before);
    return bad ? -1 : 0;
}

static int after(const Quick *q, void *data)
{
    Function *f = data;
    PyObject *outputs = tensors_in(s_output, f->result, NULL);
    int bad = outputs == NULL || add_written(f, outputs);
    int amended = bad ? 0 : PyDict_Contains(q->buffers_written, f->name);
    if (amended > 0) {
        PyObject *done = PyObject_CallFunctionObjArgs(q->add_buffers, outputs, f->name, f->args, f->kwargs, NULL);
        bad = done == NULL;
        Py_XDECREF(done);
    }
    bad = bad || amended < 0;
    if (!bad && f->recorded && PyList_Size(outputs) && !PyList_Size(f->inputs)) /* a factory */
        bad = add_values(q, f->call, f->func, f->args, f->kwargs);
    if (!bad && PyList_Size(outputs))
        bad = add_results(q, f, outputs);
    bad = bad || watch(q, &f->edges, f->context, outputs, f->recorded || q->has_api, 1);
    Py_XDECREF(outputs);
    return bad ? -1 : 0;
}

static PyObject *execute(const Quick *q, Function *f)
{
    int failed = guarded(q, f->state, f->name, before, f);
    if (failed) /* the capture has just ended */
        return failed < 0 ? NULL : PyObject_Call(f->func, f->args, f->kwargs);
    if (push(f->state, s_contexts, f->context))
        return NULL;
    f->result = PyObject_Call(f->func, f->args, f->kwargs);
    pop(f->state, s_contexts);
    if (f->result == NULL)
        return NULL;
    int active = is_true(q->session, s_active);
    if (active < 0 || (active && guarded(q, f->state, f->name, after, f) < 0))
        Py_CLEAR(f->result);
    return f->result;
}

/* The name by which a function is recorded here, None where it passes by; NULL without an exception: the long way. */
static PyObject *name_of(const Quick *q, PyObject *state, PyObject *func, PyObject *kwargs)
{
    PyObject *name = PyDict_GetItemWithError(q->names, func);
    if (name == NULL) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) /* a callable that has no hash */
            PyErr_Clear();
        return NULL;
    }
    if (name == Py_None)
        return name;
    if (PyDict_Size(q->in_flight) || (PyDict_Size(kwargs) && PyDict_Contains(kwargs, s_out)))
        return NULL;
    PyObject *stepping = PyObject_GetAttr(state, s_stepping);
    Py_XDECREF(stepping); /* the state holds it */
    int passes = stepping == NULL ? -1 : stepping == Py_None ? 0 : is_true(q->session, s_passes_optimizer);
    return passes ? NULL : name;
}

PyObject *quick_function(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]) || q->names == NULL) {
        PyErr_SetString(PyExc_TypeError, "function(func, args, kwargs), after teach");
        return NULL;
    }
    Function f = {.func = args[0], .args = args[1], .kwargs = args[2], .state = PyObject_GetAttr(q->threads, s_state)};
    int seen = f.state == NULL ? -1 : sees(q, f.state);
    f.name = seen > 0 ? name_of(q, f.state, f.func, f.kwargs) : NULL;
    PyObject *result = NULL;
    if (seen < 0 || PyErr_Occurred())
        ;
    else if (!seen || f.name == Py_None)
        result = PyObject_Call(f.func, f.args, f.kwargs);
    else if (f.name == NULL)
        result = PyObject_CallFunctionObjArgs(q->function_at_length, f.func, f.args, f.kwargs, NULL);
    else
        result = execute(q, &f);
    function_clear(&f);
    Py_XDECREF(f.state);
    return result;
}
