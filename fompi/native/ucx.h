/* Messages by UCX in place of MPI (`fompi.mpi.ucx`): the type `Worker`, or NULL with an error of Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

PyObject *ucx_worker_type(void);
