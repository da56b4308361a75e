"""Benchmarks: `fompi bench` and `fompi try`.

| file             | what it holds                                                                           |
|------------------|-----------------------------------------------------------------------------------------|
| `command.py`     | `fompi bench`: runs a suite, prints its table, writes the files that are named          |
| `trial.py`       | `fompi try`: what overlap gains for one shape; one table and a verdict                  |
| `measure.py`     | how much is measured, where, and how calls become a row                                 |
| `cluster.py`     | which ranks share a host, and the TCP streams between hosts                             |
| `device.py`      | where tensors are with `--device`                                                       |
| `accelerator.py` | an emulated accelerator, and the kernels of strategies on it                           |
| `strategies.py`  | the strategies of the suites `parallel`, `step` and `smaller`                           |
| `training.py`    | the models of the suites with PyTorch, and the steps that train them                    |
| `table.py`       | rows as JSON, Markdown and plots                                                        |
| `rivals/`        | what fompi is measured against                                                          |
| `collectives.py` | suite: plain collectives, the MPI library's own, and a TCP stream                       |
| `fused.py`       | suite: fused operations on real GEMMs, and what the core and the link allow             |
| `papers.py`      | suite: the papers' settings on emulated accelerators                                    |
| `peers.py`       | suite: fused operations beside gloo, JAX and mpi4py                                     |
| `planner.py`     | suite: the planner's choices and predictions                                            |
| `adapt.py`       | suite: a link that drops while a job runs                                               |
| `parallel.py`    | suite: strategies. `pipelines.py`, `two_axes.py`, `whole_step.py`: rows of their own    |
| `step.py`        | suite: training steps beside PyTorch over gloo                                          |
| `overhead.py`    | suite: what a call costs above the bare messages                                        |
| `ddp.py`         | suite: DistributedDataParallel over fompi and over gloo, ten shapes                     |
| `c10d.py`        | suite: the verbs of torch.distributed over gloo and over fompi, and MPI's own           |
| `decode.py`      | suite: a decoder on all ranks, tokens a second by backend                               |
| `train.py`       | suite: steps of a GPT by torch's own classes, over gloo and over fompi                  |
| `jit.py`         | suite: a call in a program that JAX compiles                                            |
| `smaller.py`     | suite: messages that carry fewer bits                                                   |
| `order.py`       | suite: what the order of sums costs                                                     |

A suite is a module with `rows(bench) -> list[Row]`. This room may import every other room. Nothing of the product
imports it: `fompi.cli.main` names `command.py` and `trial.py` as text.
"""
