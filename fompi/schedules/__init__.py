"""How a collective is carried out: one generator for each algorithm.

- `registry`: the table of schedules, the decorator `schedule`, and `write`, which makes a plan.
- `ring`: messages go to the next rank; `bidirectional` sends half of the parts each way.
- `direct`: messages go directly to the rank that needs them: `direct`, `pairwise`, `unfused_p2p`, `sliced_p2p`,
  `exchange`.
- `doubling`: an all-reduce of small tensors in log2(ranks) steps.
- `hierarchical`: for groups of ranks with fast links inside a group and slow links between groups.
- `library`: the collectives of the MPI library: `unfused`, `sliced`.
- `work`: the kernels around the messages, which all schedules share.

This room may import `base`, `plans` and Python's standard library.
"""
