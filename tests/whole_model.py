"""A model in one process, and the same one of modules of `fompi.torch.nn` on the ranks of a communicator."""

import torch

import fompi
from fompi.torch import nn
from fompi.torch.nn import full_state_dict

TOKENS = torch.tensor([3, 10, 0, 4, 3, 7, 9])
TARGET = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)


class Attention(torch.nn.Module):
    """Causal attention of 3 query heads over 1 key/value head of 4 numbers."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(6, 12, bias=False), torch.nn.Linear(6, 4, bias=False)
        self.v_proj, self.o_proj = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(12, 6, bias=False)

    def forward(self, x):
        q = self.q_proj(x).view(-1, 3, 4).transpose(0, 1)
        k, v = (p(x).expand(3, -1, -1) for p in (self.k_proj, self.v_proj))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(0, 1).reshape(len(x), 12))


class Stack(torch.nn.Module):
    """The weights of several linear layers."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            weight = torch.empty(shape)
            for w in weight if len(shape) == 3 else [weight]:
                torch.nn.init.kaiming_uniform_(w, a=5**0.5)
            self.register_parameter(name, torch.nn.Parameter(weight))


class Experts(torch.nn.Module):
    """The 2 best of 5 experts, and a shared one."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(6, 5, bias=False)
        self.experts, self.shared = Stack(w1=(5, 4, 6), w2=(5, 6, 4)), Stack(w1=(3, 6), w2=(6, 3))

    def forward(self, x):
        silu = torch.nn.functional.silu
        weights, best = self.router(x).softmax(1).topk(2)
        hidden = silu(torch.einsum("th,efh->tef", x, self.experts.w1))
        every = torch.einsum("tef,enf->ten", hidden, self.experts.w2)
        chosen = every.gather(1, best[:, :, None].expand(-1, -1, 6))
        routed = (chosen * (weights / weights.sum(1, keepdim=True))[:, :, None]).sum(1)
        return routed + silu(x @ self.shared.w1.T) @ self.shared.w2.T


class Whole(torch.nn.Module):
    """The model in one process."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = torch.nn.Embedding(11, 6), Attention()
        self.mlp = torch.nn.ModuleList([torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)])
        self.glu = torch.nn.ModuleList([torch.nn.Linear(6, 14), torch.nn.Linear(7, 6, bias=False)])
        self.moe = Experts()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.mlp[1](torch.nn.functional.gelu(self.mlp[0](x)))
        gate, up = self.glu[0](x).chunk(2, -1)
        x = x + self.glu[1](torch.nn.functional.silu(gate) * up)
        return self.scale * (x + self.moe(x))


class Parts(torch.nn.Module):
    """The same model on the ranks of comm: each has its rows of x."""

    def __init__(self, comm, wire=None, shares=None, glu=None):
        super().__init__()
        how = {"comm": comm, "wire": wire, "shares": shares}
        self.embedding = nn.VocabParallelEmbedding(11, 6, **how)
        self.attention = nn.ParallelAttention(6, 3, 1, head_dim=4, causal=True, **how)
        up, down = nn.ColumnParallelLinear, nn.RowParallelLinear
        self.mlp = torch.nn.ModuleList([up(6, 10, activation="gelu", **how), down(10, 6, **how)])
        wide = how | {"shares": glu}
        self.glu = torch.nn.ModuleList([up(6, 14, activation="swiglu", **wide), down(7, 6, False, **wide)])
        self.moe = nn.MoE(6, 4, 5, 2, shared=3, **how)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.mlp[1](self.mlp[0](x))
        x = x + self.glu[1](self.glu[0](x))
        return self.scale * (x + self.moe(x))


def made(comm, seed=0, wire=None):
    """(the whole model, that of the ranks), of the same seed."""
    torch.manual_seed(seed)
    whole = Whole()
    torch.manual_seed(seed)
    return whole, Parts(comm, wire)


def rows(comm):
    """The rows of this rank."""
    return torch.tensor_split(torch.arange(7), comm.size)[comm.rank]


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


def close(actual, expected, within=1e-10):
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=within, atol=within), (actual - expected).abs().max()


def full_gradients(module):
    """The gradients of the unsharded model: a state dict of them."""
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
        found = full_state_dict(module)
        for name, parameter in module.named_parameters():
            parameter.copy_(kept[name])
    return found


def share_scale(parts, comm):
    """Sum the gradient of the parameter that is the user's own, and the same on all ranks."""
    fompi.sum_replicated([parts.scale.grad], comm, out=[parts.scale.grad])
