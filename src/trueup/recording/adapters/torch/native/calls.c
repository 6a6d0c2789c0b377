/* Where a call stands and what its number is: what `functions._begin`, `DispatchMode.begin` and `Recorder.begin` do. */
#include "calls.h"

int sees(const Quick *q, PyObject *state)
{
    int busy = is_true(state, s_busy), active = busy ? busy : is_true(q->session, s_active);
    if (busy || active <= 0)
        return busy < 0 || active < 0 ? -1 : 0;
    PyObject *trace = PyObject_CallObject(q->tracing, NULL);
    Py_XDECREF(trace); /* None, as a rule; else held by the trace that is under way */
    if (trace != Py_None)
        return trace == NULL ? -1 : 0;
    int compiling = is_true(q->compiler, s__is_compiling_flag);
    return compiling < 0 ? -1 : !compiling;
}

PyObject *last_of(PyObject *owner, PyObject *name)
{
    PyObject *list = PyObject_GetAttr(owner, name);
    if (list == NULL)
        return NULL;
    Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : 0;
    PyObject *found = Py_NewRef(count ? PyList_GetItem(list, count - 1) : Py_None);
    Py_DECREF(list);
    return found;
}

int long_of(PyObject *owner, PyObject *name, long *value)
{
    PyObject *number = PyObject_GetAttr(owner, name);
    *value = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

int running_task(const Quick *q, PyObject **task, long *number)
{
    *task = PyObject_CallObject(q->graph_task, NULL);
    *number = *task == NULL ? -1 : PyLong_AsLong(*task);
    return *task == NULL ? -1 : 0;
}

void place_clear(Place *place)
{
    Py_CLEAR(place->phase);
    Py_CLEAR(place->scope);
    Py_CLEAR(place->above);
    Py_CLEAR(place->parent);
}

int is_recorded(PyObject *of)
{
    PyObject *kind = PyObject_GetAttr(of, s_kind);
    int found = kind == NULL ? -1 : is_true(kind, s_recorded);
    Py_XDECREF(kind);
    return found;
}

int link_runs(const Quick *q, PyObject *state, PyObject *of)
{
    PyObject *runs = PyObject_GetAttr(state, s_runs), *done = NULL;
    if (runs != NULL)
        done = PyList_Size(runs) ? PyObject_CallFunctionObjArgs(q->link, runs, of, NULL) : Py_NewRef(Py_None);
    Py_XDECREF(runs);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int push(PyObject *owner, PyObject *name, PyObject *item)
{
    PyObject *list = PyObject_GetAttr(owner, name);
    int bad = list == NULL || PyList_Append(list, item);
    Py_XDECREF(list);
    return bad ? -1 : 0;
}

void pop(PyObject *owner, PyObject *name)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *list = PyObject_GetAttr(owner, name);
    Py_ssize_t count = list == NULL ? 0 : PyList_Size(list);
    if (count > 0 && PyList_SetSlice(list, count - 1, count, NULL))
        PyErr_Clear();
    Py_XDECREF(list);
    PyErr_Restore(type, value, trace);
}

/* Take a place from the context around it: 1, or -1 with an exception set. */
static int inside(PyObject *context, PyObject *phase, Place *place)
{
    place->parent = Py_NewRef(context);
    place->phase = phase;
    place->scope = PyObject_GetAttr(context, s_scope);
    place->above = PyObject_GetAttr(context, s_call);
    if (phase == NULL && place->above != NULL) { /* that of the call around */
        PyObject *kind = PyObject_GetAttr(place->above, s_kind);
        place->phase = kind == NULL ? NULL : PyObject_GetAttr(kind, s_phase);
        Py_XDECREF(kind);
    }
    return place->phase == NULL || place->scope == NULL || place->above == NULL ? -1 : 1;
}

int place_of(const Quick *q, PyObject *state, long task, Place *place)
{
    long began;
    PyObject *outer = last_of(state, s_contexts), *module = NULL;
    int found = outer == NULL ? -1 : 0;
    if (!found && outer != Py_None) { /* one from before the running backward pass began does not enclose it */
        found = long_of(outer, s_graph_task, &began) ? -1 : began == task;
        if (found > 0)
            found = inside(outer, NULL, place);
    }
    Py_XDECREF(outer);
    if (found || (module = last_of(state, s_modules)) == NULL)
        return found ? found : -1;
    if (module != Py_None) {
        found = long_of(module, s_graph_task, &began) ? -1 : task == -1 ? began == task : began == task ? 0 : 2;
        if (found == 1)
            found = inside(module, Py_NewRef(s_forward), place);
    } else if (task != -1) {
        found = 2;
    } else {
        place->phase = PyObject_CallFunctionObjArgs(q->phase_of, state, NULL);
        place->scope = PyUnicode_FromString("");
        place->above = Py_NewRef(Py_None);
        place->parent = Py_NewRef(Py_None);
        found = place->phase == NULL || place->scope == NULL ? -1 : 1;
    }
    Py_DECREF(module);
    return found;
}

PyObject *begin_call(const Quick *q, PyObject *level, const Place *place, PyObject *op, PyObject *site, PyObject *forward_seq)
{
    PyObject *failure = PyObject_GetAttr(q->recorder, s_failure), *done = NULL;
    Py_XDECREF(failure); /* the recorder holds it */
    if (failure != NULL)
        done = failure == Py_None ? Py_NewRef(Py_None) : call(q->recorder, s_stop_if_asked);
    Py_XDECREF(done);
    if (done == NULL)
        return NULL;
    PyObject *key = PyTuple_Pack(4, level, place->phase, place->scope, op);
    PyObject *kind = key == NULL ? NULL : PyDict_GetItemWithError(q->kinds, key);
    Py_XINCREF(kind);
    Py_XDECREF(key);
    if (kind == NULL && !PyErr_Occurred())
        kind = PyObject_CallMethodObjArgs(q->recorder, s__new_kind, level, place->phase, place->scope, op, NULL);
    PyObject *seq = kind == NULL ? NULL : PyIter_Next(q->seqs), *ordinals = seq == NULL ? NULL : PyObject_GetAttr(kind, s_ordinals);
    PyObject *ordinal = NULL, *parent = NULL, *begun = NULL;
    if (ordinals != NULL && PyObject_SetAttr(q->recorder, s__last, seq) == 0 && (ordinal = PyIter_Next(ordinals)) != NULL &&
        (parent = place->above == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(place->above, s_seq)) != NULL)
        begun = new_call(seq, kind, ordinal, parent, site, forward_seq);
    Py_XDECREF(kind);
    Py_XDECREF(seq);
    Py_XDECREF(ordinals);
    Py_XDECREF(ordinal);
    Py_XDECREF(parent);
    return begun;
}

PyObject *context_of(const Quick *q, PyObject *of, PyObject *parent, PyObject *scope, PyObject *task)
{
    return PyObject_CallFunctionObjArgs(q->context_type, of, parent, scope, q->threads, q->no_task, Py_None, task, NULL);
}
