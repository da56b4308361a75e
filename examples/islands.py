"""Islands that train together over a slow or unreliable network: kill one, start it again, and the others go on.

    export FOMPI_MEMBERS_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")
    fompi members serve --port 7777                                 # in a terminal of its own, on any host
    python examples/islands.py fompi://localhost:7777 a             # one process for each island: kill -9 one of them
    python examples/islands.py fompi://localhost:7777 b
    python -m fompi islands replay a.epochs examples/islands.py:island       # later: the same bits, in one process

Each island has its own optimizer and reads other text. Half of the model travels every 16 steps, behind one of them.
"""

import sys
import time
from pathlib import Path

import torch

import fompi

LENGTH, WIDTH, BATCH = 32, 64, 64


def island(name):
    """The model of an island, its optimizer, and what makes one inner step."""
    text = Path(torch.__file__).read_bytes()  # real text that is there: the Python code of torch
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
    torch.manual_seed(0)  # all islands begin with the same parameters
    model = torch.nn.Sequential(
        torch.nn.Embedding(128, WIDTH), torch.nn.Flatten(), torch.nn.Linear(LENGTH * WIDTH, 256), torch.nn.GELU(),
        torch.nn.Linear(256, 128),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = torch.Generator().manual_seed(sum(name.encode()))  # each island reads other places

    def inner():
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=places)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(text[starts + torch.arange(LENGTH)]), text[starts[:, 0] + LENGTH]
        )
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, inner


def train(address, name, steps="400"):
    model, optimizer, inner = island(name)
    numbers, begun = [], time.monotonic()
    how = {"sync_every": 32, "fragments": 2, "delay": 1, "wire": "int8", "on_exchange": numbers.append}
    with (
        fompi.islands.join(address, name=name, least=1, log=f"{name}.epochs") as islands,
        fompi.torch.DiLoCo(model, optimizer, islands, **how) as diloco,
    ):
        outer = diloco.outer
        first = outer.steps
        while outer.steps < int(steps):
            loss = inner()
            diloco.step()
            time.sleep(0.01)  # a larger model computes here
            if numbers:
                rate = (outer.steps - first) * BATCH / (time.monotonic() - begun)
                here = f"{name}: step {outer.steps}, {numbers.pop().islands} islands"
                print(f"{here}, loss {loss:.2f}, {rate:.0f} letters a second", flush=True)
    print(f"{name} has ended", flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])

# Output of a, shortened. b came in step 97, was killed in step 140, and came again in step 190:
# a: step 97, 1 islands, loss 2.91, 3610 letters a second
# a: step 113, 2 islands, loss 2.79, 3401 letters a second
