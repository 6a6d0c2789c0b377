/* Level module: a module's call between the record of its inputs and parameters and that of its outputs; what session.py does. */
#include "calls.h"

typedef struct {
    PyObject *state, *module, *args, *kwargs; /* borrowed */
    PyObject *kind, *context, *call, *result; /* kind: name of its class */
    Edges edges;
    int recorded;
} Body;

/* Names of a module's tensors, the same object each time: "param." and "weight" give "param.weight". */
static PyObject *own_name(const Quick *q, PyObject *prefix, PyObject *name)
{
    PyObject *key = PyTuple_Pack(2, prefix, name);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(q->own_names, key);
    Py_XINCREF(found);
    if (key != NULL && found == NULL && !PyErr_Occurred()) {
        found = PyUnicode_FromFormat("%U.%U", prefix, name);
        if (found != NULL && PyDict_Size(q->own_names) < 4096 && PyDict_SetItem(q->own_names, key, found))
            Py_CLEAR(found);
    }
    Py_XDECREF(key);
    return found;
}

/* Whether a class gives its parameters and buffers as nn.Module does: 1, 0, or -1 with an exception set. */
static int is_usual(const Quick *q, PyObject *type)
{
    PyObject *known = PyDict_GetItemWithError(q->usual, type);
    if (known == NULL && !PyErr_Occurred()) {
        PyObject *found = PyObject_CallFunctionObjArgs(q->is_usual, type, NULL);
        int bad = found == NULL || PyDict_SetItem(q->usual, type, found);
        Py_XDECREF(found); /* True and False live on */
        known = bad ? NULL : found;
    }
    return known == NULL ? -1 : known == Py_True;
}

/* The parameters or buffers that a module holds itself, as (slot, tensor); see modules._own. */
static PyObject *own_tensors(const Quick *q, PyObject *module, PyObject *prefix, PyObject *attribute, PyObject *at_length)
{
    PyObject *held = PyObject_GetAttr(module, attribute), *found = NULL, *name, *tensor;
    int usual = held == NULL ? -1 : !PyDict_Check(held) || PyDict_Size(held) > 8 ? 0 : is_usual(q, (PyObject *)Py_TYPE(module));
    Py_ssize_t at = 0;
    if (usual > 0)
        found = PyList_New(0);
    while (found != NULL && usual > 0 && PyDict_Next(held, &at, &name, &tensor)) {
        if (tensor == Py_None)
            continue;
        usual = is_plain(q, tensor) && PyUnicode_Check(name); /* a lazy one is of another class */
        for (Py_ssize_t k = 0; usual && k < PyList_Size(found); k++)
            usual = PyTuple_GetItem(PyList_GetItem(found, k), 1) != tensor; /* a tensor held twice is named once */
        PyObject *slot = usual ? own_name(q, prefix, name) : NULL, *pair = slot == NULL ? NULL : PyTuple_Pack(2, slot, tensor);
        Py_XDECREF(slot);
        if (usual && (pair == NULL || PyList_Append(found, pair)))
            Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    Py_XDECREF(held);
    if (usual == 0 && !PyErr_Occurred()) {
        Py_XDECREF(found);
        found = PyObject_CallFunctionObjArgs(at_length, module, NULL);
    }
    return found;
}

/* Begin the call: 0, or -1 with an exception set. */
static int begin(const Quick *q, Body *b)
{
    PyObject *parent = last_of(b->state, s_modules), *inner = parent == NULL ? NULL : last_of(b->state, s_running);
    PyObject *outer = inner == NULL ? NULL : last_of(b->state, s_contexts), *task = NULL, *site = NULL;
    long number;
    Place place = {0};
    int found = outer == NULL || running_task(q, &task, &number) ? -1 : outer == Py_None && number == -1;
    int observed = found < 0 ? -1 : is_true(b->state, s_observed);
    if (observed < 0 || !found || !observed) { /* inside a function, in a backward pass, on another thread */
        found = observed < 0 ? -1 : 0;
    } else {
        place.phase = Py_NewRef(s_forward);
        place.scope = PyObject_CallMethodObjArgs(q->scopes, s_path, b->module, inner, NULL);
        place.above = parent == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(parent, s_call);
        site = place.scope == NULL || place.above == NULL ? NULL : site_of(q, b->state);
        b->call = site == NULL ? NULL : begin_call(q, s_module, &place, b->kind, site, Py_None);
        if (b->call != NULL && link_runs(q, b->state, b->call) == 0)
            b->context = context_of(q, b->call, parent, place.scope, task);
    }
    if (found == 0) {
        b->context = PyObject_CallFunctionObjArgs(q->begin_module, b->state, b->module, NULL);
        b->call = b->context == NULL ? NULL : PyObject_GetAttr(b->context, s_call);
    }
    Py_XDECREF(parent);
    Py_XDECREF(inner);
    Py_XDECREF(outer);
    Py_XDECREF(task);
    Py_XDECREF(site);
    place_clear(&place);
    return b->context == NULL || b->call == NULL || (b->recorded = is_recorded(b->call)) < 0 ? -1 : 0;
}

static int before(const Quick *q, void *data)
{
    Body *b = data;
    if (begin(q, b))
        return -1;
    if (!q->has_module)
        return 0;
    PyObject *inputs = tensors_in(s_input, b->args, b->kwargs), *own = NULL;
    int bad = inputs == NULL;
    if (!bad && b->recorded)
        bad = record_inputs(q, b->call, inputs, q->producing) ||
              (own = own_tensors(q, b->module, s_param, s__parameters, q->parameters_of)) == NULL ||
              record_inputs(q, b->call, own, q->producing) || add_values(q, b->call, NULL, b->args, b->kwargs);
    bad = bad || edges_take(q, &b->edges, inputs);
    Py_XDECREF(inputs);
    Py_XDECREF(own);
    return bad ? -1 : 0;
}

/* Note what a module returned; where modules are all that is recorded, they are the producers. See Slots.module_outputs. */
static int note_outputs(const Quick *q, const Body *b, PyObject *outputs)
{
    for (Py_ssize_t k = 0; k < PyList_Size(outputs); k++) {
        PyObject *slot, *tensor, *storage = pair_at(outputs, k, &slot, &tensor) ? NULL : storage_of(q, tensor);
        int bad = storage == NULL || (storage != Py_None && PyObject_SetAttr(storage, s_uninitialised, Py_False));
        if (!bad && q->only_modules && b->recorded) {
            bad = set_producer(q, tensor, is_plain(q, tensor) ? storage : Py_None, s_module, b->call, slot);
        } else if (!bad && q->only_modules) {
            PyObject *done = PyObject_CallMethodObjArgs(q->buffers, s_produced, tensor, s_module, b->call, slot, NULL);
            bad = done == NULL;
            Py_XDECREF(done);
        }
        Py_XDECREF(storage);
        if (bad)
            return -1;
    }
    return 0;
}

static int after(const Quick *q, void *data)
{
    Body *b = data;
    PyObject *outputs = tensors_in(s_output, b->result, NULL), *own = NULL, *none = PyList_New(0);
    int bad = outputs == NULL || none == NULL || note_outputs(q, b, outputs);
    if (!bad && b->recorded)
        bad = record_outputs(q, b->call, outputs, none, Py_None) ||
              (own = own_tensors(q, b->module, q->output_buffer, s__buffers, q->buffers_of)) == NULL ||
              record_outputs(q, b->call, own, none, Py_None);
    bad = bad || watch(q, &b->edges, b->context, outputs, 1, 0);
    Py_XDECREF(outputs);
    Py_XDECREF(own);
    Py_XDECREF(none);
    return bad ? -1 : 0;
}

/* Execute the module's own call, inside whose context everything belongs to it, not to an outer function. */
static int execute(const Quick *q, Body *b, PyObject *original)
{
    PyObject *outer = PyObject_GetAttr(b->state, s_contexts), *none = PyList_New(0);
    int pushed = 0, bad = outer == NULL || none == NULL || push(b->state, s_modules, b->context);
    if (!bad) {
        bad = push(b->state, s_running, b->module);
        pushed = !bad;
        if (bad)
            pop(b->state, s_modules);
    }
    if (!bad && (bad = PyObject_SetAttr(b->state, s_contexts, none)) == 0)
        b->result = PyObject_CallFunctionObjArgs(q->execute_module, original, b->module, b->args, b->kwargs, NULL);
    if (pushed) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        pop(b->state, s_modules);
        pop(b->state, s_running);
        if (PyObject_SetAttr(b->state, s_contexts, outer))
            PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(outer);
    Py_XDECREF(none);
    return bad || b->result == NULL ? -1 : 0;
}

PyObject *quick_module(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 5 || !PyTuple_Check(args[3]) || !PyDict_Check(args[4]) || q->execute_module == NULL) {
        PyErr_SetString(PyExc_TypeError, "module(state, original, module, args, kwargs), after teach");
        return NULL;
    }
    Body b = {.state = args[0], .module = args[2], .args = args[3], .kwargs = args[4]};
    b.kind = PyObject_GetAttr((PyObject *)Py_TYPE(b.module), s___name__);
    if (b.kind != NULL && PyUnicode_CompareWithASCIIString(b.kind, "OptimizedModule") == 0) { /* torch.compile's wrapper */
        Py_DECREF(b.kind);
        return PyObject_CallFunctionObjArgs(q->module_at_length, b.state, args[1], b.module, b.args, b.kwargs, NULL);
    }
    int failed = b.kind == NULL ? -1 : guarded(q, b.state, b.kind, before, &b), active = 0;
    if (failed > 0) { /* the capture has just ended */
        b.result = PyObject_CallFunctionObjArgs(q->execute_module, args[1], b.module, b.args, b.kwargs, NULL);
    } else if (!failed && execute(q, &b, args[1]) == 0) {
        active = is_true(q->session, s_active);
        if (active < 0 || (active && guarded(q, b.state, b.kind, after, &b) < 0))
            Py_CLEAR(b.result);
    }
    edges_clear(&b.edges);
    Py_XDECREF(b.kind);
    Py_XDECREF(b.context);
    Py_XDECREF(b.call);
    return b.result;
}
