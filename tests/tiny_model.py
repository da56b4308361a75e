"""A small Llama with weights from a formula, in a folder as the Hugging Face hub has it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101, "hidden_size": 48,
    "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip

TOKENS = "4,85,61,13,32,30,45,13,63,13,58,86"
"""What transformers 5.24 generates behind 1, 5, 7, 9, 11, 2, 3 with these weights in float64."""

LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

OTHERS = (
    ({"rope_scaling": LLAMA_3}, "36,4,32,18,82,4,86,18,32,71,60,14"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "36,4,32,38,20,13,38,20,13,35,38,60"),
    ({"model_type": "mistral", "sliding_window": 5}, "38,58,61,47,47,47,3,91,14,24,61,61"),
)
"""Other configurations of the same weights, and what transformers generates with them."""


def tensors() -> dict[str, np.ndarray]:
    hidden, inner, vocabulary = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    shapes["model.norm"] = (hidden,)
    for n in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden // 3, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        draw = np.random.Generator(np.random.PCG64(number))
        values = draw.standard_normal(shape) * 0.15 if len(shape) > 1 else 1 + 0.1 * draw.standard_normal(shape)
        made[f"{name}.weight"] = values.astype(np.float32)
    return made


def write(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    header, at = {}, 0
    for name, values in tensors().items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for values in tensors().values():
            file.write(values.tobytes())
