/* The handler of calls in compiled JAX programs. */
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* xla_handler(run, major, minor): the address of the handler, for this version of XLA's interface. */
PyObject *xla_handler(PyObject *self, PyObject *args);
