"""The order of a Work on a GPU: torch's streams are those of the software device, whose checker sees what is missing.

It stands in for a GPU: `torch.cuda` is a class with the same calls, and tensors are DeviceArrays.
"""

import threading

import numpy as np
import pytest
import torch

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.base.errors import RaceError
from fompi.torch import streams
from fompi.torch.work import Work


class Event:
    def __init__(self, event):
        self.event = event

    def query(self):
        return self.event.done()


class Stream:
    """`torch.cuda.Stream`, on a stream of the device."""

    def __init__(self, device, stream):
        self.device, self.stream = device, stream

    def record_event(self):
        return Event(self.stream.record(self.device.event()))

    def wait_event(self, event):
        self.stream.wait(event.event)


class Cuda:
    """`torch.cuda`, as far as `fompi.torch.streams` uses it. Each thread has a current stream."""

    def __init__(self, device):
        self.device, self.default = device, Stream(device, device.stream("default of torch"))
        self.local = threading.local()

    def current_stream(self, device=None):
        return getattr(self.local, "stream", self.default)

    def Stream(self, device):
        return Stream(self.device, self.device.stream("side"))

    def stream(self, stream):
        cuda = self

        class Using:
            def __enter__(self):
                self.before, cuda.local.stream = cuda.current_stream(), stream
                self.inner = cuda.device.using(stream.stream)
                self.inner.__enter__()

            def __exit__(self, *error):
                cuda.local.stream = self.before
                self.inner.__exit__(*error)

        return Using()


class Case:
    """y = all_reduce(x) on one rank, where x is written in the stream of the program; `finish` copies y to `out`."""

    def __init__(self, comm):
        device = self.device = SoftwareDevice(seed=1, delay=0.002)
        cuda = self.cuda = Cuda(device)
        self.program = Stream(device, device.stream("program"))
        self.out, x = device.empty((4,), np.float64), device.empty((4,), np.float64)
        three = device.array(np.full(4, 3.0))
        with cuda.stream(self.program):
            device.copy(self.out, three)(self.program.stream)  # what the program does before the call
            device.copy(x, three)(self.program.stream)
            self.kept = [three]
            pending = fompi.all_reduce.start(x, comm=comm)
            self.work = Work("all_reduce", comm, [pending], self.finish, self.out, streams.OnGpu("gpu", cuda))

    def finish(self, y):
        self.device.copy(self.out, y)(self.cuda.current_stream().stream)

    def end_in_another_thread(self):
        thread = threading.Thread(target=self.work.end)
        thread.start()
        thread.join()

    def read(self):
        """What the program reads in its stream."""
        with self.cuda.stream(self.program):
            result = self.device.empty((4,), np.float64)
            self.device.copy(result, self.out)(self.program.stream)
            self.kept.append(result)
            return result.get()


@pytest.fixture(scope="module")
def comm():
    return fompi.Communicator.of(None)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["helper", "caller"])
def test_what_follows_a_wait_finds_the_results(comm, elsewhere):
    case = Case(comm)
    if elsewhere:
        case.end_in_another_thread()
    with case.cuda.stream(case.program):
        assert case.work.wait()
    assert (case.read() == 3).all()
    assert case.work.is_completed() and case.device.reports == []


def test_without_a_wait_nothing_orders_them(comm):
    """The checker of the test above has teeth. And the memory of the call is kept until the device has ended it."""
    case = Case(comm)
    case.end_in_another_thread()
    assert any(case.out is each for _, kept in streams._KEPT for each in kept)
    with pytest.raises(RaceError):
        case.read()
    with case.cuda.stream(case.program):
        case.work.wait()
    case.read()
    again = Case(comm)
    again.end_in_another_thread()
    assert not any(case.out is each for _, kept in streams._KEPT for each in kept)
    again.work.wait()
    again.program.stream.wait(again.work._order._end.event)
    again.read()


def test_which_tensors_are_on_a_gpu():
    host = torch.ones(2)
    assert streams.order_of([[host]], None) is streams.HOST is streams.order_of(None, [])
    assert streams.order_of([[], [host]]).is_done()
    streams.drain(torch.device("cpu"))
