"""fompi.save and fompi.load: other numbers of ranks, ZeRO, parts of modules, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from boxes import held

import fompi
from fompi import Boxes, LayoutError, Replicate, ShapeError, Shard, StateError
from fompi.cli.reshard import whole_array
from fompi.parallel import checkpoints
from fompi.parallel.data import AdamW, DataParallel
from fompi.parallel.stored import open_checkpoint

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[2])

X = np.arange(7 * 12.0).reshape(7, 12)


@pytest.fixture
def folder(world, tmp_path):
    """A directory that all ranks share."""
    text = str(tmp_path).encode().ljust(400)
    return Path(fompi.broadcast(np.frombuffer(text, np.uint8), comm=world).tobytes().decode().strip())


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
    finally:
        alone.close()


def test_each_element_is_in_one_file_and_old_files_go(world, folder):
    write(world, folder)
    write(world, folder, step=5)
    world.barrier()
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    assert len(files) == 2 and nbytes < X.nbytes + 12 + 2 * 600
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) - min(sizes) < 400  # what both have is written by the one with less


def test_jax_and_torch_tensors(world, folder):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
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


def test_a_started_save_has_what_was_there(world, folder, monkeypatch):
    x = np.full((4, 2), float(world.rank))
    boxes = Boxes.over((4 * world.size, 2), Shard(0), world.size)
    saving = fompi.save.start(folder, {"x": (x, boxes)}, comm=world)
    x[...] = -5
    assert not (folder / "checkpoint.json").exists() or world.rank
    if world.rank == 0:  # a file that takes longer than an agreement may
        monkeypatch.setattr(saving._writer, "is_alive", iter([True, True, False, False]).__next__)
    saving.wait()
    fompi.load(folder, {"x": (x, boxes)}, comm=world)
    assert (x == world.rank).all()
    with pytest.raises(StateError, match="waited for"):
        saving.wait()


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
    if world.rank:
        return
    from fompi.cli.main import main

    assert main(["checkpoint", str(folder / "run"), "--arrays"]) == 0
    text = capsys.readouterr().out
    assert "step 4, 2 arrays of 684 B in 2 files of 2 ranks, 1 values" in text and "every byte is as" in text
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
