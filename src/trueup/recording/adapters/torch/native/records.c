/* What stays until the writer has taken it: calls and statistics, in place of the classes in trueup.recording.recorder.rows.
 *
 * A step leaves a thousand of them, and Python's garbage collector would look at each again and again, which took 3 % of the steps
 * of a small GPT. It does not know these types: a call holds numbers and its kind, and nothing that holds a call again.
 */
#include "calls.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *seq, *kind, *ordinal, *parent, *site, *forward_seq;
} Call;

typedef struct {
    PyObject_HEAD
    PyObject *values, *digest, *data, *place, *within;
} Statistics;

static PyObject *call_type, *statistics_type;

static void call_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Call *c = (Call *)self;
    Py_XDECREF(c->seq);
    Py_XDECREF(c->kind);
    Py_XDECREF(c->ordinal);
    Py_XDECREF(c->parent);
    Py_XDECREF(c->site);
    Py_XDECREF(c->forward_seq);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *of_kind(PyObject *self, void *name) { return PyObject_GetAttr(((Call *)self)->kind, *(PyObject **)name); }

#define HOLDS(type, name, flags) {#name, T_OBJECT_EX, offsetof(type, name), flags, NULL}
static PyMemberDef CALL_MEMBERS[] = {
    HOLDS(Call, seq, READONLY), HOLDS(Call, kind, READONLY), HOLDS(Call, ordinal, READONLY), HOLDS(Call, parent, READONLY),
    HOLDS(Call, site, READONLY), HOLDS(Call, forward_seq, 0), {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef CALL_PROPERTIES[] = {
    {"level", of_kind, NULL, "Level of the call.", &s_level},
    {"phase", of_kind, NULL, "Phase of the call.", &s_phase},
    {"scope", of_kind, NULL, "Module path of the call.", &s_scope},
    {"op", of_kind, NULL, "Operator, function or module class.", &s_op},
    {"recorded", of_kind, NULL, "Whether the options keep it.", &s_recorded},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot CALL_SLOTS[] = {
    {Py_tp_doc, "One execution of one operator, function or module; see trueup.recording.recorder.rows."},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_members, CALL_MEMBERS},
    {Py_tp_getset, CALL_PROPERTIES},
    {0, NULL},
};
static PyType_Spec CALL_SPEC = {"trueup.recording.adapters.torch._quick.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, CALL_SLOTS};

PyObject *new_call(PyObject *seq, PyObject *kind, PyObject *ordinal, PyObject *parent, PyObject *site, PyObject *forward_seq)
{
    Call *c = (Call *)PyType_GenericAlloc((PyTypeObject *)call_type, 0);
    if (c == NULL)
        return NULL;
    c->seq = Py_NewRef(seq);
    c->kind = Py_NewRef(kind);
    c->ordinal = Py_NewRef(ordinal);
    c->parent = Py_NewRef(parent);
    c->site = Py_NewRef(site);
    c->forward_seq = Py_NewRef(forward_seq);
    return (PyObject *)c;
}

static void statistics_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Statistics *s = (Statistics *)self;
    Py_XDECREF(s->values);
    Py_XDECREF(s->digest);
    Py_XDECREF(s->data);
    Py_XDECREF(s->place);
    Py_XDECREF(s->within);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef STATISTICS_MEMBERS[] = {
    HOLDS(Statistics, values, 0), HOLDS(Statistics, digest, 0), HOLDS(Statistics, data, 0), HOLDS(Statistics, place, 0),
    HOLDS(Statistics, within, 0), {NULL, 0, 0, 0, NULL},
};
static PyType_Slot STATISTICS_SLOTS[] = {
    {Py_tp_doc, "What was measured of one buffer; see trueup.recording.recorder.rows."},
    {Py_tp_dealloc, statistics_dealloc},
    {Py_tp_members, STATISTICS_MEMBERS},
    {0, NULL},
};
static PyType_Spec STATISTICS_SPEC = {"trueup.recording.adapters.torch._quick.Statistics", sizeof(Statistics), 0, Py_TPFLAGS_DEFAULT,
                                      STATISTICS_SLOTS};

PyObject *new_statistics(PyObject *values, PyObject *digest)
{
    Statistics *s = (Statistics *)PyType_GenericAlloc((PyTypeObject *)statistics_type, 0);
    if (s == NULL)
        return NULL;
    s->values = Py_NewRef(values);
    s->digest = Py_NewRef(digest);
    s->data = Py_NewRef(Py_None);
    s->place = Py_NewRef(Py_None);
    s->within = Py_NewRef(Py_None);
    return (PyObject *)s;
}

int records_init(void)
{
    if (call_type == NULL && (call_type = PyType_FromSpec(&CALL_SPEC)) == NULL)
        return -1;
    return statistics_type != NULL || (statistics_type = PyType_FromSpec(&STATISTICS_SPEC)) != NULL ? 0 : -1;
}
