/* Level aten: a dispatcher operator between the record of its inputs and that of its outputs; what functions.py does.
 *
 * Operators of which more is to be known than their schema are not in `operators`, and go to the Python code, as does every call
 * while a collective is under way.
 */
#include "calls.h"

typedef struct {
    PyObject *state, *func, *args, *kwargs; /* borrowed */
    PyObject *operator, *name, *call, *result;
    int recorded;
} Execution;

/* Begin the call of an operator that autograd executes by itself: 1, 0 for the long way, -1 with an exception set. */
static int begin_backward(const Quick *q, Execution *e)
{
    PyObject *stepping = PyObject_GetAttr(e->state, s_stepping);
    Py_XDECREF(stepping); /* the state holds it */
    if (stepping != Py_None)
        return stepping == NULL ? -1 : 0;
    PyObject *owner = PyObject_CallObject(q->running_owner, NULL);
    if (owner == NULL || owner == Py_None) {
        Py_XDECREF(owner);
        return owner == NULL ? -1 : 0;
    }
    Place place = {.phase = Py_NewRef(s_backward), .scope = PyObject_GetAttr(owner, s_scope), .above = backward_of(q, owner)};
    PyObject *site = place.above == NULL ? NULL : PyObject_GetAttr(place.above, s_site);
    PyObject *forward = site == NULL ? NULL : PyObject_GetAttr(place.above, s_forward_seq);
    if (place.scope != NULL && forward != NULL)
        e->call = begin_call(q, s_aten, &place, e->name, site, forward);
    Py_DECREF(owner);
    Py_XDECREF(site);
    Py_XDECREF(forward);
    place_clear(&place);
    return e->call == NULL ? -1 : 1;
}

static int begin(const Quick *q, Execution *e)
{
    PyObject *task = NULL, *site = NULL, *forward = NULL;
    long number;
    Place place = {0};
    int found = running_task(q, &task, &number) ? -1 : place_of(q, e->state, number, &place);
    if (found == 1) {
        int outside = place.above == Py_None;
        site = outside ? site_of(q, e->state) : PyObject_GetAttr(place.above, s_site);
        forward = site == NULL || outside ? Py_NewRef(Py_None) : PyObject_GetAttr(place.above, s_forward_seq);
        if (site != NULL && forward != NULL)
            e->call = begin_call(q, s_aten, &place, e->name, site, forward);
    } else if (found == 2) {
        found = begin_backward(q, e);
    }
    int linked = e->call == NULL ? 0 : link_runs(q, e->state, e->call);
    if (found >= 0 && !linked && e->call == NULL && !PyErr_Occurred())
        e->call = PyObject_CallFunctionObjArgs(q->begin_operator, e->operator, e->state, NULL);
    Py_XDECREF(task);
    Py_XDECREF(site);
    Py_XDECREF(forward);
    place_clear(&place);
    return found < 0 || linked || e->call == NULL || (e->recorded = is_recorded(e->call)) < 0 ? -1 : 0;
}

static int before(const Quick *q, void *data)
{
    Execution *e = data;
    if (begin(q, e))
        return -1;
    if (!e->recorded)
        return 0;
    PyObject *inputs = tensors_in(s_input, e->args, e->kwargs);
    int bad = inputs == NULL || record_inputs(q, e->call, inputs, s_aten) || add_values(q, e->call, e->func, e->args, e->kwargs);
    Py_XDECREF(inputs);
    return bad ? -1 : 0;
}

/* Take the tensors of a written argument: note that they were written, and make outputs of those that are no results. */
static int add_written(const Quick *q, Execution *e, PyObject *place, PyObject *outputs, Py_ssize_t results)
{
    Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(place, 0));
    PyObject *name = PyTuple_GetItem(place, 1);
    PyObject *value = position < PyTuple_Size(e->args) ? PyTuple_GetItem(e->args, position) : PyDict_GetItemWithError(e->kwargs, name);
    if (value == NULL)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *prefix = PyUnicode_FromFormat("output.%U", name), *found = NULL;
    if (prefix != NULL && is_tensor(value))
        found = Py_BuildValue("[(OO)]", prefix, value);
    else if (prefix != NULL)
        found = tensors_in(prefix, value, NULL);
    int bad = found == NULL;
    for (Py_ssize_t k = 0; !bad && k < PyList_Size(found); k++) {
        PyObject *pair = PyList_GetItem(found, k), *tensor = PyTuple_GetItem(pair, 1);
        int returned = 0;
        for (Py_ssize_t i = 0; !returned && i < results; i++)
            returned = PyTuple_GetItem(PyList_GetItem(outputs, i), 1) == tensor;
        bad = note_written(q, tensor) || (!returned && PyList_Append(outputs, pair));
    }
    Py_XDECREF(prefix);
    Py_XDECREF(found);
    return bad ? -1 : 0;
}

static int after(const Quick *q, void *data)
{
    Execution *e = data;
    PyObject *outputs = tensors_in(s_output, e->result, NULL), *written = PyObject_GetAttr(e->operator, s_written), *inputs = NULL;
    int view = is_true(e->operator, s_view), bad = outputs == NULL || written == NULL || view < 0;
    Py_ssize_t results = bad ? 0 : PyList_Size(outputs);
    for (Py_ssize_t k = 0; !bad && k < PyTuple_Size(written); k++)
        bad = add_written(q, e, PyTuple_GetItem(written, k), outputs, results);
    if (!bad && !view && e->recorded)
        bad = note_produced(q, e->call, outputs, s_aten);
    for (Py_ssize_t k = 0; !bad && !view && !e->recorded && k < PyList_Size(outputs); k++) {
        PyObject *pair = PyList_GetItem(outputs, k), *done = NULL;
        done = PyObject_CallMethodObjArgs(q->buffers, s_produced, PyTuple_GetItem(pair, 1), s_aten, e->call, PyTuple_GetItem(pair, 0), NULL);
        bad = done == NULL;
        Py_XDECREF(done);
    }
    if (!bad && e->recorded) {
        inputs = view ? tensors_in(s_input, e->args, NULL) : PyList_New(0);
        bad = inputs == NULL || record_outputs(q, e->call, outputs, inputs, Py_None);
    }
    Py_XDECREF(outputs);
    Py_XDECREF(written);
    Py_XDECREF(inputs);
    return bad ? -1 : 0;
}

/* Execute an operator past the function modes, which saw the function of the user's that it is part of. */
static PyObject *run(const Quick *q, const Execution *e)
{
    PyObject *length = PyObject_CallObject(q->function_modes, NULL);
    long modes = length == NULL ? -1 : PyLong_AsLong(length);
    Py_XDECREF(length);
    if (modes < 0)
        return NULL;
    if (!modes)
        return PyObject_Call(e->func, e->args, e->kwargs);
    PyObject *plain = PyObject_CallObject(q->no_overrides, NULL), *done = plain == NULL ? NULL : call(plain, s___enter__), *result = NULL;
    if (done != NULL) {
        result = PyObject_Call(e->func, e->args, e->kwargs);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Py_DECREF(done);
        done = PyObject_CallMethodObjArgs(plain, s___exit__, Py_None, Py_None, Py_None, NULL);
        if (done == NULL)
            PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(done);
    Py_XDECREF(plain);
    return result;
}

/* What is known of an operator's schema (borrowed); NULL without an exception where the long way has to look. */
static PyObject *operator_of(const Quick *q, PyObject *func)
{
    PyObject *address = PyLong_FromVoidPtr(func); /* its own hash is Python code; the dictionary holds it */
    PyObject *pair = address == NULL ? NULL : PyDict_GetItemWithError(q->operators, address);
    Py_XDECREF(address);
    return pair == NULL ? NULL : PyTuple_GetItem(pair, 1);
}

PyObject *quick_operator(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]) || q->operators == NULL) {
        PyErr_SetString(PyExc_TypeError, "operator(func, args, kwargs), after teach");
        return NULL;
    }
    Execution e = {.func = args[0], .args = args[1], .kwargs = args[2], .state = PyObject_GetAttr(q->threads, s_state)};
    int seen = e.state == NULL ? -1 : sees(q, e.state);
    if (seen > 0 && !PyDict_Size(q->in_flight) && !(PyDict_Size(e.kwargs) && PyDict_Contains(e.kwargs, s_out)))
        e.operator = operator_of(q, e.func);
    Py_XINCREF(e.operator);
    if (seen < 0 || PyErr_Occurred()) {
        ;
    } else if (e.operator == NULL) {
        e.result = PyObject_CallFunctionObjArgs(q->operator_at_length, e.func, e.args, e.kwargs, NULL);
    } else if (e.operator == Py_None) { /* it computes no tensor */
        e.result = run(q, &e);
    } else if ((e.name = PyObject_GetAttr(e.operator, s_name)) != NULL) {
        int failed = guarded(q, e.state, e.name, before, &e), active = 0;
        e.result = failed < 0 ? NULL : run(q, &e);
        if (e.result != NULL && !failed)
            active = is_true(q->session, s_active);
        if (active < 0 || (active && guarded(q, e.state, e.name, after, &e) < 0))
            Py_CLEAR(e.result);
    }
    Py_XDECREF(e.operator);
    Py_XDECREF(e.name);
    Py_XDECREF(e.call);
    Py_XDECREF(e.state);
    return e.result;
}
