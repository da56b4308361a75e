"""What is in flight in a process, and what drives it. One engine serves all communicators of the process.

| file | what it holds |
|---|---|
| `tasks` | `Task`: something in flight, with requests and kernels; the base of a call and of a handshake |
| `port` | `Port`: which message is sent or received next, if axes of a mesh have priorities |
| `in_flight` | `InFlight.poll` tests all requests together |
| `engine` | `Engine.progress` polls and runs kernels; `Engine.wait` waits, with a deadline |
| `intervals` | when the program has waited and when kernels have run |
| `progress` | the helper thread, which moves messages while the program computes; the modes of FOMPI_PROGRESS |
| `control` | control messages of one communicator: failures, departures, which rank waits for which |
| `handshake` | the agreement of all ranks before a call moves data |
| `frames` | what the terminal shows of an error that nobody catches |
| `faults` | what a rank does when it ends, normally or by an error |
| `pickled` | what a pickle of a communicator or a mesh contains, and how it is found again |
| `communicator` | `Communicator`: the ranks on which an operation runs |
| `mesh` | `Mesh`: a grid of all ranks with named axes, each a `Communicator` |
| `native` | the functions of MPI for calls in C, and whether there are any (FOMPI_ENGINE) |
| `stop` | `Stop`: all ranks end in the same step after a signal of the batch system |

May import `base`, `plans`, `traces`, `model`, `tensors`, `backends`, `mpi` and `native`, never `schedules` or
`planner`.
"""
