/* The handler of XLA's foreign function interface for calls in compiled JAX programs: it hands addresses to Python.
 *
 * A call frame is an array of words of 8 bytes, as `xla/ffi/api/c_api.h` of jaxlib has it. `fompi.jax.ffi` checks the
 * version of that file, has the places of the fields by name, and answers all but the calls themselves.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include "xla.h"

enum { EXTENSION = 1, API = 2, COUNT = -2, ARGUMENTS = 9, RESULTS = 14, ATTRIBUTES = 20 }; /* words of a frame */
enum { TYPE = 1, METADATA_OF = 3, METADATA = 1, VERSION = 3, DATA = 3, ERROR_CREATE = 6 }; /* of what they point to */

typedef uint64_t Word;

typedef struct {
    size_t size;
    void *extension;
    const char *message;
    int32_t code;
} Error; /* what ERROR_CREATE takes */

static PyObject *run; /* run(site, addresses of the arguments, of the results, API of XLA) -> None, or an error of XLA */
static int32_t version[2];

static Word *at(Word address) { return (Word *)(uintptr_t)address; }

/* The addresses of the buffers of a frame, but for the first one, which is a token. */
static PyObject *addresses(const Word *frame, int which) {
    Py_ssize_t n = (Py_ssize_t)frame[which + COUNT] - 1;
    PyObject *made = PyTuple_New(n);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) {
        PyObject *address = PyLong_FromUnsignedLongLong(at(at(frame[which])[i + 1])[DATA]);
        if (address == NULL || PyTuple_SetItem(made, i, address) < 0) Py_CLEAR(made);
    }
    return made;
}

/* An error of XLA that needs no Python: without memory, or for an exception that `run` has let through. */
static void *no_result(const Word *frame) {
    void *(*create)(const Error *) = (void *(*)(const Error *))(uintptr_t)at(frame[API])[ERROR_CREATE];
    Error error = {sizeof error, NULL, "fompi: the call in a JAX program could not begin, or has no result: see stderr", 13};
    return create(&error);
}

static void *handle(Word *frame) {
    Word *extension = at(frame[EXTENSION]);
    if (extension != NULL && (int32_t)extension[TYPE] == METADATA) {
        memcpy(&at(extension[METADATA_OF])[VERSION], version, sizeof version);
        return NULL;
    }
    Word site = *at(at(*at(frame[ATTRIBUTES]))[1]);
    void *error = NULL;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *given = addresses(frame, ARGUMENTS), *results = addresses(frame, RESULTS), *said = NULL;
    if (given != NULL && results != NULL) said = PyObject_CallFunction(run, "KOOK", site, given, results, frame[API]);
    if (said != NULL && said != Py_None) error = PyLong_AsVoidPtr(said);
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(run);
        error = no_result(frame);
    }
    Py_XDECREF(said);
    Py_XDECREF(given);
    Py_XDECREF(results);
    PyGILState_Release(state);
    return error;
}

PyObject *xla_handler(PyObject *self, PyObject *args) {
    PyObject *function;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oii", &function, &version[0], &version[1])) return NULL;
    Py_INCREF(function);
    Py_XDECREF(run);
    run = function;
    return PyLong_FromVoidPtr((void *)handle);
}
