"""torch.compile: a call of an operation is a graph break. In a job of its own, because it changes the process."""

import textwrap

SCRIPT = textwrap.dedent("""
    import sys
    import torch
    import fompi

    assert "torch._dynamo" not in sys.modules  # so the first call of an operation is one that the compiler reads

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
    compiled = torch.compile(block, backend="eager")
    for rows in (3, 3, 1, 5, 7):
        x = torch.randn(rows, 4).double()
        same(gradients(compiled, x), gradients(block, x))

    @torch.compile(backend="eager")
    def started(x):
        return fompi.all_gather.start(2 * x, comm=tp).wait() + 1

    same([started(x)], [fompi.all_gather(2 * x, comm=tp) + 1])

    @torch.compile(backend="eager", fullgraph=True)
    def whole(x):
        return fompi.all_gather(2 * x, comm=tp) + 1

    try:
        whole(x)
    except torch._dynamo.exc.Unsupported as error:
        print(f"refused: {'fompi communicates' in str(error)}")  # in one piece: two ranks write
""")


def test_compile_breaks_the_graph_at_each_call(mpirun, tmp_path):
    """Values and gradients are right for all shapes, and the compiler warns of nothing: it does not read fompi."""
    script = tmp_path / "compiled.py"
    script.write_text(SCRIPT)
    finished = mpirun(2, script, seconds=50)
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("refused: True") == 2
    assert "Dynamo" not in finished.output and "recompile" not in finished.output, finished.output
