"""The model runner of vLLM on CPUs with the plug-in: batches in halves."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fompi.torch import groups, vllm

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[2])


@dataclass
class Context:
    """The forward context of vLLM, as far as a model reads it."""

    attn_metadata: object
    slot_mapping: object
    ubatch_slices: object = None
    is_padding: object = None


class ModelRunner:
    """A model with two sums, in which each token sees those that stand before it in a cache."""

    def __init__(self, config):
        self.parallel_config, self.lengths = config.parallel_config, []
        self.input_batch = SimpleNamespace(num_reqs=1)

    def _allow_microbatching(self, num_reqs, counts):
        return True

    def _determine_batch_execution_and_padding(self, num_tokens, allow_microbatching=True):
        return "eager", num_tokens, False, None, None

    def _model_forward(self, input_ids, positions, inputs_embeds=None):
        self.lengths.append(len(input_ids))
        x = input_ids.double()
        for layer in ("first", "second"):
            context = sys.modules["vllm.forward_context"].get_forward_context()
            assert context.attn_metadata[layer] == f"{layer} of {len(input_ids)}"
            self.cache[layer][context.slot_mapping[layer]] = x
            x = torch.stack([self.cache[layer][: at + 1].sum().sin() for at in positions])
            dist.all_reduce(x)
        return x[:, None]

    def execute(self, ids):
        """What execute_model does: it cuts the batch as it is told, and sets the context of the forward."""
        contexts, count = sys.modules["vllm.forward_context"], len(ids)
        self.cache = {layer: torch.zeros(count, dtype=torch.float64) for layer in ("first", "second")}
        _, _, is_cut, *_ = self._determine_batch_execution_and_padding(count, allow_microbatching=True)
        ends = [(0, count // 2), (count // 2, count)] if is_cut else [(0, count)]
        metadata = [{layer: f"{layer} of {end - begin}" for layer in self.cache} for begin, end in ends]
        slots = [dict.fromkeys(self.cache, torch.arange(begin, end)) for begin, end in ends]
        cut = [SimpleNamespace(token_slice=slice(*each)) for each in ends]
        context = Context(metadata, slots, cut) if is_cut else Context(metadata[0], slots[0])
        with contexts.override_forward_context(context):
            return self._model_forward(input_ids=ids, positions=torch.arange(count), inputs_embeds=None)


@pytest.fixture
def made(group, monkeypatch):
    """A function: the configuration -> a model runner of the plug-in, between hosts."""
    contexts = ModuleType("vllm.forward_context")
    contexts.now = None
    contexts.get_forward_context = lambda: contexts.now

    @contextmanager
    def override_forward_context(context):
        before, contexts.now = contexts.now, context
        yield
        contexts.now = before

    contexts.override_forward_context = override_forward_context
    distributed = ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: SimpleNamespace(device_group=group)
    for module in (ModuleType("vllm"), contexts, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(groups.communicator(group), "network", True)
    runners = SimpleNamespace(CPUModelRunner=ModelRunner)
    vllm.halve(runners)
    return runners.CPUModelRunner


class Ranks(SimpleNamespace):
    use_ubatching = property(lambda self: self.ubatch_size > 1)


def configuration(tensor_parallel_size=2, **more):
    ranks = Ranks(world_size=2, tensor_parallel_size=tensor_parallel_size, data_parallel_size=1, ubatch_size=0)
    model = SimpleNamespace(runner_type="generate", **dict.fromkeys((*vllm.OFF[3:], "is_encoder_decoder"), False))
    return SimpleNamespace(parallel_config=ranks, model_config=model, **{**dict.fromkeys(vllm.OFF[:3]), **more})


def test_a_prompt_in_halves(made):
    halved, whole = made(configuration()), ModelRunner(configuration())
    with torch.inference_mode():
        for count in (301, 1, 255):
            ids = torch.arange(count) % 13
            torch.testing.assert_close(halved.execute(ids), whole.execute(ids))
    assert halved.lengths == [150, 151, 1, 255]


def test_what_runs_whole(made):
    assert not made(configuration(lora_config="some")).parallel_config.use_ubatching
    assert not made(configuration(tensor_parallel_size=1)).parallel_config.use_ubatching
    warming = made(configuration())
    warming.input_batch.num_reqs = 0
    warming.execute(torch.arange(300))
    assert warming.lengths == [300]
    old = SimpleNamespace(CPUModelRunner=SimpleNamespace)
    vllm.halve(old)
    assert old.CPUModelRunner is SimpleNamespace
