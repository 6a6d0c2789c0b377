/* The short way of `trueup.recording.adapters.torch.session` and `buffers`: a plain tensor in host memory becomes a row in a microsecond or two.
 *
 * What is done here is what those two files do, in the same order and on the same Python objects; whatever is not plain (another
 * class, a transform, a device, an unknown layout, a collective under way, bytes to keep) goes to their Python code. Tensors are
 * looked at through their Python attributes alone, so nothing depends on the version of PyTorch's C++ interface.
 */
#include "calls.h"

enum { MOST_VIEWS = 256 }; /* of a storage: as buffers.MOST_VIEWS */

int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value == NULL ? -1 : value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return truth;
}

static int raised(PyObject *kind) { return PyErr_Occurred() != NULL && PyErr_ExceptionMatches(kind); }

int is_plain(const Quick *q, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == q->tensor || type == q->parameter;
}

int is_transformed(const Quick *q)
{
    PyObject *level = PyObject_CallObject(q->transforms, NULL);
    int found = level == NULL ? -1 : level != Py_None;
    Py_XDECREF(level);
    return found;
}

PyObject *storage_of(const Quick *q, PyObject *tensor)
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

/* How a plain tensor lies in memory, each a new reference: `known` is its Layout, NULL where the long way has to look. */
typedef struct {
    PyObject *known, *shape, *strides;
} Look;

static void look_clear(Look *look)
{
    Py_CLEAR(look->known);
    Py_CLEAR(look->shape);
    Py_CLEAR(look->strides);
}

/* 0, or -1 with an exception set. */
static int look_at(const Quick *q, PyObject *tensor, Look *look)
{
    if (!is_plain(q, tensor) || PyDict_Size(q->in_flight))
        return 0;
    int inside = is_transformed(q);
    if (inside)
        return inside < 0 ? -1 : 0;
    PyObject *negative = call(tensor, s_is_neg);
    Py_XDECREF(negative); /* True and False live on */
    if (negative != Py_False)
        return negative == NULL ? -1 : 0;
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype), *device = NULL;
    if (dtype != NULL && (look->shape = PyObject_GetAttr(tensor, s_shape)) != NULL &&
        (look->strides = call(tensor, s_stride)) != NULL && (device = PyObject_GetAttr(tensor, s_device)) != NULL) {
        PyObject *key = PyTuple_Pack(4, dtype, look->shape, look->strides, device);
        if (key != NULL)
            look->known = PyDict_GetItemWithError(q->layouts, key);
        Py_XINCREF(look->known);
        Py_XDECREF(key);
    }
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    if (look->known == NULL && (raised(PyExc_RuntimeError) || raised(PyExc_TypeError)))
        PyErr_Clear(); /* sparse and nested tensors have no strides or no shape, symbols no hash */
    return look->known == NULL && PyErr_Occurred() ? -1 : 0;
}

int is_dense(const Quick *q, PyObject *tensor)
{
    Look look = {0};
    int found = look_at(q, tensor, &look) == 0 && look.known != NULL && is_true(look.known, s_readable) == 1 &&
                is_true(look.known, s_complex) == 0;
    look_clear(&look);
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
static PyObject *measured(const Quick *q, PyObject *tensor, const Look *look, long kind)
{
    PyObject *pointer = call(tensor, s_data_ptr);
    void *base = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    if (base == NULL)
        return NULL; /* no memory (or no elements, which the long way measures) */
    PyObject *threads = PyObject_CallObject(q->count_threads, NULL), *values = NULL, *result = NULL;
    double *out = NULL;
    if (threads != NULL && (values = q->digest_only ? Py_NewRef(Py_None) : q->kernel.result(&out)) != NULL) {
        uint64_t digest;
        if (q->kernel.measure(base, kind, look->shape, look->strides, out, PyLong_AsLong(threads), &digest) == 0) {
            PyObject *number = PyLong_FromUnsignedLongLong(digest);
            if (number != NULL)
                result = new_statistics(values, number);
            Py_XDECREF(number);
        }
    }
    Py_XDECREF(threads);
    Py_XDECREF(values);
    return result;
}

/* The statistics of a tensor, or None for memory that nobody has written; NULL without an exception: the long way. */
static PyObject *statistics_of(const Quick *q, PyObject *tensor, const Look *look, PyObject *storage)
{
    PyObject *layout = look->known;
    int truth = is_true(layout, s_complex); /* may be conjugated when it is read */
    if (truth || is_true(layout, s_readable) != 1 || storage == Py_None)
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
    PyObject *key = view == NULL ? NULL : PyObject_IsTrue(offset) ? PyTuple_Pack(2, offset, view) : Py_NewRef(view);
    PyObject *known = key == NULL ? NULL : PyObject_GetAttr(storage, s_known);
    if (key != NULL && known != NULL) {
        found = PyDict_GetItemWithError(known, key);
        Py_XINCREF(found);
        if (found == NULL && !q->keeps_bytes && !PyErr_Occurred()) {
            PyObject *kind = PyObject_GetAttr(layout, s_host_kind);
            if (kind != NULL && kind != Py_None)
                found = measured(q, tensor, look, PyLong_AsLong(kind));
            Py_XDECREF(kind);
            if (found != NULL && PyDict_Size(known) >= MOST_VIEWS)
                PyDict_Clear(known);
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
int add_row(const Quick *q, PyObject *of, PyObject *slot, PyObject *value, PyObject *producer, PyObject *stats, PyObject *step)
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
        bad = PyList_Append(rows, now) || PyList_Append(rows, of) || PyList_Append(rows, slot) || PyList_Append(rows, value) ||
              PyList_Append(rows, producer) || PyList_Append(rows, stats);
        if (!bad && (PyList_Size(rows) == 6 || (PyList_Size(rows) & 255) < 6)) { /* the first one, and now and then */
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
    Look look = {0};
    PyObject *stats = NULL, *slot = NULL;
    if (look_at(q, tensor, &look) == 0 && look.known != NULL) {
        PyObject *slots = PyObject_GetAttr(look.known, s_slots);
        PyObject *device = slots == NULL ? NULL : PyObject_GetAttr(look.known, s_device_name);
        if (device != NULL && PyDict_GetItemWithError(q->devices, device) != NULL)
            slot = PyDict_GetItemWithError(slots, name);
        Py_XINCREF(slot);
        Py_XDECREF(slots);
        Py_XDECREF(device);
        if (slot != NULL)
            stats = statistics_of(q, tensor, &look, storage);
    }
    look_clear(&look);
    int done = stats == NULL ? 0 : add_row(q, of, slot, Py_None, producer, stats, step) ? -1 : 1;
    Py_XDECREF(slot);
    Py_XDECREF(stats);
    return done || !PyErr_Occurred() ? done : -1;
}

int record_at_length(const Quick *q, PyObject *of, PyObject *name, PyObject *tensor, PyObject *storage, PyObject *producer, PyObject *step)
{
    int done = record(q, of, name, tensor, storage, producer, step);
    if (done)
        return done < 0 ? -1 : 0;
    PyObject *result = PyObject_CallFunctionObjArgs(q->slot_at_length, of, name, tensor, storage, producer, step, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

PyObject *producer_of(PyObject *storage, PyObject *level)
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

int set_producer(const Quick *q, PyObject *tensor, PyObject *storage, PyObject *level, PyObject *of, PyObject *name)
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

PyObject *quick_storage(PyObject *self, PyObject *tensor) { return storage_of((Quick *)self, tensor); }

PyObject *quick_slot(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 && count != 6) {
        PyErr_SetString(PyExc_TypeError, "slot(call, name, tensor, storage, producer, step=None)");
        return NULL;
    }
    if (record_at_length((Quick *)self, args[0], args[1], args[2], args[3], args[4], count == 6 ? args[5] : Py_None))
        return NULL;
    Py_RETURN_NONE;
}

int record_inputs(const Quick *q, PyObject *of, PyObject *tensors, PyObject *level)
{
    for (Py_ssize_t k = 0; k < PyList_Size(tensors); k++) {
        PyObject *name, *tensor, *storage = pair_at(tensors, k, &name, &tensor) ? NULL : storage_of(q, tensor);
        PyObject *producer = storage == NULL ? NULL : producer_of(storage, level);
        int bad = producer == NULL || record_at_length(q, of, name, tensor, storage, producer, Py_None);
        Py_XDECREF(storage);
        Py_XDECREF(producer);
        if (bad)
            return -1;
    }
    return 0;
}

PyObject *quick_inputs(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "inputs(call, list of (slot, tensor), level)");
        return NULL;
    }
    return record_inputs(q, args[0], args[1], args[2]) ? NULL : Py_NewRef(Py_None);
}

/* Tell whether a storage is that of one of these tensors: 1, 0, or -1 with an exception set. */
static int is_shared(const Quick *q, PyObject *storage, PyObject *tensors)
{
    for (Py_ssize_t k = 0; PyList_Check(tensors) && k < PyList_Size(tensors); k++) {
        PyObject *name, *tensor, *other = pair_at(tensors, k, &name, &tensor) ? NULL : storage_of(q, tensor);
        Py_XDECREF(other); /* its dict holds it */
        if (other == NULL || other == storage)
            return other == NULL ? -1 : 1;
    }
    return 0;
}

int record_outputs(const Quick *q, PyObject *of, PyObject *tensors, PyObject *inputs, PyObject *step)
{
    for (Py_ssize_t k = 0; k < PyList_Size(tensors); k++) {
        PyObject *name, *tensor, *storage = pair_at(tensors, k, &name, &tensor) ? NULL : storage_of(q, tensor);
        int fresh = storage == NULL ? -1 : storage == Py_None ? 0 : is_true(storage, s_uninitialised);
        int left_out = fresh > 0 ? is_shared(q, storage, inputs) : fresh;
        int bad = left_out < 0 || (!left_out && record_at_length(q, of, name, tensor, storage, Py_None, step));
        Py_XDECREF(storage);
        if (bad)
            return -1;
    }
    return 0;
}

PyObject *quick_outputs(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 4 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "outputs(call, list of (slot, tensor), inputs, step)");
        return NULL;
    }
    return record_outputs(q, args[0], args[1], args[2], args[3]) ? NULL : Py_NewRef(Py_None);
}

int note_produced(const Quick *q, PyObject *of, PyObject *tensors, PyObject *level)
{
    for (Py_ssize_t k = 0; k < PyList_Size(tensors); k++) {
        PyObject *name, *tensor, *storage = pair_at(tensors, k, &name, &tensor) ? NULL : storage_of(q, tensor);
        int bad = storage == NULL || set_producer(q, tensor, is_plain(q, tensor) ? storage : Py_None, level, of, name);
        Py_XDECREF(storage);
        if (bad)
            return -1;
    }
    return 0;
}

/* Note that a call wrote a tensor in place, as Buffers.written does: 0, or -1 with an exception set. */
int note_written(const Quick *q, PyObject *tensor)
{
    int plain = is_plain(q, tensor) && !PyDict_Size(q->in_flight);
    PyObject *storage = plain ? storage_of(q, tensor) : NULL, *done = NULL;
    if (storage != NULL && storage != Py_None) {
        done = call(storage, s_forget);
        if (done != NULL && PyObject_SetAttr(storage, s_uninitialised, Py_False))
            Py_CLEAR(done);
    } else if (!PyErr_Occurred()) {
        done = PyObject_CallMethodObjArgs(q->buffers, s_written, tensor, NULL);
    }
    Py_XDECREF(storage);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *quick_produced(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const Quick *q = (Quick *)self;
    if (count != 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "produced(call, list of (slot, tensor), level)");
        return NULL;
    }
    return note_produced(q, args[0], args[1], args[2]) ? NULL : Py_NewRef(Py_None);
}
