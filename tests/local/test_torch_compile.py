"""torch.compile in a process that has not loaded it: two ranks in a job of their own."""

import textwrap

SCRIPT = textwrap.dedent("""
    import sys
    import torch
    import fompi

    # so the first call of an operation is one that the compiler reads
    assert not {"torch._dynamo", "fompi.torch.operators"} & set(sys.modules)

    class Block(torch.nn.Module):
        def __init__(self, tp):
            super().__init__()
            self.tp = tp
            self.up, self.down = (torch.nn.Parameter(torch.randn(*s).double()) for s in ((4, 6), (6, 4)))

        def forward(self, x):
            h = torch.tanh(fompi.all_gather_matmul(x, self.up, comm=self.tp))
            return x + fompi.matmul_reduce_scatter(h, self.down, comm=self.tp)

    def gradients(call, x):
        block.zero_grad()
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), block.up.grad, block.down.grad]

    def same(actual, expected):
        assert all(torch.allclose(a, e, rtol=1e-12) for a, e in zip(actual, expected, strict=True)), (actual, expected)

    tp = fompi.Communicator()
    torch.manual_seed(tp.rank)
    block = Block(tp)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for rows in (3, 3, 1, 5, 7):
        x = torch.randn(rows, 4).double()
        same(gradients(compiled, x), gradients(block, x))

    # a call in flight is a graph break, a strategy is a node: the compiler reads neither
    def started(x):
        return fompi.all_gather.start(2 * x, comm=tp).wait() + 1

    def linear(x, w):
        return fompi.parallel.tensor.column_parallel_linear(x, w, comm=tp) + 1

    same([torch.compile(linear, fullgraph=True, backend="eager")(x, block.up)], [linear(x, block.up)])
    try:
        torch.compile(started, fullgraph=True, backend="eager")(x)
    except torch._dynamo.exc.Unsupported as error:
        print(f"refused: {'fompi communicates' in str(error)}")  # in one piece: two ranks write
    same([torch.compile(started, backend="eager")(x)], [fompi.all_gather(2 * x, comm=tp) + 1])
""")


def test_a_compiled_module_is_one_graph(mpirun, tmp_path):
    """Values and gradients are right for all shapes, and the compiler warns of nothing: it does not read fompi."""
    script = tmp_path / "compiled.py"
    script.write_text(SCRIPT)
    finished = mpirun(2, script, seconds=100)
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("refused: True") == 2
    assert "Dynamo" not in finished.output and "recompile" not in finished.output, finished.output
