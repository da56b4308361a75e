"""Islands that train by themselves, and exchange their parameters every 32 steps instead of gradients in each step.

    mpirun -n 2 python examples/diloco.py

Each island has its own images of digits. A fragment of the model travels behind one inner step and is applied then.
A model as small as this one shows neither what seldom exchanges gain nor what they lose. Any number of ranks works.
"""

import torch
from sklearn.datasets import load_digits

import fompi

STEPS, KEPT_BACK = 320, 360
islands = fompi.Communicator()  # mesh["islands"], where each island is several ranks
images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = images.float() / 16
own_images, own_labels = (a[KEPT_BACK:][islands.rank :: islands.size] for a in (images, labels))


def made():
    """A model, which is the same on all islands, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(model, optimizer, after_step=lambda: None):
    for step in range(STEPS):
        rows = torch.randint(len(own_images), (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(own_images[rows]), own_labels[rows]).backward()
        optimizer.step()
        after_step()


def say(how, model, nbytes):
    right = (model(images[:KEPT_BACK]).argmax(1) == labels[:KEPT_BACK]).double().mean()
    right = fompi.all_reduce(right.reshape(1), op="mean", comm=islands).item()
    if islands.rank == 0:
        print(f"{how}: reads {right:.1%} of the images that were kept back, sends {nbytes / 1024:.2f} KiB a step")


model, optimizer = made()
train(fompi.torch.DistributedDataParallel(model, islands), optimizer)
parameters = sum(p.numel() for p in model.parameters())
say("gradients in each step", model, 4 * parameters * 2 * (islands.size - 1) / islands.size)

for wire in (None, "int4"):
    model, optimizer = made()
    how, exchanges = {"sync_every": 32, "fragments": 2, "delay": 1}, []
    how |= {"wire": wire, "feedback": wire is not None, "on_exchange": exchanges.append}
    with fompi.torch.DiLoCo(model, optimizer, islands, **how) as outer:
        train(model, optimizer, outer.step)
    say(f"each half in every 32nd step, {wire or 'float32'}", model, sum(each.nbytes for each in exchanges) / STEPS)

# Output on 2 ranks:
# gradients in each step: reads 95.0% of the images that were kept back, sends 37.54 KiB a step
# each half in every 32nd step, float32: reads 93.8% of the images that were kept back, sends 1.16 KiB a step
# each half in every 32nd step, int4: reads 93.9% of the images that were kept back, sends 0.16 KiB a step
