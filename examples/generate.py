"""Text from a language model whose weights are spread over all ranks.

    mpirun -n 2 python examples/generate.py path/to/model --prompt "Once upon a time"
    torchrun --nproc-per-node 2 examples/generate.py path/to/model --ids 1,5,7 --tokens 20

MODEL is a folder as the Hugging Face hub has it: config.json and *.safetensors of a Llama, Mistral, Qwen2 or Qwen3, and
tokenizer.json for --prompt (pip install tokenizers). Each rank reads the heads, the columns and the part of the
vocabulary that it keeps; they need not divide evenly. Every layer has two sums over the ranks.
A new token sums one row. The prompt is cut in two halves: the sum of one runs behind the products of the other.

    mpirun -hosts a,b,c -n 3 python examples/generate.py path/to/model --ids 1,5,7 --shares auto

Ranks need not be equally fast. `auto` measures them, and takes the best shares: of heads, columns and vocabulary, or of
layers. Then a rank has whole layers, each row goes from rank to rank, and the last one takes the token: an integer.
By hand: --shares heads=4,2,2/columns=50,30,20 or --shares layers=10,6,0; what is left out is dealt evenly.
--rebalance 16 looks every 16 tokens how long each rank has computed. If other shares would be faster, each rank reads
its new part, and the keys and values so far move.
"""

import argparse
import json
import math
import re
import sys
import time
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F

import fompi

FAMILIES = {"llama": {}, **{kind: {"sliding_window": 4096} for kind in ("mistral", "qwen2", "qwen3")}}
FAMILIES["qwen3"]["head_dim"] = 128
"""By model_type what holds where config.json does not say it."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj")

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

READ = {
    *SIZES, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias",
    "mlp_bias", "tie_word_embeddings",
}  # fmt: skip
"""The keys of config.json that are read."""

NO_EFFECT = re.compile(
    r"_(name_or_path|attn_\w+|flash_attn\w+|commit_hash|from_model_config)|(?!forced).*_token_id|.*dropout|.*pdrop|"
    r"architectures|(torch_)?dtype|id2label|initializer_range|label2id|is_(decoder|encoder_decoder|llama_config)|"
    r"max_(position_embeddings|sequence_length|length)|model_max_length|name_or_path|output_(attentions|hidden_states)|"
    r"pretraining_tp|return_dict|tokenizer_class|torchscript|transformers(_version|\.js_config)|unsloth.*|use_cache"
)
"""Those that change no token. The rest are refused, unless they are off: None, False, 0, empty. These are off at 1, and
at True:"""
FACTOR = re.compile(r".*(scal(e|ing)|multiplier|factor)|(repetition|length)_penalty|temperature|top_p|num_beam.*")
USUAL = re.compile(r"(is_)?causal|use_rope")


class Refused(Exception):
    """What is said in one line."""


def config_of(path):
    """What config.json says. Raises Refused for a key that may change the tokens and is not read."""
    config = json.loads(path.read_bytes())
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise Refused(f"model_type={kind!r} is none of {', '.join(FAMILIES)}")
    for key, value in config.items():
        is_off = value is True if USUAL.fullmatch(key) else not value
        if FACTOR.fullmatch(key):
            is_off = value is False or (value == 1 and value is not True)
        if not (value is None or is_off or key in READ or NO_EFFECT.fullmatch(key)):
            raise Refused(f"{key}={value!r} is not known here, and may change the tokens")
    config = FAMILIES[kind] | config
    heads = config["num_attention_heads"]
    kv_heads = (config.get("num_key_value_heads") or heads) if kind == "llama" else config["num_key_value_heads"]
    config["num_key_value_heads"] = kv_heads
    config["head_dim"] = head = config.get("head_dim") or config["hidden_size"] // heads
    for key in (*SIZES, "num_key_value_heads", "head_dim"):
        if type(config[key]) is not int or config[key] < 1:
            raise Refused(f"{key}={config[key]!r} must be an integer >= 1")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        if type(config.setdefault(key)) not in (bool, type(None)):
            raise Refused(f"{key}={config[key]!r} must be true or false")
    number("rms_norm_eps", config.setdefault("rms_norm_eps", 1e-6), is_zero_right=True)
    if heads % kv_heads or head % 2:
        raise Refused("num_key_value_heads must divide num_attention_heads, and head_dim must be even")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise Refused(f"hidden_act={config['hidden_act']!r} is not known here: it must be silu")
    config["turns"], config["windows"] = turns_of(config), windows_of(config)
    config["biases"] = set(PROJECTIONS if kind == "qwen2" else ())
    if config["attention_bias"]:
        config["biases"] |= {*PROJECTIONS, "o_proj"}
    if config["mlp_bias"]:
        config["biases"] |= {"gate_proj", "up_proj", "down_proj"}
    return config


def number(name, value, is_zero_right=False):
    """`value`, if it is a number above 0, or 0 where that is right. Raises Refused for all else."""
    if type(value) not in (int, float) or not (0 < value < math.inf or (is_zero_right and value == 0)):
        raise Refused(f"{name}={value!r} must be a number {'>=' if is_zero_right else 'above'} 0")
    return value


def turns_of(config):
    """How far each pair of a head turns for each token: rotary embedding as it is, linear, or that of Llama 3."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    old, kind = rope.pop("type", None), rope.pop("rope_type", None)
    kind, theta = kind or old or "default", rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    known = {"default": (), "linear": ("factor",)}
    known["llama3"] = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind not in known:
        raise Refused(f"rope_scaling (rope_parameters) of the type {kind!r} is not known here: {', '.join(known)} are")
    for key, value in rope.items():
        if value and key not in known[kind] and (key, value) != ("partial_rotary_factor", 1):
            raise Refused(f"rope_scaling (rope_parameters) has {key}={value!r}, which is not known here")
    factor, *bounds = [number(key, rope[key]) for key in known[kind]] or [1.0]
    turns = number("rope_theta", theta) ** (-torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    if kind != "llama3":
        return turns / factor
    low, high, length = bounds
    if low >= high:
        raise Refused(f"rope_scaling (rope_parameters): low_freq_factor={low} must be below high_freq_factor={high}")
    # pairs with few rounds in `length` tokens are slowed down, those with many are not
    kept = ((length * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / factor)


def windows_of(config):
    """For each layer how many tokens a token sees, with itself. None: all before it."""
    kind, count, window = config["model_type"], config["num_hidden_layers"], config.get("sliding_window")
    if kind[:4] == "qwen":
        window = window if config["use_sliding_window"] else None
    elif (kind == "llama" and window) or config["use_sliding_window"]:
        name = "sliding_window" if kind == "llama" and window else "use_sliding_window"
        raise Refused(f"{name}={config[name]!r} is not known for a {kind}")
    first = config.get("max_window_layers", 28) if kind[:4] == "qwen" else 0
    for name, value, least in (("sliding_window", window, 1), ("max_window_layers", first, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise Refused(f"{name}={value!r} must be an integer >= {least}")
    usual = [window if first is not None and n >= first else None for n in range(count)]
    kinds = config.get("layer_types")
    if kinds is None:
        return usual
    known = {"full_attention": None, **({} if window is None else {"sliding_attention": window})}
    if type(kinds) is not list or len(kinds) != count or not {*map(str, kinds)} <= {*known}:
        raise Refused(f"layer_types={kinds!r} are not known here: {count} of {', '.join(known)} are")
    given = [known[each] for each in kinds]
    if kind[:4] != "qwen" and given != usual:
        raise Refused(f"layer_types={kinds!r} are not known for a {kind}")
    return given


class Files:
    """The tensors of all *.safetensors of a folder, read as fompi.load reads them."""

    def __init__(self, folder):
        self.found, self.memory = fompi.open_checkpoint(folder), {}

    def __contains__(self, name):
        return name in self.found.arrays

    def read(self, name, dtype, shape, rows=slice(None), columns=slice(None)):
        """Some rows or columns of a tensor of this shape. The others are not read from the disk, or not kept."""
        if name not in self:
            raise Refused(f"the files have no {name}")
        stored = self.found.arrays[name]
        kinds = {str(kind)[6:]: kind for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
        if stored.dtype not in kinds or stored.shape != (*shape,):
            raise Refused(f"{name} is {stored.dtype} {[*stored.shape]}, not {[*shape]} of {', '.join(kinds)}")
        if len(stored.parts) > 1:
            raise Refused(f"{name} is in {len(stored.parts)} parts: make it whole with fompi reshard FROM TO")
        part = stored.parts[0]
        memory = self.memory[part.file] = self.memory.get(part.file) or self.found.mapped(part.file, [])
        kind, count = kinds[stored.dtype], math.prod(shape)
        whole = torch.frombuffer(memory, dtype=kind, offset=part.begin, count=count).view(shape)
        return whole[rows].to(dtype, copy=True) if len(shape) == 1 else whole[rows, columns].to(dtype, copy=True)


DEALT = {
    "heads": "num_attention_heads", "columns": "intermediate_size", "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
}  # fmt: skip
"""What ranks have shares of."""

GAIN = 1.1
"""Other shares must be faster by this factor."""


def shares_of(text, config, length, comm, dtype):
    """What --shares says: the counts of each rank by kind. Raises Refused."""
    if text == "auto":
        names = ("num_hidden_layers", "hidden_size", "intermediate_size")
        balance, models = fompi.balance, fompi.planner.layers
        sizes = models.Transformer(
            *(config[name] for name in names), 3, length, "config.json", config["num_attention_heads"],
            config["num_key_value_heads"], config["vocab_size"], tied=bool(config["tie_word_embeddings"]),
        )  # fmt: skip
        found = balance(comm, sizes, task="decode", dtype=dtype)
        if comm.rank == 0:
            print(f"shares: {found.verdict}; {found.best.units}")
        if len(found.best.ranks) == 1:  # without messages
            return {"layers": [config["num_hidden_layers"] * (rank in found.best.ranks) for rank in range(comm.size)]}
        return found.best.units
    given = dict(part.partition("=")[::2] for part in text.split("/")) if text else {}
    if not all(
        kind in DEALT and re.fullmatch(r"\d{1,9}(,\d{1,9})*", counts, re.ASCII) for kind, counts in given.items()
    ):
        raise Refused(
            f"--shares {text!r}: give auto, or for example heads=4,2,2/columns=50,30,20, of {', '.join(DEALT)}"
        )
    return {kind: [int(n) for n in counts.split(",")] for kind, counts in given.items()}


def run_of(counts, rank):
    """The part of a rank, if the ranks have so many things."""
    ends = [0, *accumulate(counts)]
    return slice(ends[rank], ends[rank + 1])


def kv_of_rank(config, heads, rank):
    """For each head of q of a rank the head of k and v that it reads, and the run of these that the rank has."""
    count, kv_count = config["num_attention_heads"], config["num_key_value_heads"]
    reads = [h * kv_count // count for h in range(count)][run_of(heads, rank)]
    return reads, slice(reads[0], reads[-1] + 1) if reads else slice(0, 0)


class Model:
    """A decoder. All methods are called by all ranks together."""

    def __init__(self, config, files, comm, dtype, most_tokens, shares):
        heads, kv_heads, hidden = (
            config[f"{n}"] for n in ("num_attention_heads", "num_key_value_heads", "hidden_size")
        )
        inner_size, self.comm, self.head = config["intermediate_size"], comm, config["head_dim"]
        self.eps, self.layers = config.get("rms_norm_eps", 1e-6), []
        self.made_of, self.busy = (config, files, comm, dtype, most_tokens), dict.fromkeys(DEALT, 0.0)
        dealt = fompi.parallel.shares.dealt
        self.counts = {kind: dealt(shares.get(kind), kind, config[key], comm.size) for kind, key in DEALT.items()}
        self.ring = [rank for rank, count in enumerate(self.counts["layers"]) if count] if "layers" in shares else []
        if self.ring:  # a rank has all of its layers
            self.counts |= {kind: (config[DEALT[kind]],) * comm.size for kind in ("heads", "columns", "vocabulary")}
        place = 0 if self.ring else comm.rank
        mine, inner, self.tokens = (run_of(self.counts[kind], place) for kind in ("heads", "columns", "vocabulary"))
        kv_of, kv = kv_of_rank(config, self.counts["heads"], place)  # several heads of q share one of k and v
        self.kv_of = torch.tensor(kv_of, dtype=torch.int64) - kv.start
        q_rows, kv_rows = (slice(s.start * self.head, s.stop * self.head) for s in (mine, kv))
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows, "gate_proj": inner, "up_proj": inner}
        columns = {"o_proj": q_rows, "down_proj": inner}
        wide, narrow = heads * self.head, kv_heads * self.head
        shapes = {"q_proj": (wide, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden)}
        shapes |= {"o_proj": (hidden, wide), "down_proj": (hidden, inner_size)}
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (inner_size, hidden))
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": self.head, "self_attn.k_norm": self.head}
        every = range(config["num_hidden_layers"])
        for n in every[run_of(self.counts["layers"], comm.rank)] if self.ring else every:
            layer = {"window": config["windows"][n]}
            for name, width in norms.items():
                layer[name.split(".")[-1]] = files.read(f"model.layers.{n}.{name}.weight", dtype, (width,))
            for name, shape in shapes.items():
                at = f"model.layers.{n}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
                part = {"columns": columns[name]} if name in columns else {"rows": rows[name]}
                layer[name] = files.read(f"{at}.weight", dtype, shape, **part)
                if (f"{at}.bias" in files) != (name in config["biases"]):
                    raise Refused(f"attention_bias, mlp_bias or model_type do not fit: {at}.bias")
                if name in rows or self.ring or comm.rank == 0:  # what is summed over the ranks has its bias once
                    bias = name in config["biases"]
                    layer[f"{name}.bias"] = (
                        files.read(f"{at}.bias", dtype, shape[:1], rows.get(name, slice(None))) if bias else None
                    )
            layer["k"], layer["v"] = (
                torch.empty(kv.stop - kv.start, most_tokens, self.head, dtype=dtype) for _ in "kv"
            )
            self.layers.append(layer)
        table, none = (config["vocab_size"], hidden), slice(0, 0)
        first, last = (none if self.ring and comm.rank != self.ring[end] else self.tokens for end in (0, -1))
        is_tied = bool(config.get("tie_word_embeddings"))
        self.embedding = files.read("model.embed_tokens.weight", dtype, table, first)
        has_own = not is_tied or "lm_head.weight" in files
        self.output = files.read("lm_head.weight" if has_own else "model.embed_tokens.weight", dtype, table, last)
        if is_tied and first == last and not torch.equal(self.output, self.embedding):
            raise Refused("tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight")
        self.norm = files.read("model.norm.weight", dtype, (hidden,))
        turns = torch.outer(torch.arange(most_tokens), config["turns"]).repeat(1, 2)
        self.cos, self.sin = turns.cos().to(dtype), turns.sin().to(dtype)

    def normed(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def rotated(self, x, at):
        """Rotary embedding of (tokens, heads, head), from the position `at` on."""
        cos, sin = self.cos[at : at + len(x), None], self.sin[at : at + len(x), None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attention(self, layer, x, at):
        """The term of this rank of the attention of tokens from the position `at` on."""
        x = self.normed(x, layer["input_layernorm"])
        q, k, v = (F.linear(x, layer[n], layer.get(f"{n}.bias")).unflatten(-1, (-1, self.head)) for n in PROJECTIONS)
        if "q_norm" in layer:
            q, k = self.normed(q, layer["q_norm"]), self.normed(k, layer["k_norm"])
        until = at + len(x)
        layer["k"][:, at:until], layer["v"][:, at:until] = self.rotated(k, at).transpose(0, 1), v.transpose(0, 1)
        k, v = (layer[n][self.kv_of, :until] for n in "kv")
        sees = torch.ones(len(x), until, dtype=torch.bool).tril(at)
        if layer["window"] is not None:
            sees = sees.triu(at - layer["window"] + 1)
        y = F.scaled_dot_product_attention(self.rotated(q, at).transpose(0, 1), k, v, attn_mask=sees)
        return F.linear(y.transpose(0, 1).flatten(1), layer["o_proj"], layer.get("o_proj.bias"))

    def mlp(self, layer, x, at):
        x = self.normed(x, layer["post_attention_layernorm"])
        gate, up = (F.linear(x, layer[n], layer.get(f"{n}.bias")) for n in ("gate_proj", "up_proj"))
        return F.linear(F.silu(gate) * up, layer["down_proj"], layer.get("down_proj.bias"))

    def embedded(self, ids):
        mine = (ids >= self.tokens.start) & (ids < self.tokens.stop)
        x = torch.zeros(len(ids), self.embedding.shape[1], dtype=self.embedding.dtype)
        x[mine] = self.embedding[ids[mine] - self.tokens.start]
        return fompi.all_reduce(x, comm=self.comm)

    def term(self, kind, of, layer, x, at):
        """What this rank adds to the rows, and how long it takes."""
        begun = time.perf_counter()
        y = of(layer, x, at)
        self.busy[kind] += time.perf_counter() - begun
        return y

    def from_rank_to_rank(self, ids, at):
        """The last row behind all layers, on the last rank with layers. Half of a prompt follows the other half."""
        me, last = self.comm.rank, None
        place = self.ring.index(me) if me in self.ring else None
        for part in ids.chunk(2 if len(ids) > 1 else 1) if place is not None else ():
            x = self.embedding[part] if place == 0 else None
            if x is None:
                x = fompi.recv(self.ring[place - 1], like=self.norm, comm=self.comm)
            for layer in self.layers:
                x = x + self.term("heads", self.attention, layer, x, at)
                x = x + self.term("columns", self.mlp, layer, x, at)
            if me != self.ring[-1]:
                fompi.send(x, self.ring[place + 1], comm=self.comm)
            at, last = at + len(part), x
        return last if last is not None and me == self.ring[-1] else self.norm[None]

    def logits(self, ids, at):
        """The logits behind the last of these tokens, for the part of the vocabulary of this rank."""
        if self.ring:
            return self.scores(self.norm, self.from_rank_to_rank(ids, at)[-1:], at)[0].double()
        parts = list(self.embedded(ids).chunk(2 if len(ids) > 1 else 1))
        starts = [at, at + len(parts[0])]
        sums = [None] * len(parts)
        for layer in self.layers:
            for kind, term in (("heads", self.attention), ("columns", self.mlp)):
                for i, start in zip(range(len(parts)), starts, strict=False):
                    if sums[i] is not None:
                        parts[i] = parts[i] + sums[i].wait()
                    y = self.term(kind, term, layer, parts[i], start)
                    if len(parts) == 1:
                        parts[i] = parts[i] + fompi.all_reduce(y, comm=self.comm)
                    else:  # while it is summed, the products of the other half run
                        sums[i] = fompi.all_reduce.start(y, comm=self.comm)
        last = parts[-1] if sums[-1] is None else parts[-1] + sums[-1].wait()
        if len(parts) > 1:
            sums[0].wait()
        return self.term("vocabulary", self.scores, self.norm, last[-1:], at)[0].double()

    def scores(self, norm, x, at):
        return F.linear(self.normed(x, norm), self.output)

    def rebalanced(self):
        """The model with the shares that fit how long each rank has computed; this one, if they are not much faster."""
        of, counts, config = fompi.planner.shares, self.counts, self.made_of[0]
        kinds = "heads", "columns", "vocabulary"
        seconds = fompi.all_gather(torch.tensor([[self.busy[kind] for kind in kinds]]), comm=self.comm).tolist()
        self.busy, shares, now, then = dict.fromkeys(DEALT, 0.0), {}, 0.0, 0.0
        for i, kind in enumerate(kinds):
            busy, unit = [of_rank[i] for of_rank in seconds], 1
            if kind == "heads":  # whole groups of heads that share one of k and v
                unit = config["num_attention_heads"] // config["num_key_value_heads"]
            slow = [t / max(1, n) for t, n in zip(busy, counts[kind], strict=True)]
            phase = of.Phase((kind,), (sum(counts[kind]) // unit,), tuple(((0.0, (s * unit,)),) for s in slow), (0.0,))
            # of a rank without units nothing is known
            found = of.deal(phase, [rank for rank, n in enumerate(counts[kind]) if n])
            shares[kind] = [n * unit for (n,) in found]
            now, then = now + max(busy), then + phase.slowest(found)
        if self.ring or now < GAIN * then:
            return self
        made = Model(*self.made_of, shares)
        for old, new in zip(self.layers, made.layers, strict=True):
            for name in "kv":  # the heads of all ranks, some of which several ranks have
                held, first = fompi.all_gather(old[name], comm=self.comm), 0
                whole = torch.empty(config["num_key_value_heads"], *held.shape[1:], dtype=held.dtype)
                for rank in range(self.comm.size):
                    kv = kv_of_rank(config, counts["heads"], rank)[1]
                    whole[kv], first = held[first : first + kv.stop - kv.start], first + kv.stop - kv.start
                new[name].copy_(whole[kv_of_rank(config, made.counts["heads"], self.comm.rank)[1]])
        if self.comm.rank == 0:
            print(f"other shares: {now / then:.2f} times as fast; {shares}")
        return made

    def next_token(self, ids, at, temperature, generator):
        """The most likely token, or a sample: the largest of the logits with Gumbel noise, the same on any ranks."""
        logits = self.logits(ids, at)
        if temperature:
            vocabulary = self.made_of[0]["vocab_size"]
            noise = -torch.log(-torch.log(torch.rand(vocabulary, generator=generator, dtype=torch.float64)))
            scale = max(temperature, 1.0)  # so that no logit becomes infinite
            logits = logits / scale + temperature / scale * noise[self.tokens][: len(logits)]
        best = torch.tensor([[-torch.inf, 0.0]], dtype=torch.float64)
        if len(logits):
            value, index = logits.max(0)
            best = torch.stack([value, self.tokens.start + index.double()])[None]
        if self.ring:
            found = fompi.broadcast(best, root=self.ring[-1], comm=self.comm)
        else:
            found = fompi.all_gather(best, comm=self.comm)
        if not found[:, 0].max().isfinite():
            why = "a logit is not finite: the weights are not, or --dtype is too small for them"
            raise Refused(why if self.comm.rank == 0 else "")
        return int(found[found[:, 0].argmax(), 1])


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def arguments():
    """The options, the tokens of the prompt, and the tokenizer (None without --prompt). Raises Refused."""
    parser = Parser(description="Generate text with a model that is spread over all ranks.")
    parser.add_argument("model", type=Path, help="a folder with config.json and *.safetensors")
    parser.add_argument("--prompt", help="a text (needs tokenizer.json and the package tokenizers)")
    parser.add_argument("--ids", help="the tokens of the prompt, for example 1,2,3")
    parser.add_argument("--tokens", type=int, default=32, help="how many tokens to generate (32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--shares", help="of unequal ranks: auto, or such as heads=4,2,2/columns=50,30,20")
    parser.add_argument("--rebalance", type=int, metavar="N", help="look at the shares every N tokens")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    options, tokenizer = parser.parse_args(), None
    if options.rebalance is not None and options.rebalance < 1:
        raise Refused("--rebalance must be 1 or more")
    if not (options.tokens >= 1 and 0 <= options.temperature < math.inf and 0 <= options.seed < 1 << 63):
        raise Refused("--tokens must be 1 or more, --temperature and --seed 0 or more")
    if (options.prompt is None) == (options.ids is None):
        raise Refused("give --prompt or --ids")
    if options.prompt is None:
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", options.ids, re.ASCII):
            raise Refused(f"--ids {options.ids!r}: give the numbers of tokens, for example 1,2,3")
        return options, [int(word) for word in options.ids.split(",")], None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    except ImportError:
        raise Refused("--prompt needs a package: pip install tokenizers, or give --ids") from None
    except Exception as error:  # of Rust
        raise Refused(f"{options.model / 'tokenizer.json'}: {error}") from None
    return options, tokenizer.encode(options.prompt).ids, tokenizer


def config_and_ids():
    """The options, the tokens of the prompt, the tokenizer, and what config.json says. Raises Refused."""
    options, ids, tokenizer = arguments()
    path = options.model / "config.json"
    with one_line(path):
        config = config_of(path)
        if not ids or max(ids) >= config["vocab_size"]:
            raise Refused(f"tokens are from 0 to {config['vocab_size'] - 1}, and one at least, not {ids[:20]}")
    return options, ids, tokenizer, config


@contextmanager
def one_line(path):
    """Errors of reading are Refused."""
    try:
        yield
    except KeyError as error:
        raise Refused(f"{path}: {error} is missing or not known") from None
    except (
        Refused,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refused(f"{path}: {why.splitlines()[0]}") from None


def made(comm, options, config, length, shares):
    """The model with these shares. Raises Refused."""
    with one_line(options.model):
        return Model(config, Files(options.model), comm, getattr(torch, options.dtype), length, shares)


def together(comm, make, *given):
    """make(*given) on all ranks, or Refused on all. The first rank with an error has its words."""
    found, why = None, ""
    try:
        found = make(*given)
    except Refused as error:
        why = str(error)
    failed = fompi.all_gather(torch.tensor([bool(why)]), comm=comm).nonzero()
    if len(failed):
        raise Refused(why if comm.rank == failed[0] else "")
    return found


def write_text(comm, options, ids, tokenizer, model):
    how = options.temperature, torch.Generator().manual_seed(options.seed)
    begun, made = time.perf_counter(), [model.next_token(torch.tensor(ids), 0, *how)]
    first = time.perf_counter()
    for at in range(len(ids), len(ids) + options.tokens - 1):
        if options.rebalance and len(made) % options.rebalance == 0:
            model = model.rebalanced()
        if comm.rank == 0 and tokenizer is not None:
            print(tokenizer.decode(made[-1:]), end=" ", flush=True)
        made.append(model.next_token(torch.tensor(made[-1:]), at, *how))
    ended = time.perf_counter()
    if comm.rank == 0:
        print(tokenizer.decode(made) if tokenizer else f"tokens: {','.join(map(str, made))}")
        decode = max(1, len(made) - 1) / max(ended - first, 1e-9)
        print(f"prefill: {len(ids) / (first - begun):.0f} tokens/s, decode: {decode:.1f} tokens/s, {comm.size} ranks")


def main():
    with torch.inference_mode(), fompi.Communicator() as comm:
        try:
            options, ids, tokenizer, config = together(comm, config_and_ids)
            length = len(ids) + options.tokens
            shares = together(comm, shares_of, options.shares, config, length, comm, options.dtype)
            model = together(comm, made, comm, options, config, length, shares)
            if options.shares:
                counts = torch.tensor([[n for each in model.counts.values() for n in each]])
                if (fompi.all_gather(counts, comm=comm) != counts).any():
                    raise Refused("--shares is not the same on all ranks" if comm.rank == 0 else "")
            write_text(comm, options, ids, tokenizer, model)
        except Refused as error:  # on all ranks
            if str(error):
                print(f"generate.py: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
