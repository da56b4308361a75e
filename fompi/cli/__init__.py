"""The command line: `fompi`, or `python -m fompi`, which is the same program.

| file           | what it holds                                                                              |
|----------------|--------------------------------------------------------------------------------------------|
| `main.py`      | the table of subcommands; errors become one line and exit status 2                         |
| `info.py`      | `info`: versions, MPI, launcher, ranks and hosts; without a subcommand, the same in short  |
| `facts.py`     | what `info` prints, as values                                                              |
| `processes.py` | the cores and the GPU of each process of a job, and what is wrong with those of all ranks  |
| `plan.py`      | `plan`: the grid of a plan; also the arguments that describe a problem                     |
| `simulate.py`  | `simulate`: the predicted trace of a plan, or a whole model step                           |
| `explain.py`   | `explain`: every candidate schedule on a machine, and why the best one is the best         |
| `check.py`     | `check`: schedules of other systems; `check_actions.py`: the actions of pipelines          |
| `digest.py`    | `digest`: at which call the bits of two numbers of ranks first differ                      |
| `layout.py`    | `layout`: the best sizes of all kinds of parallelism for a model                           |
| `trace.py`     | `trace`: the report and the newest calls of a job, of the file that FOMPI_REPORT wrote     |
| `calibrate.py` | `calibrate`: measures the machine                                                          |
| `output.py`    | tables, JSON and the progress line                                                         |
| `picture.py`   | timelines as SVG and PNG files                                                             |

Each subcommand is a module with `EXAMPLE`, `add_arguments(parser)` and `run(options) -> int`. `main.py` imports it only
when it is used. This room may import every room but `fompi.bench`: `main.py` names the modules of `try` and `bench` as
text.
"""
