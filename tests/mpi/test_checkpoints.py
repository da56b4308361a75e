"""fompi.save and fompi.load: other numbers of ranks, ZeRO, parts of modules, and what is refused."""

import dataclasses
import json
import os
import pickle
import shutil
import threading
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from boxes import held
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fompi
from fompi import Box, Boxes, LayoutError, Replicate, ShapeError, Shard, StateError
from fompi.cli.main import main
from fompi.cli.reshard import whole_array
from fompi.parallel import checkpoints
from fompi.parallel.data import SGD, AdamW, DataParallel
from fompi.parallel.opened import open_checkpoint
from fompi.torch import nn

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[2])

X = np.arange(7 * 12.0).reshape(7, 12)


def part(boxes, rank, x=X):
    return held(x, boxes)[rank].reshape(boxes.arrays[rank])


def write(world, folder, x=X, step=4):
    boxes = Boxes.flat(x.shape, [33, 84 - 33], 60)  # padded
    state = {"a": {"x": (part(boxes, world.rank, x), boxes), "y": np.float32([1, 2, 3])}, "epoch": 3}
    fompi.save(folder, state, step=step, comm=world)


def test_another_layout_another_number_of_ranks_and_padding(world, folder):
    write(world, folder)
    alone = world.split(world.rank)
    try:
        for comm, layouts in ((world, [Shard(1), Replicate()]), (alone, [Shard(0)])):
            for layout in layouts:
                boxes = Boxes.over(X.shape, layout, comm.size)
                x, y = np.zeros(boxes.arrays[comm.rank]), np.zeros(3, np.float32)
                found = fompi.load(folder, {"a": {"x": (x, boxes), "y": y}, "epoch": 0}, comm=comm)
                assert np.array_equal(x, part(boxes, comm.rank)) and y.tolist() == [1, 2, 3]
                assert found["epoch"] == 3 and found["a.x"] is x
        padded = Boxes.flat(X.shape, [50, 34], 60)
        x = np.full(60, 8.0)
        fompi.load(folder, {"a": {"x": (x, padded)}}, comm=world)
        assert (x[[50, 34][world.rank] :] == 8).all()  # padding is no data
        other, flat = np.full((3, 20), 8.0).T, x.reshape(20, 3)  # the boxes lie in it row by row, whatever its strides
        fompi.load(folder, {"a": {"x": (other, Boxes(X.shape, padded.of, ((20, 3),) * 2))}}, comm=world)
        assert np.array_equal(other, flat)
    finally:
        alone.close()


def test_each_element_is_in_one_file_and_old_files_go(world, folder):
    write(world, folder)
    write(world, folder, step=5)
    for thread in threading.enumerate():
        if thread.name == "fompi remove":
            thread.join()
    world.barrier()
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    assert len(files) == 2 and nbytes < X.nbytes + 12 + 2 * 600
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) - min(sizes) < 400  # what both have is written by the one with less


def test_jax_and_torch_tensors(world, folder):
    jax = pytest.importorskip("jax")
    fompi.save(folder, {"t": torch.arange(6).bfloat16(), "j": jax.numpy.arange(5.0)}, comm=world)
    t = torch.zeros(6, dtype=torch.bfloat16)
    found = fompi.load(folder, {"t": t, "j": jax.numpy.zeros(5)}, comm=world)
    assert t.tolist() == [*range(6)] and isinstance(found["j"], jax.Array) and found["j"].tolist() == [*range(5)]


def test_ranks_with_directories_of_their_own(world, folder, monkeypatch):
    """Rank 0 would have saved what only it has."""
    (folder / str(world.rank)).mkdir()
    monkeypatch.chdir(folder / str(world.rank))
    with pytest.raises((StateError, fompi.MismatchError), match="rank 0 does not see"):
        fompi.save("run", {"x": np.zeros(30)}, comm=world)
    assert not [*Path("run").iterdir()]


def test_lists_are_values_or_hold_tensors(world, folder):
    """As the states of optimizers of JAX are."""
    fompi.save(folder, {"s": [(np.arange(3), 7), np.ones(2)], "l": (1, 2.5, "a"), "e": []}, comm=world)
    a, b = np.zeros(3, np.int64), np.zeros(2)
    found = fompi.load(folder, {"s": [(a, 0), b], "l": [], "e": []}, comm=world)
    assert a.tolist() == [0, 1, 2] and b.tolist() == [1, 1]
    assert (found["s.0.1"], found["l"], found["e"]) == (7, [1, 2.5, "a"], [])


@pytest.mark.parametrize("copies", ["now", "later", "none"])
def test_a_started_save_has_what_was_there(world, folder, monkeypatch, copies):
    """Large enough for blocks that the kernel is told of, in an order that is not that of the file."""
    x = np.full((1000, 2400), float(world.rank)).T
    boxes = Boxes.over((2400 * world.size, 1000), Shard(0), world.size)
    saving = fompi.save.start(folder, {"x": (x, boxes)}, comm=world, copies=copies)
    if copies != "now":
        saving.copied()
    x[...] = -5
    assert not (folder / "checkpoint.json").exists() or world.rank
    if world.rank == 0:  # a file that takes longer than an agreement may
        monkeypatch.setattr(saving._writer, "is_alive", iter([True, True, False, False]).__next__)
    saving.wait()
    fompi.load(folder, {"x": (x, boxes)}, comm=world)
    assert (x == world.rank).all()
    with pytest.raises(StateError, match="waited for"):
        saving.wait()


def test_a_save_that_waits_copies_nothing(world, folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "memory", None)
    write(world, folder)
    open_checkpoint(folder).check()
    with pytest.raises(LayoutError, match="copies='never' must be 'now', 'later' or 'none'"):
        fompi.save.start(folder, {}, comm=world, copies="never")


def test_what_differs_between_ranks_is_refused(world, folder):
    """Rank 0 saves what only it has: refused as what all have, saved under a name of its own."""
    with pytest.raises(LayoutError, match="'x' on rank 1 has not the bits of rank 0"):
        fompi.save(folder, {"x": np.full(3, world.rank)}, comm=world)
    with pytest.raises(LayoutError, match="'epoch' is"):
        fompi.save(folder, {"epoch": world.rank}, comm=world)
    with pytest.raises(LayoutError, match="hole"):
        boxes = Boxes((8,), ((fompi.Box((0,), (3,)),), (fompi.Box((4,), (4,)),)))
        fompi.save(folder, {"x": (np.zeros([3, 4][world.rank]), boxes)}, comm=world)
    assert not (folder / "checkpoint.json").exists()
    fompi.save(folder, {"only": np.arange(3)} if world.rank == 0 else {}, comm=world)
    x = np.zeros(3, np.int64)
    fompi.load(folder, {"only": x} if world.rank else {}, comm=world)
    assert x.tolist() == ([0, 1, 2] if world.rank else [0, 0, 0])


def damaged(world, folder, how):
    """Rank 0 damages a file; all go on when it has."""
    if world.rank == 0:
        file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        if how == "cut short":
            os.truncate(file, file.stat().st_size - 8)
        elif how == "bytes from":
            content = bytearray(file.read_bytes())
            content[-5] ^= 1
            file.write_bytes(content)
        elif how == "another checkpoint":
            other = file.read_bytes()
            file.write_bytes(other.replace(file.name[:16].encode(), b"0123456789abcdef"))
        elif how == "No such file":
            file.unlink()
        elif how == "not as it was written":
            index = folder / "checkpoint.json"
            index.write_text(index.read_text().replace("float32", "float64"))
        else:
            shutil.rmtree(folder)
            folder.mkdir()
    world.barrier()


@pytest.mark.parametrize(
    "how",
    [
        "cut short",
        "bytes from",
        "another checkpoint",
        "No such file",
        "not as it was written",
        "no checkpoint was ever",
    ],
)
def test_what_is_not_whole_is_refused_by_name_on_all_ranks(world, folder, how):
    write(world, folder)
    damaged(world, folder, how)
    boxes = Boxes.over(X.shape, Replicate(), world.size)
    x = np.full(X.shape, 5.0)
    with pytest.raises(LayoutError, match=how):
        fompi.load(folder, {"a": {"x": (x, boxes)}}, comm=world)
    assert (x == 5).all()
    assert fompi.all_reduce(np.ones(1), comm=world)[0] == world.size


def test_one_rank_that_cannot_read_or_write(world, folder, monkeypatch):
    write(world, folder)
    before = (folder / "checkpoint.json").read_bytes()
    state = {"a": {"y": np.zeros(3, np.float32)}}
    with pytest.raises((LayoutError, fompi.MismatchError)):
        fompi.load(folder if world.rank == 0 else folder / "nothing", state, comm=world)
    if world.rank == 1:
        monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises((StateError, fompi.MismatchError), match="No space left on device"):
        fompi.save(folder, {"z": np.zeros(3)}, comm=world)
    monkeypatch.undo()
    world.barrier()
    assert (folder / "checkpoint.json").read_bytes() == before and len([*folder.iterdir()]) == 3
    fompi.load(folder, state, comm=world)
    assert state["a"]["y"].tolist() == [1, 2, 3]


def test_what_fails_behind_the_rename_does_no_harm(world, folder, monkeypatch):
    """The new checkpoint is there: no rank may take its file away, and no old file that stays is an error."""
    write(world, folder)
    agreed = checkpoints.agree

    def lost(comm, text, *more):
        values = agreed(comm, text, *more)
        if text == "save: the rename":
            raise fompi.PeerError("a rank is lost", 1)
        return values

    monkeypatch.setattr(checkpoints, "agree", lost)
    monkeypatch.setattr(os, "open", full_disk)
    with pytest.raises(fompi.PeerError, match="is lost"):
        write(world, folder, step=9)
    monkeypatch.undo()
    world.barrier()
    y = np.zeros(3, np.float32)
    fompi.load(folder, {"a": {"y": y}}, comm=world)
    assert y.tolist() == [1, 2, 3] and open_checkpoint(folder).step == 9
    open_checkpoint(folder).check()


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_rank_reads_only_what_it_needs(world, folder):
    """What is broken in the part of one rank does not keep another one from its own."""
    n = 1 << 19  # 4 MiB for each rank
    boxes = Boxes.over((n * world.size,), Shard(0), world.size)
    fompi.save(folder, {"x": (np.full(n, float(world.rank)), boxes)}, comm=world)
    if world.rank == 0:
        file = next(folder.glob("*-1.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    world.barrier()
    alone = world.split(world.rank)
    begin = n * world.rank
    some = Boxes((n * world.size,), ((fompi.Box((begin,), (1000,)),),))
    x = np.zeros(1000)
    fompi.load(folder, {"x": (x, some)}, comm=alone)
    assert (x == world.rank).all()
    last = Boxes((n * world.size,), ((fompi.Box((begin + n - 1000,), (1000,)),),))
    if world.rank == 1:
        with pytest.raises(LayoutError, match="are not those that were written"):
            fompi.load(folder, {"x": (x, last)}, comm=alone)
    alone.close()


def test_shapes_dtypes_and_names_that_differ(world, folder):
    write(world, folder)
    for state, kind, words in (
        ({"a": {"y": np.zeros(4, np.float32)}}, ShapeError, "'a.y' has the shape"),
        ({"a": {"y": np.zeros(3)}}, LayoutError, "'a.y' is float64, but float32"),
        ({"b": np.zeros(3)}, LayoutError, "lacks 1 names: b"),
    ):
        with pytest.raises(kind, match=words):
            fompi.load(folder, state, comm=world)


def trained(comm, zero, steps, dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((5, 3)).astype(dtype), "b": np.zeros(3, dtype), "s": np.ones((), dtype)}
    dp = DataParallel(params, optimizer=AdamW(1e-2), comm=comm, zero=zero)
    run(dp, steps)
    return dp


def run(dp, steps):
    losses = []
    for step in range(steps):
        values = {name: np.asarray(dp[name]).copy() for name in "wbs"}
        losses.append(float(sum(np.square(v.astype(np.float64)).sum() for v in values.values())))
        for name in "sbw":
            dp.ready(name, np.asarray(values[name] * (1 + step), values[name].dtype))
        dp.step()
    return losses


@pytest.mark.parametrize(("zero", "dtype"), [*((z, np.float32) for z in range(4)), (2, np.float16), (3, np.float16)])
def test_zero_is_resumed_on_other_ranks(world, folder, zero, dtype):
    with trained(world, zero, 3, dtype) as dp:
        fompi.save(folder, {"dp": dp}, comm=world)
        expected = run(dp, 3)
    alone = world.split(world.rank)
    try:
        for comm, other in ((alone, 0), (alone, 3), (world, 2), (world, 3 - zero)):
            with trained(comm, other, 0, dtype) as resumed:
                fompi.load(folder, {"dp": resumed}, comm=comm)
                assert run(resumed, 3) == expected
    finally:
        alone.close()


def test_a_hugging_face_folder_is_read(world, folder):
    if world.rank == 0:
        header = json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
        data = np.arange(8, dtype=np.float32).tobytes()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    world.barrier()
    boxes = Boxes.over((4, 2), Shard(1), world.size)
    w = np.zeros(boxes.arrays[world.rank], np.float32)
    fompi.load(folder, {"w": (w, boxes)}, comm=world)
    assert w.reshape(-1).tolist() == [*range(world.rank, 8, 2)]


def test_the_command_line(world, folder, capsys):
    write(world, folder / "run")
    fompi.save(folder / "empty", {"x": np.ones(3), "y": np.ones((0, 3))}, comm=world)
    if world.rank:
        return
    assert main(["checkpoint", str(folder / "run"), "--arrays"]) == 0
    text = capsys.readouterr().out
    assert "step 4, 2 arrays of 684 B in 2 files of 2 ranks, 1 values" in text and "every byte is as" in text
    assert main(["reshard", str(folder / "empty"), str(folder / "one")]) == 0
    assert "2 arrays of 24 B in 1 files" in capsys.readouterr().out
    for more in ([], ["--files", "2"], ["--hf", "--files", "2"]):
        target = folder / "-".join(["to", *more])
        assert main(["reshard", str(folder / "run"), str(target), *more]) == 0
        assert main(["checkpoint", str(target)]) == 0
        found = open_checkpoint(target)
        assert found.step == (None if "--hf" in more else 4)
        assert np.array_equal(whole_array(found, "a.x"), X)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 684 and len({*index["weight_map"].values()}) == 2
    damaged_file = next((folder / "run").glob("*.safetensors"))
    damaged_file.write_bytes(damaged_file.read_bytes()[:-1])
    assert main(["checkpoint", str(folder / "run")]) == 1
    assert "not whole" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- files of torch


class TorchModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.up = torch.nn.LayerNorm(6), torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class OurModel(torch.nn.Module):
    """The same in parts."""

    def __init__(self, comm):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(6), nn.ColumnParallelLinear(6, 10, comm=comm)
        self.down = nn.RowParallelLinear(10, 6, bias=False, comm=comm)
        self.register_buffer("count", torch.tensor(0))


def of_fsdp():
    """A TorchModel by FSDP2, its optimizer, and what takes one step on a group of its own."""
    net = TorchModel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.up, net.down, net):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-1, foreach=False)

    def step():
        loss = net(torch.ones(2, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return net, optimizer, step


def full(state):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def test_programs_of_dcp_run_as_they_are(world, folder, group):
    """FSDP2, get_state_dict, dcp.save, and dcp.async_save while the training goes on; the next losses are the same."""
    net, optimizer, step = of_fsdp()
    step()
    beside = dist.new_group()
    for name, save in (("now", dcp.save), ("later", partial(dcp.async_save, process_group=beside))):
        model_state, optimizer_state = get_state_dict(net, optimizer)
        expected, first_moment = full(model_state), full(optimizer_state["state"]["up.weight"])["exp_avg"].clone()
        saved = save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        losses = [step(), step()]
        if name == "later":
            saved.result()
        other, its_optimizer, its_step = of_fsdp()
        parts = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
        dcp.load(parts, checkpoint_id=f"{folder}/{name}")
        options = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
        set_state_dict(other, its_optimizer, **options)
        assert [its_step(), its_step()] == losses
        ours, moment = OurModel(world), torch.zeros(10, 6)[world.rank :: world.size].clone()
        turns = tuple(tuple(Box((r, 0), (1, 6)) for r in range(rank, 10, world.size)) for rank in range(world.size))
        rows = Boxes((10, 6), turns, tuple((len(boxes), 6) for boxes in turns))
        wanted = {"state": {"up.weight": {"exp_avg": (moment, rows)}}}
        found = fompi.load(
            folder / name, {"model": ours, "optimizer": wanted, "optimizer.param_groups.0.lr": 0}, comm=world
        )
        for key, value in nn.full_state_dict(ours).items():
            assert torch.equal(value, expected[key]), key
        assert torch.equal(moment, first_moment[world.rank :: world.size])
        assert found["optimizer.param_groups.0.lr"] == 0.1
    dist.destroy_process_group(beside)


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_zero_goes_on_where_an_optimizer_of_torch_was(world, folder, make):
    """From a directory of dcp that one process has written."""

    def steps(net, call, step):
        losses = []
        for _ in range(3):
            loss = call(torch.ones(2, 6)).square().sum()
            loss.backward()
            step()
            net.zero_grad()
            losses.append(loss.item())
        return losses

    net = TorchModel()
    optimizer = make(net.parameters(), lr=1e-2)
    steps(net, net, optimizer.step)
    if world.rank == 0:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)
    world.barrier()
    expected = steps(net, net, optimizer.step)
    other, ours = TorchModel(), AdamW(1e-2) if make is torch.optim.AdamW else SGD(1e-2, 0.9)
    zero = fompi.torch.ZeroDataParallel(other, world, optimizer=ours, zero=2)
    state = {"model": other, "optimizer": zero.checkpoint_parts()["optimizer"]}
    fompi.load(folder, state, comm=world)
    np.testing.assert_allclose(steps(other, zero, zero.step), expected, rtol=1e-5)
    zero.close()


def test_directories_of_dcp_are_written(world, folder, group, capsys):
    """From a checkpoint of ours, in any number of files, for DTensors of any layout."""
    ours, half = OurModel(world), torch.arange(5.0).bfloat16()
    fompi.save(folder / "run", {"model": ours, "half": half, "epoch": 7, "lrs": [0.5, 1]}, step=1, comm=world)
    expected = nn.full_state_dict(ours)
    if world.rank == 0:
        assert main(["reshard", str(folder / "run"), str(folder / "dcp"), "--dcp", "--files", "2"]) == 0
        assert main(["checkpoint", str(folder / "dcp")]) == 0
        text = capsys.readouterr().out
        assert "7 arrays of 586 B in 2 files, 2 values" in text and "every byte is as" in text
        assert main(["reshard", str(folder / "dcp"), str(folder / "again")]) == 0
        assert np.array_equal(whole_array(open_checkpoint(folder / "again"), "model.up.bias"), expected["up.bias"])
    world.barrier()
    net, _, _ = of_fsdp()
    state = {"model": net.state_dict(), "half": torch.zeros_like(half), "epoch": 0, "lrs": [0, 0]}
    dcp.load(state, checkpoint_id=str(folder / "dcp"))
    assert torch.equal(state["half"], half) and state["epoch"] == 7 and state["lrs"] == [0.5, 1]
    for name, value in full(state["model"]).items():
        assert torch.equal(value, expected[name]), name


def test_files_of_torch_save(world, folder):
    """Views, transposed and tied tensors, parameters, and objects that are left out, and never called."""
    square, called = torch.arange(9.0).reshape(3, 3), folder / "called"
    state = {"model": TorchModel().state_dict(), "s": square, "t": square.t(), "v": torch.arange(10)[3:7], "e": [1, 2]}
    state |= {"p": torch.nn.Parameter(square + 1), "u": torch.ones(2, dtype=torch.uint16), "o": Touch(called)}
    if world.rank == 0:
        torch.save(state, folder / "x.pt")
        torch.save([1], folder / "old.pt", _use_new_zipfile_serialization=False)
    world.barrier()
    boxes = Boxes.over((3, 3), Shard(0), world.size)
    s, t = (np.zeros(boxes.arrays[world.rank], np.float32) for _ in range(2))
    ours, others = OurModel(world), {"v": np.zeros(4, int), "p": torch.zeros(3, 3), "u": np.zeros(2, np.uint16)}
    found = fompi.load(folder / "x.pt", {"model": ours, "s": (s, boxes), "t": (t, boxes), "e": 0, **others}, comm=world)
    a, b = boxes.of[world.rank][0].offset[0], boxes.of[world.rank][0].end[0]
    assert np.array_equal(s, square[a:b]) and np.array_equal(t, square.t()[a:b])
    assert found["e"] == [1, 2] and others["v"].tolist() == [3, 4, 5, 6] and others["u"].tolist() == [1, 1]
    assert torch.equal(others["p"], square + 1) and not called.exists()
    for name, value in nn.full_state_dict(ours).items():
        assert torch.equal(value, state["model"][name]), name
    with pytest.raises(LayoutError, match="lacks 1 names: o"):
        fompi.load(folder / "x.pt", {"o": 0}, comm=world)
    with pytest.raises(LayoutError, match=r"old\.pt is not as torch\.save writes it"):
        fompi.load(folder / "old.pt", {"e": 0}, comm=world)


def test_what_is_encoded_is_refused_by_name(world, folder):
    """Elements that a zip file has compressed, and tensors that an extension of dcp has encoded."""
    if world.rank == 0:
        torch.save({"x": torch.zeros(100)}, folder / "x.pt")
        with ZipFile(folder / "x.pt") as archive, ZipFile(folder / "small.pt", "w", ZIP_DEFLATED) as small:
            for record in archive.infolist():
                small.writestr(record.filename, archive.read(record))
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"x": torch.zeros(100)}, checkpoint_id=folder / "dcp", no_dist=True)
        metadata = pickle.loads((folder / "dcp/.metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, transform_descriptors=["stream.zstd"])
        (folder / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    world.barrier()
    for name, words in (("small.pt", r"small\.pt.* compressed"), ("dcp", r"'x' was encoded .*stream\.zstd.* use dcp")):
        with pytest.raises(LayoutError, match=words):
            fompi.load(folder / name, {"x": torch.zeros(100)}, comm=world)


class Touch:
    """An object whose pickle calls a function."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "how", ["cut short", "No such file", "are not those that were written", "is not as torch writes it"]
)
def test_broken_directories_of_torch(world, folder, how, capsys):
    if world.rank == 0:
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"x": torch.arange(50_000.0), "epoch": 1}, checkpoint_id=folder, no_dist=True)
        (file,) = folder.glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[100_000] ^= 1
        if how == "No such file":
            file.unlink()
        elif how == "is not as torch writes it":
            metadata = (folder / ".metadata").read_bytes()
            (folder / ".metadata").write_bytes(metadata[:-50])
        else:
            file.write_bytes(content if how == "are not those that were written" else content[:-1])
        assert main(["checkpoint", str(folder)]) > 0
        assert how in "".join(capsys.readouterr())
    world.barrier()
    x = torch.zeros(50_000)
    with pytest.raises(LayoutError, match=how):
        fompi.load(folder, {"x": x}, comm=world)
    assert not x.any()


def test_sums_of_torch_that_are_not_there_or_not_of_what_is_read(world, folder, capsys):
    torch.serialization.set_crc32_options(world.rank > 0)
    try:
        torch.save({"x": torch.arange(6.0), "v": torch.arange(100.0)[:90]}, folder / f"{world.rank}.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    world.barrier()
    assert main(["checkpoint", str(folder / f"{world.rank}.pt")]) == 0
    assert ("there are no sums" in capsys.readouterr().out) == (world.rank == 0)
    content = (folder / "1.pt").read_bytes()
    world.barrier()
    if world.rank == 0:  # 5.0 becomes another number
        (folder / "1.pt").write_bytes(content.replace(np.float32([4, 5]).tobytes(), np.float32([4, 7]).tobytes()))
    world.barrier()
    x, v, boxes = torch.zeros(6), torch.zeros(90), Boxes.over((6,), Shard(0), world.size)
    fompi.load(folder / "0.pt", {"x": x}, comm=world)
    assert x.tolist() == [*range(6)]
    with pytest.raises(LayoutError, match="are not those that were written"):
        fompi.load(folder / "1.pt", {"x": x}, comm=world)
    fompi.load(folder / "1.pt", {"x": (x[: boxes.arrays[world.rank][0]], boxes), "v": v}, comm=world)  # parts of sums
    assert v[4:6].tolist() == [4, 7]


def test_parts_of_one_tensor_in_several_files_of_the_hub(world, folder):
    """As torch's HuggingFaceStorageWriter writes them with save_distributed; without offsets a name is there once."""
    for number, offset in enumerate([0, 2]):
        facts = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [offset, 0]}})}
        header = {"__metadata__": facts, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
        words, data = json.dumps(header).encode(), np.arange(2 * offset, 2 * offset + 4, dtype=np.float32).tobytes()
        if world.rank == 0:
            (folder / f"shard-{number}.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + data)
    world.barrier()
    w = np.zeros((4, 2), np.float32)
    fompi.load(folder, {"w": w}, comm=world)
    assert w.reshape(-1).tolist() == [*range(8)]
    world.barrier()
    if world.rank == 0:
        shutil.copy(folder / "shard-0.safetensors", folder / "copy.safetensors")
    world.barrier()
    with pytest.raises(LayoutError, match=r"'w' is in copy.safetensors and in shard-0.safetensors"):
        fompi.load(folder, {"w": w}, comm=world)
