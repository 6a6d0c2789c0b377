/* The short way of `trueup.adapters.torch.slots` and `buffers`: a plain tensor in host memory becomes a row in a microsecond or two.
 *
 * What is done here is what those two files do, in the same order and on the same Python objects; whatever is not plain (another
 * class, a transform, a device, an unknown layout, a collective under way, bytes to keep) goes to their Python code. Tensors are
 * looked at through their Python attributes alone, so nothing depends on the version of PyTorch's C++ interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../kernels/native/entrance.h"
#include "functions.h"

#define NAMES(X) \
    X(__enter__) X(__exit__) X(_closed) X(_new) X(_rows) X(_version) X(active) X(added) X(backward) X(backward_call) X(busy) X(call) \
    X(complex) X(data_ptr) X(device) X(device_name) X(dtype) X(failed) X(failure) X(forget) X(host_kind) X(is_neg) X(kind) X(known) \
    X(level) X(op) X(produced) X(producer) X(producers) X(readable) X(reads) X(recorded) X(seq) X(shape) X(slots) X(state) X(step) \
    X(storage_offset) X(stride) X(task) X(uninitialised) X(untyped_storage) X(version) X(view)
#define DECLARE(name) static PyObject *s_##name;
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

/* ---- small helpers: all return new references, NULL with an exception set ---- */
static PyObject *call(PyObject *object, PyObject *name) { return PyObject_CallMethodObjArgs(object, name, NULL); }

static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value == NULL ? -1 : value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return truth;
}

static int raised(PyObject *kind) { return PyErr_Occurred() != NULL && PyErr_ExceptionMatches(kind); }

static int is_plain(const Quick *q, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == q->tensor || type == q->parameter;
}

/* Tell whether `torch.func` transforms run: 1, 0, or -1 with an exception set. */
static int transformed(const Quick *q)
{
    PyObject *level = PyObject_CallObject(q->transforms, NULL);
    int found = level == NULL ? -1 : level != Py_None;
    Py_XDECREF(level);
    return found;
}

/* What is known of a tensor's storage, or None. */
static PyObject *storage_of(const Quick *q, PyObject *tensor)
{
    if (is_plain(q, tensor)) {
        PyObject *storage = call(tensor, s_untyped_storage);
        if (storage != NULL) {
            PyObject *number = PyLong_FromVoidPtr(storage), *found = NULL;
            if (number != NULL)
                found = PyDict_GetItemWithError(q->storages, number);
            Py_XINCREF(found);
            Py_XDECREF(number);
            if (found == NULL && !PyErr_Occurred())
                found = PyObject_CallMethodObjArgs(q->buffers, s__new, storage, NULL);
            Py_DECREF(storage);
            return found;
        }
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) /* NotImplementedError is one */
            return NULL;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return PyObject_CallFunctionObjArgs(q->storage_at_length, tensor, NULL);
}

/* The layout that a plain tensor is known to have; NULL without an exception where the long way has to look. */
static PyObject *layout_of(const Quick *q, PyObject *tensor)
{
    if (!is_plain(q, tensor) || PyDict_Size(q->in_flight))
        return NULL;
    int inside = transformed(q);
    if (inside)
        return NULL;
    PyObject *negative = call(tensor, s_is_neg);
    Py_XDECREF(negative); /* True and False live on */
    if (negative != Py_False)
        return NULL;
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype), *shape = NULL, *strides = NULL, *device = NULL, *found = NULL;
    if (dtype != NULL && (shape = PyObject_GetAttr(tensor, s_shape)) != NULL && (strides = call(tensor, s_stride)) != NULL &&
        (device = PyObject_GetAttr(tensor, s_device)) != NULL) {
        PyObject *key = PyTuple_Pack(4, dtype, shape, strides, device);
        if (key != NULL)
            found = PyDict_GetItemWithError(q->layouts, key);
        Py_XINCREF(found);
        Py_XDECREF(key);
    }
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(device);
    if (found == NULL && (raised(PyExc_RuntimeError) || raised(PyExc_TypeError)))
        PyErr_Clear(); /* sparse and nested tensors have no strides or no shape, symbols no hash */
    return found;
}

/* Forget what a storage held before it was written: 0, or -1 with an exception set. */
static int renew(PyObject *storage, PyObject *version)
{
    PyObject *known = PyObject_GetAttr(storage, s_version);
    int same = known == NULL ? -1 : PyObject_RichCompareBool(known, version, Py_EQ);
    Py_XDECREF(known);
    if (same)
        return same < 0 ? -1 : 0;
    PyObject *done = call(storage, s_forget);
    Py_XDECREF(done);
    return done == NULL || PyObject_SetAttr(storage, s_version, version) ? -1 : 0;
}

/* Measure a tensor in host memory; NULL without an exception where it has none. */
static PyObject *measured(const Quick *q, PyObject *tensor, long kind)
{
    PyObject *pointer = call(tensor, s_data_ptr);
    void *base = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    if (base == NULL)
        return NULL; /* no memory (or no elements, which the long way measures) */
    PyObject *shape = PyObject_GetAttr(tensor, s_shape), *strides = NULL, *threads = NULL, *values = NULL, *result = NULL;
    double *out = NULL;
    if (shape != NULL && (strides = call(tensor, s_stride)) != NULL && (threads = PyObject_CallObject(q->count_threads, NULL)) != NULL &&
        (values = q->digest_only ? Py_NewRef(Py_None) : q->kernel.result(&out)) != NULL) {
        uint64_t digest;
        if (q->kernel.measure(base, kind, shape, strides, out, PyLong_AsLong(threads), &digest) == 0) {
            PyObject *number = PyLong_FromUnsignedLongLong(digest);
            if (number != NULL)
                result = PyObject_CallFunctionObjArgs(q->statistics, values, number, NULL);
            Py_XDECREF(number);
        }
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(threads);
    Py_XDECREF(values);
    return result;
}

/* The statistics of a tensor, or None for memory that nobody has written; NULL without an exception: the long way. */
static PyObject *statistics_of(const Quick *q, PyObject *tensor, PyObject *layout, PyObject *storage)
{
    int truth = is_true(layout, s_complex); /* what is conjugated when it is read */
    if (truth == 0)
        truth = !is_true(layout, s_readable);
    if (truth || storage == Py_None)
        return NULL;
    truth = is_true(storage, s_uninitialised);
    if (truth)
        return truth < 0 ? NULL : Py_NewRef(Py_None);
    if (!q->sees_writes) {
        PyObject *version = PyObject_GetAttr(tensor, s__version);
        if (version == NULL) { /* an inference tensor tracks none */
            if (PyErr_ExceptionMatches(PyExc_RuntimeError))
                PyErr_Clear();
            return NULL;
        }
        int bad = renew(storage, version);
        Py_DECREF(version);
        if (bad)
            return NULL;
    }
    PyObject *offset = call(tensor, s_storage_offset), *view = offset == NULL ? NULL : PyObject_GetAttr(layout, s_view), *found = NULL;
    PyObject *key = view == NULL ? NULL : PyTuple_Pack(2, offset, view);
    PyObject *known = key == NULL ? NULL : PyObject_GetAttr(storage, s_known);
    if (key != NULL && known != NULL) {
        found = PyDict_GetItemWithError(known, key);
        Py_XINCREF(found);
        if (found == NULL && !q->keeps_bytes && !PyErr_Occurred()) {
            PyObject *kind = PyObject_GetAttr(layout, s_host_kind);
            if (kind != NULL && kind != Py_None)
                found = measured(q, tensor, PyLong_AsLong(kind));
            Py_XDECREF(kind);
            if (found != NULL && PyDict_SetItem(known, key, found))
                Py_CLEAR(found);
            if (found != NULL) {
                PyObject *reads = PyObject_GetAttr(q->buffers, s_reads), *one = PyLong_FromLong(1);
                PyObject *sum = reads == NULL || one == NULL ? NULL : PyNumber_Add(reads, one);
                if (sum == NULL || PyObject_SetAttr(q->buffers, s_reads, sum))
                    Py_CLEAR(found);
                Py_XDECREF(reads);
                Py_XDECREF(one);
                Py_XDECREF(sum);
            }
        }
    }
    Py_XDECREF(offset);
    Py_XDECREF(view);
    Py_XDECREF(key);
    Py_XDECREF(known);
    return found;
}

/* Append a row as Recorder.add does: 0, or -1 with an exception set. */
static int add_row(const Quick *q, PyObject *of, PyObject *slot, PyObject *producer, PyObject *stats, PyObject *step)
{
    PyObject *failure = PyObject_GetAttr(q->recorder, s_failure);
    Py_XDECREF(failure); /* the recorder holds it */
    int closed = failure == NULL ? -1 : is_true(q->recorder, s__closed);
    if (closed || failure != Py_None)
        return closed < 0 ? -1 : 0;
    PyObject *now = step == Py_None ? PyObject_GetAttr(q->recorder, s_step) : Py_NewRef(step);
    PyObject *rows = now == NULL ? NULL : PyObject_GetAttr(q->recorder, s__rows);
    int bad = rows == NULL || !PyList_Check(rows);
    if (!bad) { /* nothing between two of these gives the interpreter's lock away */
        bad = PyList_Append(rows, now) || PyList_Append(rows, of) || PyList_Append(rows, slot) || PyList_Append(rows, Py_None) ||
              PyList_Append(rows, producer) || PyList_Append(rows, stats);
        if (!bad && (PyList_Size(rows) & 255) < 6) { /* the first one, and now and then */
            PyObject *done = call(q->recorder, s_added);
            bad = done == NULL;
            Py_XDECREF(done);
        }
    }
    Py_XDECREF(now);
    Py_XDECREF(rows);
    return bad ? -1 : 0;
}

/* Record one tensor: 1 done, 0 for the long way, -1 with an exception set. */
static int record(const Quick *q, PyObject *of, PyObject *name, PyObject *tensor, PyObject *storage, PyObject *producer, PyObject *step)
{
    PyObject *layout = layout_of(q, tensor), *stats = NULL, *slot = NULL;
    if (layout != NULL) {
        PyObject *slots = PyObject_GetAttr(layout, s_slots), *device = slots == NULL ? NULL : PyObject_GetAttr(layout, s_device_name);
        if (device != NULL && PyDict_GetItemWithError(q->devices, device) != NULL)
            slot = PyDict_GetItemWithError(slots, name);
        Py_XINCREF(slot);
        Py_XDECREF(slots);
        Py_XDECREF(device);
        if (slot != NULL)
            stats = statistics_of(q, tensor, layout, storage);
        Py_DECREF(layout);
    }
    int done = stats == NULL ? 0 : add_row(q, of, slot, producer, stats, step) ? -1 : 1;
    Py_XDECREF(slot);
    Py_XDECREF(stats);
    return done || !PyErr_Occurred() ? done : -1;
}

static int record_at_length(const Quick *q, PyObject *of, PyObject *name, PyObject *tensor, PyObject *storage, PyObject *producer, PyObject *step)
{
    int done = record(q, of, name, tensor, storage, producer, step);
    if (done)
        return done < 0 ? -1 : 0;
    PyObject *result = PyObject_CallFunctionObjArgs(q->slot_at_length, of, name, tensor, storage, producer, step, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The call and slot that last wrote a storage; None where that is not known. */
static PyObject *producer_of(PyObject *storage, PyObject *level)
{
    if (storage == Py_None)
        Py_RETURN_NONE;
    PyObject *producers = PyObject_GetAttr(storage, s_producers);
    if (producers == NULL)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(producers, level);
    Py_XINCREF(found);
    if (found == NULL && !PyErr_Occurred())
        found = PyDict_Size(producers) ? PyObject_CallMethodObjArgs(storage, s_producer, level, NULL) : Py_NewRef(Py_None);
    Py_DECREF(producers);
    return found;
}

/* ---- gradients: what autograd calls at a node ---- */
typedef struct {
    PyObject_HEAD
    PyObject *quick, *context, *slots; /* slots: list of (position, name) */
    int received;                      /* whether the gradients come to the call, or are its own results */
} Hook;

/* The backward call of a context in the running graph task. */
static PyObject *backward_of(const Quick *q, PyObject *context)
{
    PyObject *task = PyObject_CallObject(q->graph_task, NULL), *begun = task == NULL ? NULL : PyObject_GetAttr(context, s_backward);
    PyObject *of = begun == NULL ? NULL : PyObject_GetAttr(context, s_task);
    int same = of == NULL ? -1 : begun == Py_None ? 0 : PyObject_RichCompareBool(of, task, Py_EQ);
    if (same <= 0)
        Py_CLEAR(begun);
    if (same == 0)
        begun = PyObject_CallMethodObjArgs(context, s_backward_call, q->recorder, task, NULL);
    Py_XDECREF(task);
    Py_XDECREF(of);
    return begun;
}

/* Note that a call computed what a storage holds: 0, or -1 with an exception set. */
static int set_producer(const Quick *q, PyObject *tensor, PyObject *storage, PyObject *level, PyObject *of, PyObject *name)
{
    PyObject *done = NULL;
    if (storage == Py_None) {
        done = PyObject_CallMethodObjArgs(q->buffers, s_produced, tensor, level, of, name, NULL);
    } else {
        PyObject *producers = PyObject_GetAttr(storage, s_producers), *seq = producers == NULL ? NULL : PyObject_GetAttr(of, s_seq);
        PyObject *producer = seq == NULL ? NULL : PyTuple_Pack(2, seq, name);
        if (producer != NULL && PyDict_SetItem(producers, level, producer) == 0)
            done = Py_NewRef(Py_None);
        Py_XDECREF(producers);
        Py_XDECREF(seq);
        Py_XDECREF(producer);
    }
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int record_gradient(const Quick *q, const Hook *hook, PyObject *of, PyObject *level, PyObject *name, PyObject *tensor)
{
    PyObject *storage = storage_of(q, tensor), *producer = NULL;
    int bad = storage == NULL;
    if (!bad && storage != Py_None) {
        int fresh = is_true(storage, s_uninitialised);
        bad = fresh < 0 || (fresh && PyObject_SetAttr(storage, s_uninitialised, Py_False));
    }
    if (!bad)
        producer = hook->received ? producer_of(storage, level) : Py_NewRef(Py_None);
    bad = producer == NULL || record_at_length(q, of, name, tensor, storage, producer, Py_None) ||
          (!hook->received && set_producer(q, tensor, storage, level, of, name));
    Py_XDECREF(storage);
    Py_XDECREF(producer);
    return bad ? -1 : 0;
}

static int record_gradients(const Quick *q, const Hook *hook, PyObject *gradients)
{
    PyObject *of = backward_of(q, hook->context), *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind);
    PyObject *level = kind == NULL ? NULL : PyObject_GetAttr(kind, s_level);
    int recorded = level == NULL ? -1 : is_true(kind, s_recorded), bad = recorded < 0;
    for (Py_ssize_t k = 0; !bad && recorded && k < PyList_Size(hook->slots); k++) {
        PyObject *item = PyList_GetItem(hook->slots, k), *tensor = PyTuple_GetItem(gradients, PyLong_AsSsize_t(PyTuple_GetItem(item, 0)));
        bad = tensor == NULL || (tensor != Py_None && record_gradient(q, hook, of, level, PyTuple_GetItem(item, 1), tensor));
    }
    Py_XDECREF(of);
    Py_XDECREF(kind);
    Py_XDECREF(level);
    return bad ? -1 : 0;
}

/* Take an exception of ours to the session, which tells whether the training goes on: 0 if it does, -1 with the exception set. */
static int survive(const Quick *q, const Hook *hook)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    int lives = 0;
    if (PyErr_GivenExceptionMatches(value, PyExc_Exception)) {
        PyObject *of = PyObject_GetAttr(hook->context, s_call), *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind);
        PyObject *op = kind == NULL ? NULL : PyObject_GetAttr(kind, s_op), *goes_on = NULL;
        if (op != NULL)
            goes_on = PyObject_CallMethodObjArgs(q->session, s_failed, value, op, NULL);
        lives = goes_on == NULL ? -1 : PyObject_IsTrue(goes_on);
        Py_XDECREF(of);
        Py_XDECREF(kind);
        Py_XDECREF(op);
        Py_XDECREF(goes_on);
    }
    if (lives == 0) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return lives < 0 ? -1 : 0;
}

/* As `Observing` does it: nothing that executes in here is a call, and no override of functions applies. */
static int observed(const Quick *q, const Hook *hook, PyObject *gradients)
{
    PyObject *state = PyObject_GetAttr(q->threads, s_state), *before = state == NULL ? NULL : PyObject_GetAttr(state, s_busy);
    PyObject *plain = before == NULL ? NULL : PyObject_CallObject(q->no_overrides, NULL), *done = plain == NULL ? NULL : call(plain, s___enter__);
    int bad = done == NULL || PyObject_SetAttr(state, s_busy, Py_True);
    Py_XDECREF(done);
    if (!bad) {
        bad = record_gradients(q, hook, gradients);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        done = PyObject_CallMethodObjArgs(plain, s___exit__, Py_None, Py_None, Py_None, NULL);
        if (done == NULL || PyObject_SetAttr(state, s_busy, before))
            PyErr_Clear();
        Py_XDECREF(done);
        PyErr_Restore(type, value, trace);
    }
    Py_XDECREF(state);
    Py_XDECREF(before);
    Py_XDECREF(plain);
    return bad && survive(q, hook) ? -1 : 0;
}

static PyObject *hook_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const Hook *hook = (Hook *)self;
    const Quick *q = (Quick *)hook->quick;
    (void)kwargs;
    PyObject *gradients = PyTuple_GetItem(args, 0);
    int active = gradients == NULL || !PyTuple_Check(gradients) ? -1 : is_true(q->session, s_active);
    if (active < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a hook takes the tuple of a node's gradients");
    if (active < 0 || (active && observed(q, hook, gradients)))
        return NULL;
    Py_RETURN_NONE;
}

static void hook_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Hook *hook = (Hook *)self;
    Py_XDECREF(hook->quick);
    Py_XDECREF(hook->context);
    Py_XDECREF(hook->slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_doc, "Records the gradients that enter or leave a call; see trueup.adapters.torch.gradients."},
    {Py_tp_call, hook_call},
    {Py_tp_dealloc, hook_dealloc},
    {0, NULL},
};

/* Not seen by the garbage collector, which would look at thousands of them: a context knows nothing of hooks. */
static PyType_Spec HOOK_SPEC = {"trueup.adapters.torch._quick.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, HOOK_SLOTS};
static PyObject *hook_type;

static PyObject *quick_hook(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "hook(context, list of (position, slot), received)");
        return NULL;
    }
    for (Py_ssize_t k = 0; k < PyList_Size(args[1]); k++) {
        PyObject *item = PyList_GetItem(args[1], k);
        if (!PyTuple_Check(item) || PyTuple_Size(item) != 2 || !PyLong_Check(PyTuple_GetItem(item, 0))) {
            PyErr_SetString(PyExc_TypeError, "hook: expected pairs of a position and a slot");
            return NULL;
        }
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)hook_type, Py_tp_alloc);
    Hook *hook = (Hook *)allocate((PyTypeObject *)hook_type, 0);
    if (hook == NULL)
        return NULL;
    hook->quick = Py_NewRef(self);
    hook->context = Py_NewRef(args[0]);
    hook->slots = Py_NewRef(args[1]);
    hook->received = PyObject_IsTrue(args[2]);
    return (PyObject *)hook;
}

/* ---- our own work: see `Observing` in observing.py ---- */
typedef struct {
    PyObject_HEAD
    PyObject *quick, *state, *what, *before, *plain;
} Observing;

static PyObject *observing_enter(PyObject *self, PyObject *none)
{
    Observing *o = (Observing *)self;
    (void)none;
    Py_XDECREF(o->before);
    Py_XDECREF(o->plain);
    o->plain = NULL;
    if ((o->before = PyObject_GetAttr(o->state, s_busy)) == NULL || PyObject_SetAttr(o->state, s_busy, Py_True) ||
        (o->plain = PyObject_CallObject(((Quick *)o->quick)->no_overrides, NULL)) == NULL)
        return NULL;
    return call(o->plain, s___enter__);
}

static PyObject *observing_exit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Observing *o = (Observing *)self;
    if (count != 3 || o->plain == NULL) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, error, traceback), after __enter__");
        return NULL;
    }
    PyObject *done = PyObject_CallMethodObjArgs(o->plain, s___exit__, args[0], args[1], args[2], NULL);
    Py_XDECREF(done);
    if (done == NULL || PyObject_SetAttr(o->state, s_busy, o->before))
        return NULL;
    if (args[1] == Py_None || !PyErr_GivenExceptionMatches(args[1], PyExc_Exception))
        Py_RETURN_FALSE;
    return PyObject_CallMethodObjArgs(((Quick *)o->quick)->session, s_failed, args[1], o->what, NULL);
}

static void observing_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Observing *o = (Observing *)self;
    Py_XDECREF(o->quick);
    Py_XDECREF(o->state);
    Py_XDECREF(o->what);
    Py_XDECREF(o->before);
    Py_XDECREF(o->plain);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef OBSERVING_METHODS[] = {
    {"__enter__", observing_enter, METH_NOARGS, "Begin our own work."},
    {"__exit__", (PyCFunction)(void (*)(void))observing_exit, METH_FASTCALL, "End it; an exception of ours goes to the session."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot OBSERVING_SLOTS[] = {
    {Py_tp_doc, "A block of our own work; see trueup.adapters.torch.observing."},
    {Py_tp_methods, OBSERVING_METHODS},
    {Py_tp_dealloc, observing_dealloc},
    {0, NULL},
};

static PyType_Spec OBSERVING_SPEC = {"trueup.adapters.torch._quick.Observing", sizeof(Observing), 0, Py_TPFLAGS_DEFAULT, OBSERVING_SLOTS};
static PyObject *observing_type;

static PyObject *quick_observing(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "observing(state, what)");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)observing_type, Py_tp_alloc);
    Observing *o = (Observing *)allocate((PyTypeObject *)observing_type, 0);
    if (o == NULL)
        return NULL;
    o->quick = Py_NewRef(self);
    o->state = Py_NewRef(args[0]);
    o->what = Py_NewRef(args[1]);
    return (PyObject *)o;
}

/* ---- methods ---- */
static PyObject *quick_storage(PyObject *self, PyObject *tensor) { return storage_of((Quick *)self, tensor); }

static PyObject *quick_slot(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 && count != 6) {
        PyErr_SetString(PyExc_TypeError, "slot(call, name, tensor, storage, producer, step=None)");
        return NULL;
    }
    if (record_at_length((Quick *)self, args[0], args[1], args[2], args[3], args[4], count == 6 ? args[5] : Py_None))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *quick_inputs(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "inputs(call, list of (slot, tensor), level)");
        return NULL;
    }
    for (Py_ssize_t k = 0; k < PyList_Size(args[1]); k++) {
        PyObject *item = PyList_GetItem(args[1], k);
        if (!PyTuple_Check(item) || PyTuple_Size(item) != 2) {
            PyErr_SetString(PyExc_TypeError, "inputs: expected pairs of a slot and a tensor");
            return NULL;
        }
        Py_INCREF(item);
        PyObject *name = PyTuple_GetItem(item, 0), *tensor = PyTuple_GetItem(item, 1), *storage = storage_of(q, tensor);
        PyObject *producer = storage == NULL ? NULL : producer_of(storage, args[2]);
        int bad = producer == NULL || record_at_length(q, args[0], name, tensor, storage, producer, Py_None);
        Py_DECREF(item);
        Py_XDECREF(storage);
        Py_XDECREF(producer);
        if (bad)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"storage", quick_storage, METH_O, "storage(tensor) -> what is known of its storage, or None; see Buffers.storage."},
    {"slot", (PyCFunction)(void (*)(void))quick_slot, METH_FASTCALL,
     "slot(call, name, tensor, storage, producer, step=None): add a row; see Slots._slot."},
    {"inputs", (PyCFunction)(void (*)(void))quick_inputs, METH_FASTCALL,
     "inputs(call, tensors, level): add a row for each (slot, tensor), with what produced it; see Slots.inputs."},
    {"observing", (PyCFunction)(void (*)(void))quick_observing, METH_FASTCALL,
     "observing(state, what) -> a block of our own work; see Session.observing."},
    {"hook", (PyCFunction)(void (*)(void))quick_hook, METH_FASTCALL,
     "hook(context, slots, received) -> what to register at an autograd node; see gradients.watch."},
    {NULL, NULL, 0, NULL},
};

/* ---- the type ---- */
#define VISIT(name) Py_VISIT(q->name);
#define CLEAR(name) Py_CLEAR(q->name);
static int quick_traverse(PyObject *self, visitproc visit, void *arg)
{
    Quick *q = (Quick *)self;
    HELD(VISIT)
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int quick_clear(PyObject *self)
{
    Quick *q = (Quick *)self;
    HELD(CLEAR)
    return 0;
}

static void quick_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    quick_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int quick_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Quick *q = (Quick *)self;
    if (PyTuple_Size(args) || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "Quick takes keyword arguments only");
        return -1;
    }
    quick_clear(self);
#define TAKE(name) \
    if ((q->name = PyDict_GetItemString(kwargs, #name)) == NULL) { \
        PyErr_SetString(PyExc_TypeError, "Quick: expected the keyword argument " #name); \
        return -1; \
    } \
    Py_INCREF(q->name);
    HELD(TAKE)
    PyObject *detail = PyDict_GetItemString(kwargs, "detail"), *sees = PyDict_GetItemString(kwargs, "sees_writes");
    if (detail == NULL || sees == NULL || !PyDict_Check(q->storages) || !PyDict_Check(q->devices) || !PyDict_Check(q->layouts) ||
        !PyDict_Check(q->in_flight)) {
        PyErr_SetString(PyExc_TypeError, "Quick: expected detail and sees_writes, and dicts to look things up in");
        return -1;
    }
    q->digest_only = PyUnicode_CompareWithASCIIString(detail, "digest") == 0;
    q->keeps_bytes = PyUnicode_CompareWithASCIIString(detail, "tensor") == 0;
    q->sees_writes = PyObject_IsTrue(sees);
    const TrueupEntrance *entrance = PyCapsule_GetPointer(PyDict_GetItemString(kwargs, "entrance"), TRUEUP_ENTRANCE);
    if (entrance == NULL)
        return -1;
    q->kernel = *entrance;
    return 0;
}

static PyType_Slot SLOTS[] = {
    {Py_tp_doc, "The short way from a tensor to a row; see trueup.adapters.torch.slots."},
    {Py_tp_init, quick_init},
    {Py_tp_dealloc, quick_dealloc},
    {Py_tp_traverse, quick_traverse},
    {Py_tp_clear, quick_clear},
    {Py_tp_methods, METHODS},
    {0, NULL},
};

static PyType_Spec SPEC = {"trueup.adapters.torch._quick.Quick", sizeof(Quick), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, SLOTS};

static PyMethodDef FUNCTIONS[] = {
    {"named_tensors", (PyCFunction)(void (*)(void))named_tensors, METH_FASTCALL,
     "named_tensors(prefix, args, kwargs=None) -> list of (slot, tensor); see trueup.adapters.torch.tensors."},
    {"note_edges", (PyCFunction)(void (*)(void))note_edges, METH_FASTCALL,
     "note_edges(inputs, slots, leaves): the gradient edges of a call's inputs; see gradients.Edges."},
    {"boundary", boundary, METH_VARARGS, "boundary(context, first, slots, leaves, pending, own, most); see gradients._boundary."},
    {"set_types", set_types, METH_VARARGS, "set_types(tensor, leaves, walk): what named_tensors has to know."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_quick", "The short way from a tensor to a row.", -1, FUNCTIONS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quick(void)
{
#define INTERN(name) \
    if (s_##name == NULL && (s_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return NULL;
    NAMES(INTERN)
    if (graph_init())
        return NULL;
    PyObject *module = PyModule_Create(&MODULE), *type = PyType_FromSpec(&SPEC);
    if (hook_type == NULL)
        hook_type = PyType_FromSpec(&HOOK_SPEC);
    if (observing_type == NULL)
        observing_type = PyType_FromSpec(&OBSERVING_SPEC);
    if (module == NULL || type == NULL || hook_type == NULL || observing_type == NULL || PyModule_AddObject(module, "Quick", type)) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
