"""Two replica groups of torchft train together: kill one, start it again, and the other never stops.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000   # in a terminal of its own
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_ddp.py 0               # in a second one
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_ddp.py 1               # in a third: kill -9 it

Each group is one process, also under `torchrun --standalone`. They end at step 300, or later if one is missing then.
It takes `pip install fompi[mpich] torch torchft`.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta

import torch
import torchft

from fompi.torch.torchft import ProcessGroupFompi

GROUP, STEPS, LIMIT = int(sys.argv[1]), int((*sys.argv, 300)[2]), timedelta(seconds=10)
place = {}
if "MASTER_ADDR" not in os.environ:  # torchrun gives a store, a rank and a size to each group
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}

torch.manual_seed(GROUP)  # each group draws rows of its own; the first quorum makes the parameters equal
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
adam = torch.optim.Adam(net.parameters(), lr=1e-2)


def load(state):
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


manager = torchft.Manager(
    pg=ProcessGroupFompi(LIMIT),
    state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},  # for a group that comes late
    load_state_dict=load,
    min_replica_size=1,
    replica_id=f"group {GROUP}",
    timeout=LIMIT,
    **place,
)
model = torchft.DistributedDataParallel(manager, net)
optimizer = torchft.Optimizer(manager, adam)
while manager.current_step() < STEPS or manager.num_participants() < 2:
    x = torch.randn(64, 16)
    optimizer.zero_grad()  # it asks who is here
    loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
    loss.backward()
    time.sleep(0.1)  # a larger model computes here
    optimizer.step()  # it leaves the step out if a group was lost in it
    print(f"step {manager.current_step()}: {manager.num_participants()} of 2 groups, loss {loss:.2f}", flush=True)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"parameters: {digest.hexdigest()}", flush=True)
manager.shutdown(wait=False)

# Output of group 0 with 30 steps, shortened. Group 1 came in step 8, was killed in step 9, and came again in step 26:
# step 8: 1 of 2 groups, loss 305.87
# step 8: 2 of 2 groups, loss 252.79
# step 9: 1 of 2 groups, loss 240.57
# step 27: 2 of 2 groups, loss 166.23
# parameters: cdcb3ac9ff2a5c1425f1fe571bd1a47b398006651498b1098cfd251f6ede0e30
