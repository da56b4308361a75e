"""Decoders as Hugging Face's transformers spreads them: prompts in halves, and `by_tp_plan`."""

import copy
import sys
import types

import pytest
import torch
import torch.distributed as dist

import fompi.torch
from fompi.torch import parallel, transformers

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[2])

STYLES, CACHES = "transformers.distributed.tensor_parallel", "transformers.cache_utils"


class DynamicLayer(list):
    """The keys of one layer: a tensor for each call."""


class DynamicCache:
    """The cache of transformers, as far as a decoder needs it."""

    def __init__(self, config=None):
        self.layers = [DynamicLayer() for _ in range(config.layers)]

    def get_seq_length(self):
        return sum(k.shape[1] for k in self.layers[0])


class Decoder:
    """Layers with one sum over the ranks each, in which a token sees those before it. An embedding with a sum, too."""

    base_model = property(lambda self: self)
    config = types.SimpleNamespace(layers=3)

    def __init__(self):
        self.lengths, self.fails = [], False

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=True, extra=None
    ):
        self.lengths.append(input_ids.shape[1])
        x = input_ids[..., None].repeat(1, 1, 2).double() / dist.get_world_size()
        dist.all_reduce(x)
        cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        before = cache.get_seq_length()
        for layer in cache.layers:
            layer.append(x)
            seen = torch.cat([*layer], 1)
            weights = torch.ones(x.shape[1], seen.shape[1], dtype=x.dtype).tril(before)
            if attention_mask is not None:
                assert attention_mask.shape[1] == seen.shape[1]
                weights = weights * attention_mask[:, None]
            y = (weights @ seen).sin() * (dist.get_rank() + 1)
            if self.fails and before and layer is cache.layers[1]:
                raise OSError("of the second half")
            dist.all_reduce(y)
            x = x + y
        return types.SimpleNamespace(last_hidden_state=x, past_key_values=cache if use_cache else None)


@pytest.fixture
def decoder(group, monkeypatch):
    """A decoder that transformers has spread between hosts, in `install()`."""
    styles, caches = types.ModuleType(STYLES), types.ModuleType(CACHES)
    caches.DynamicCache, caches.DynamicLayer = DynamicCache, DynamicLayer
    styles.apply_tensor_parallelism = lambda model, mesh, plan: model
    monkeypatch.setitem(sys.modules, STYLES, styles)
    monkeypatch.setitem(sys.modules, CACHES, caches)
    transformers.halve(styles, parallel.is_installed)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    assert not isinstance(styles.apply_tensor_parallelism(Decoder(), mesh, {}).forward, transformers.PromptInHalves)
    with fompi.torch.install():
        decoder = styles.apply_tensor_parallelism(Decoder(), mesh, {})
    decoder.forward.has_wire = True
    return decoder


def tokens(sequences=1, count=300):
    return torch.arange(sequences * count).view(sequences, count) % 17


@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_in_halves(decoder, masked):
    """The hidden states and the cache of one call; then tokens one by one, and a second prompt behind the first."""
    whole, ids = Decoder(), tokens(2, 301)
    more = {"attention_mask": (ids != 3).long()} if masked else {"position_ids": torch.arange(301)[None]}
    with torch.inference_mode():
        y = decoder.forward(input_ids=ids, past_key_values=DynamicCache(Decoder.config), **more)
        wanted = whole.forward(input_ids=ids, **more)
        torch.testing.assert_close(y.last_hidden_state, wanted.last_hidden_state)
        assert decoder.lengths == [150, 151]
        for part, all_of_it in zip(y.past_key_values.layers, wanted.past_key_values.layers, strict=True):
            torch.testing.assert_close(torch.cat([*part], 1), all_of_it[0])
        for ids in (tokens(2, 1), tokens(2, 200)):
            y = decoder.forward(input_ids=ids, past_key_values=y.past_key_values)
            wanted = whole.forward(input_ids=ids, past_key_values=wanted.past_key_values)
            torch.testing.assert_close(y.last_hidden_state, wanted.last_hidden_state)
        assert decoder.lengths[2:] == [1, 100, 100]


@pytest.mark.parametrize("why", ["few rows", "one host", "another argument", "another cache", "no cache", "training"])
def test_what_runs_whole(decoder, why):
    decoder.forward.has_wire, given = why != "one host", {"input_ids": tokens(1, 255 if why == "few rows" else 300)}
    if why != "no cache":
        given["past_key_values"] = DynamicCache(Decoder.config)
    if why == "another argument":
        given["extra"] = True
    if why == "another cache":
        given["past_key_values"] = type("SlidingCache", (DynamicCache,), {})(Decoder.config)
    with torch.inference_mode(why != "training"):
        decoder.forward(**given)
    assert len(decoder.lengths) == 1


def test_an_error_of_a_half_is_that_of_the_prompt(decoder):
    decoder.fails = True
    with torch.inference_mode():
        with pytest.raises(OSError, match="of the second half"):
            decoder.forward(input_ids=tokens(), past_key_values=DynamicCache(Decoder.config))
        decoder.fails = False
        decoder.forward(input_ids=tokens(), past_key_values=DynamicCache(Decoder.config))


def test_a_module_without_such_a_function_is_left(group):
    other = types.ModuleType(STYLES)
    transformers.halve(other, parallel.is_installed)
    assert not vars(other).get("apply_tensor_parallelism")


class Llama(torch.nn.Module):
    """Attention and an MLP as transformers writes them: heads by -1, so a rank may have any number of them."""

    def __init__(self, heads=8, kv_heads=8, head_dim=2, hidden=6, columns=11, vocabulary=13):
        super().__init__()
        names = {**dict.fromkeys(("q", "k", "v", "gate", "up"), "colwise"), "o": "rowwise", "down": "rowwise"}
        self.tp_plan = {f"layers.*.{name}_proj": style for name, style in names.items()}
        self.tp_plan["lm_head"] = "colwise_gather_output"
        self.head_dim, self.groups = head_dim, heads // kv_heads
        widths = {"q": heads, "k": kv_heads, "v": kv_heads}
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            for name, count in widths.items():
                layer.add_module(f"{name}_proj", torch.nn.Linear(hidden, count * head_dim, bias=False))
            layer.o_proj = torch.nn.Linear(heads * head_dim, hidden, bias=False)
            layer.gate_proj, layer.up_proj = (torch.nn.Linear(hidden, columns, bias=False) for _ in range(2))
            layer.down_proj = torch.nn.Linear(columns, hidden, bias=False)
        self.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        for layer in self.layers:
            shape = (*x.shape[:-1], -1, self.head_dim)
            q, k, v = (p(x).view(shape).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
            x = x + layer.down_proj(torch.nn.functional.silu(layer.gate_proj(x)) * layer.up_proj(x))
        return self.lm_head(x)


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_a_plan_by_shares(group, kv_heads):
    """8 key heads on 3 ranks, and a rank that has nothing: the numbers of one process."""
    size = dist.get_world_size()
    torch.manual_seed(6)
    whole, x = Llama(kv_heads=kv_heads), torch.randn(2, 5, 6)
    shares = {"heads": [6, 0, 2], "columns": [0, 7, 4]} if size == 3 else {"heads": [6, 2], "columns": [11, 0]}
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    dealt = fompi.torch.by_tp_plan(copy.deepcopy(whole), mesh, shares)
    assert dealt.layers[0].down_proj.weight.shape[1] == shares["columns"][dist.get_rank()]
    torch.testing.assert_close(dealt(x), whole(x))
    dealt(x).square().sum().backward()
    whole(x).square().sum().backward()
    torch.testing.assert_close(dealt.lm_head.weight.grad, whole.lm_head.weight.grad)
    full = fompi.torch.nn.full_state_dict(dealt)
    assert all(torch.equal(value, full[name]) for name, value in whole.state_dict().items())
