/* Rows of statistics that outlive the call: 74 float64 each, many to a block of memory of its own.
 *
 * They stay until the writer has taken them, while the training allocates and frees tensors around them. From the heap they would
 * keep freed tensors from becoming one piece again: the heap grows and shrinks in each step, and each page of it is cleared anew
 * (14,000 page faults a step, 20 of 45 ms, with a ResNet-18 and glibc). So blocks come from the system and are used again.
 */
#ifndef TRUEUP_RESULTS_H
#define TRUEUP_RESULTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include "entrance.h"

enum { BLOCK_BYTES = 1 << 16, BLOCK_ROWS = (BLOCK_BYTES - 64) / (8 * TRUEUP_PACKED), SPARE_BLOCKS = 64 };

typedef struct Block {
    struct Block *next; /* among those to be used again */
    int taken, users;
    double rows[];
} Block;

typedef struct {
    PyObject_HEAD
    Block *block;
    double *row;
} Result;

static Block *filling, *spare; /* the interpreter's lock guards them */
static int spares;
static PyObject *result_type;

static Block *block_new(void)
{
    Block *block = spare;
    if (block != NULL) {
        spare = block->next;
        spares--;
    } else {
#if defined(_WIN32)
        block = malloc(BLOCK_BYTES);
#else
        block = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED)
            block = NULL;
#endif
        if (block == NULL)
            return NULL;
    }
    block->taken = block->users = 0;
    return block;
}

static void block_free(Block *block)
{
    if (spares < SPARE_BLOCKS) {
        block->next = spare;
        spare = block;
        spares++;
        return;
    }
#if defined(_WIN32)
    free(block);
#else
    munmap(block, BLOCK_BYTES);
#endif
}

static void block_leave(Block *block)
{
    if (--block->users == 0 && block != filling)
        block_free(block);
}

/* A new row and, in `row`, where its 74 float64 are; NULL with an exception set. */
static PyObject *result_new(double **row)
{
    if (filling == NULL || filling->taken == BLOCK_ROWS) {
        Block *full = filling;
        if ((filling = block_new()) == NULL) {
            filling = full;
            return PyErr_NoMemory();
        }
        if (full != NULL && full->users == 0)
            block_free(full);
    }
    Result *result = (Result *)PyType_GenericAlloc((PyTypeObject *)result_type, 0);
    if (result == NULL)
        return NULL;
    result->block = filling;
    result->row = *row = filling->rows + TRUEUP_PACKED * filling->taken++;
    filling->users++;
    return (PyObject *)result;
}

static void result_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (((Result *)self)->block != NULL)
        block_leave(((Result *)self)->block);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *result_bytes(PyObject *self, PyObject *none)
{
    (void)none;
    if (((Result *)self)->block == NULL)
        return PyBytes_FromStringAndSize(NULL, 0);
    return PyBytes_FromStringAndSize((const char *)((Result *)self)->row, TRUEUP_PACKED * sizeof(double));
}

static PyMethodDef RESULT_METHODS[] = {
    {"__bytes__", result_bytes, METH_NOARGS, "The 74 float64 in the order of trueup.foundation.model.PACKED."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot RESULT_SLOTS[] = {
    {Py_tp_doc, "A row of statistics; bytes() gives its numbers."},
    {Py_tp_methods, RESULT_METHODS},
    {Py_tp_dealloc, result_dealloc},
    {0, NULL},
};

static PyType_Spec RESULT_SPEC = {"trueup.foundation.kernels._native.Result", sizeof(Result), 0, Py_TPFLAGS_DEFAULT, RESULT_SLOTS};

#endif
