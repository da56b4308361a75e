"""Islands that train together over a slow or unreliable network: kill one, start it again, and the others go on.

    export FOMPI_MEMBERS_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe())")
    fompi members serve --port 7777                                 # in a terminal of its own, on any host
    python examples/islands.py fompi://localhost:7777 a             # one process for each island: kill -9 one of them
    python examples/islands.py fompi://localhost:7777 b

Each island has its own optimizer and reads other text. Half of the model travels every 16 steps, behind one of them.
"""

import sys
import time
from pathlib import Path

import torch

import fompi

ADDRESS, NAME, STEPS = sys.argv[1], sys.argv[2], int([*sys.argv, 400][3])
LENGTH, WIDTH = 32, 64

text = Path(torch.__file__).read_bytes()  # real text that is there: the Python code of torch
text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
torch.manual_seed(0)  # all islands begin with the same parameters
model = torch.nn.Sequential(
    torch.nn.Embedding(128, WIDTH), torch.nn.Flatten(), torch.nn.Linear(LENGTH * WIDTH, 256), torch.nn.GELU(),
    torch.nn.Linear(256, 128),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(sum(NAME.encode()))  # from here on each island reads other places

with fompi.members.Membership(ADDRESS, name=NAME) as membership:
    numbers = []
    how = {"sync_every": 32, "fragments": 2, "delay": 1, "wire": "int8", "on_exchange": numbers.append}
    with fompi.torch.DiLoCo(model, optimizer, membership, **how) as outer:
        begun, first = time.monotonic(), outer.outer.steps
        while outer.outer.steps < STEPS:
            starts = torch.randint(len(text) - LENGTH, (64, 1))
            x, y = text[starts + torch.arange(LENGTH)], text[starts[:, 0] + LENGTH]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            outer.step()
            time.sleep(0.01)  # a larger model computes here
            if numbers:
                islands, seconds = numbers.pop().islands, time.monotonic() - begun
                rate = (outer.outer.steps - first) * y.numel() / seconds
                here = f"{NAME}: step {outer.outer.steps}, {islands} islands"
                print(f"{here}, loss {loss:.2f}, {rate:.0f} letters a second", flush=True)
print(f"{NAME} has ended", flush=True)

# Output of a, shortened. b came in step 97, was killed in step 140, and came again in step 190:
# a: step 97, 1 islands, loss 2.91, 3610 letters a second
# a: step 113, 2 islands, loss 2.79, 3401 letters a second
