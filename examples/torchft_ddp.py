"""Two replica groups of torchft that train together: kill one, start it again, and the other never stops.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000     # a terminal of its own
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python examples/torchft_ddp.py 0                                                           # a second terminal
    python examples/torchft_ddp.py 1                                                           # a third: kill -9 this

Each group is one process here. It ends at step 100, or later if a group is missing then. `--backend gloo` takes the
group of torchft. It needs `pip install torchft`.
"""

import argparse
import hashlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft

LIMIT = timedelta(seconds=10)
parser = argparse.ArgumentParser()
parser.add_argument("group", type=int, help="the number of this replica group")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--groups", type=int, default=2, help="the last step is one that so many groups make")
parser.add_argument("--pause", type=float, default=0.1, help="how long a step computes besides, in seconds")
parser.add_argument("--backend", choices=("fompi", "gloo"), default="fompi")
options = parser.parse_args()

if options.backend == "fompi":
    from fompi.torch.torchft import ProcessGroupFompi as ProcessGroup
else:
    from torchft import ProcessGroupGloo as ProcessGroup

where = {}
if "MASTER_ADDR" not in os.environ:  # torchrun gives a store and the rank in the replica group
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    where = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}

torch.manual_seed(options.group)  # the first quorum makes the parameters equal
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
adam = torch.optim.Adam(net.parameters(), lr=1e-2)


def state():
    return {"net": net.state_dict(), "adam": adam.state_dict()}


def load(state):
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


manager = torchft.Manager(
    pg=ProcessGroup(timeout=LIMIT),
    state_dict=state,
    load_state_dict=load,
    min_replica_size=1,
    replica_id=f"group {options.group}",
    timeout=LIMIT,
    connect_timeout=LIMIT,
    **where,
)
model = torchft.DistributedDataParallel(manager, net)
optimizer = torchft.Optimizer(manager, adam)

while manager.current_step() < options.steps or manager.num_participants() < options.groups:
    x = torch.randn(32, 16)
    optimizer.zero_grad()  # it asks for a quorum: who is there in this step?
    loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
    loss.backward()
    time.sleep(options.pause)
    optimizer.step()  # nothing, if a member was lost in this step
    print(f"step {manager.current_step()}: {manager.num_participants()} here, loss {loss:.3f}", flush=True)

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(f"parameters {digest.hexdigest()}", flush=True)
manager.shutdown(wait=False)
