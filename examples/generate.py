"""Text from a language model whose weights are spread over all ranks.

    mpirun -n 2 python examples/generate.py path/to/model --prompt "Once upon a time"
    torchrun --nproc-per-node 2 examples/generate.py path/to/model --ids 1,5,7 --tokens 20

MODEL is a folder as the Hugging Face hub has it: config.json and *.safetensors of a Llama, Mistral, Qwen2 or Qwen3, and
tokenizer.json for --prompt (pip install tokenizers). Each rank reads the heads, the columns and the part of the
vocabulary that it keeps; they need not divide evenly. Every layer has two sums over the ranks.
A new token sums one row. The prompt is cut in two halves: the sum of one runs behind the products of the other.
"""

import argparse
import json
import mmap
import time
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F

import fompi


class Files:
    """The tensors of all *.safetensors of a folder: 8 bytes, a header of JSON, and the elements."""

    def __init__(self, folder):
        self.places = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            size = int.from_bytes(memory[:8], "little")
            for name, entry in json.loads(memory[8 : 8 + size]).items():
                if name != "__metadata__":
                    self.places[name] = memory, 8 + size + entry["data_offsets"][0], entry

    def __contains__(self, name):
        return name in self.places

    def read(self, name, dtype, rows=slice(None), columns=slice(None)):
        """Some rows or columns of a tensor. The others are not read from the disk, or not kept."""
        memory, offset, entry = self.places[name]
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[
            entry["dtype"]
        ]
        shape = entry["shape"]
        whole = torch.frombuffer(memory, dtype=kind, offset=offset, count=torch.Size(shape).numel()).view(shape)
        return whole[rows].to(dtype, copy=True) if len(shape) == 1 else whole[rows, columns].to(dtype, copy=True)


def dealt(count, rank, size):
    """The part of `count` things that a rank has."""
    ends = [0, *accumulate(count // size + (r < count % size) for r in range(size))]
    return slice(ends[rank], ends[rank + 1])


class Model:
    """A decoder. All methods are called by all ranks together."""

    def __init__(self, folder, comm, dtype, most_tokens):
        config, files = json.loads((folder / "config.json").read_text()), Files(folder)
        heads, kv_heads = (
            config["num_attention_heads"],
            config.get("num_key_value_heads") or config["num_attention_heads"],
        )
        self.comm, self.head = comm, config.get("head_dim") or config["hidden_size"] // heads
        self.eps, self.layers = config["rms_norm_eps"], []
        self.tokens = dealt(config["vocab_size"], comm.rank, comm.size)
        mine, inner = dealt(heads, comm.rank, comm.size), dealt(config["intermediate_size"], comm.rank, comm.size)
        kv_of = [h * kv_heads // heads for h in range(heads)][mine]  # several heads of q share one of k and v
        kv = slice(kv_of[0], kv_of[-1] + 1) if kv_of else slice(0, 0)
        self.kv_of = torch.tensor(kv_of, dtype=torch.int64) - kv.start
        q_rows, kv_rows = (slice(s.start * self.head, s.stop * self.head) for s in (mine, kv))
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows, "gate_proj": inner, "up_proj": inner}
        columns = {"o_proj": q_rows, "down_proj": inner}
        for n in range(config["num_hidden_layers"]):
            layer = {}
            for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                if f"model.layers.{n}.{name}.weight" in files:
                    layer[name.split(".")[-1]] = files.read(f"model.layers.{n}.{name}.weight", dtype)
            for name in (*rows, *columns):
                at = f"model.layers.{n}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
                part = {"columns": columns[name]} if name in columns else {"rows": rows[name]}
                layer[name] = files.read(f"{at}.weight", dtype, **part)
                if f"{at}.bias" in files and name in rows:
                    layer[f"{name}.bias"] = files.read(f"{at}.bias", dtype, rows[name])
            layer["k"], layer["v"] = (
                torch.empty(kv.stop - kv.start, most_tokens, self.head, dtype=dtype) for _ in "kv"
            )
            self.layers.append(layer)
        self.embedding = files.read("model.embed_tokens.weight", dtype, self.tokens)
        tied = "lm_head.weight" not in files
        self.output = self.embedding if tied else files.read("lm_head.weight", dtype, self.tokens)
        self.norm = files.read("model.norm.weight", dtype)
        theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
        turns = torch.outer(torch.arange(most_tokens), theta ** (-torch.arange(0, self.head, 2) / self.head)).repeat(
            1, 2
        )
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
        sees = torch.ones(len(x), until, dtype=torch.bool).tril(at) if len(x) > 1 else None
        y = F.scaled_dot_product_attention(self.rotated(q, at).transpose(0, 1), k, v, attn_mask=sees)
        return F.linear(y.transpose(0, 1).flatten(1), layer["o_proj"])

    def mlp(self, layer, x, at):
        x = self.normed(x, layer["post_attention_layernorm"])
        return F.linear(F.silu(F.linear(x, layer["gate_proj"])) * F.linear(x, layer["up_proj"]), layer["down_proj"])

    def embedded(self, ids):
        mine = (ids >= self.tokens.start) & (ids < self.tokens.stop)
        x = torch.zeros(len(ids), self.embedding.shape[1], dtype=self.embedding.dtype)
        x[mine] = self.embedding[ids[mine] - self.tokens.start]
        return fompi.all_reduce(x, comm=self.comm)

    def logits(self, ids, at):
        """The logits behind the last of these tokens, for the part of the vocabulary of this rank."""
        parts = list(self.embedded(ids).chunk(2 if len(ids) > 1 else 1))
        starts = [at, at + len(parts[0])]
        sums = [None] * len(parts)
        for layer in self.layers:
            for term in (self.attention, self.mlp):
                for i, start in zip(range(len(parts)), starts, strict=False):
                    if sums[i] is not None:
                        parts[i] = parts[i] + sums[i].wait()
                    y = term(layer, parts[i], start)
                    if len(parts) == 1:
                        parts[i] = parts[i] + fompi.all_reduce(y, comm=self.comm)
                    else:  # while it is summed, the products of the other half run
                        sums[i] = fompi.all_reduce.start(y, comm=self.comm)
        last = parts[-1] if sums[-1] is None else parts[-1] + sums[-1].wait()
        if len(parts) > 1:
            sums[0].wait()
        return F.linear(self.normed(last[-1:], self.norm), self.output)[0].double()

    def next_token(self, ids, at, temperature, generator):
        """The most likely token, or a sample: the largest of the logits with Gumbel noise, the same on any ranks."""
        logits = self.logits(ids, at)
        if temperature:
            vocabulary = fompi.all_reduce(torch.tensor([len(logits)]), comm=self.comm).item()
            noise = -torch.log(-torch.log(torch.rand(vocabulary, generator=generator, dtype=torch.float64)))
            logits = logits / temperature + noise[self.tokens]
        best = torch.tensor([[-torch.inf, 0.0]], dtype=torch.float64)
        if len(logits):
            value, index = logits.max(0)
            best = torch.stack([value, self.tokens.start + index.double()])[None]
        found = fompi.all_gather(best, comm=self.comm)
        return int(found[found[:, 0].argmax(), 1])


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def main():
    parser = argparse.ArgumentParser(description="Generate text with a model that is spread over all ranks.")
    parser.add_argument("model", type=Path, help="a folder with config.json and *.safetensors")
    parser.add_argument("--prompt", help="a text (needs tokenizer.json and the package tokenizers)")
    parser.add_argument("--ids", help="the tokens of the prompt, for example 1,2,3")
    parser.add_argument("--tokens", type=int, default=32, help="how many tokens to generate (32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    options = parser.parse_args()
    tokenizer = None
    if options.prompt is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        ids = tokenizer.encode(options.prompt).ids
    elif options.ids:
        ids = [int(word) for word in options.ids.split(",")]
    else:
        parser.error("give --prompt or --ids")

    with torch.inference_mode(), fompi.Communicator() as comm:
        model = Model(options.model, comm, getattr(torch, options.dtype), len(ids) + options.tokens)
        how = options.temperature, torch.Generator().manual_seed(options.seed)
        begun, made = time.perf_counter(), [model.next_token(torch.tensor(ids), 0, *how)]
        first = time.perf_counter()
        for at in range(len(ids), len(ids) + options.tokens - 1):
            if comm.rank == 0 and tokenizer is not None:
                print(tokenizer.decode(made[-1:]), end=" ", flush=True)
            made.append(model.next_token(torch.tensor(made[-1:]), at, *how))
        ended = time.perf_counter()
        if comm.rank == 0:
            print(tokenizer.decode(made) if tokenizer else f"tokens: {','.join(map(str, made))}")
            decode = max(1, len(made) - 1) / max(ended - first, 1e-9)
            print(
                f"prefill: {len(ids) / (first - begun):.0f} tokens/s, decode: {decode:.1f} tokens/s, {comm.size} ranks"
            )


if __name__ == "__main__":
    main()
