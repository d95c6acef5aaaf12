"""A LoRA adapter for tests, written by hand as PEFT saves it: random matrices for the attention of a small model."""

import json
from pathlib import Path

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "models/smollm2-135m-instruct",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}


def write_adapter(folder: Path, *, weights: bytes = b"weights", **config) -> Path:
    """An adapter with these bytes as its weights: enough for all that does not start an engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def write_random_adapter(folder: Path, model: Path, *, width: int | None = None, **config) -> Path:
    """An adapter strong enough to change every answer; `width` in place of the model's own makes it fit nowhere."""
    import torch
    from safetensors.torch import save

    shape = json.loads((model / "config.json").read_text())
    hidden, rank = width or shape["hidden_size"], config.get("r", CONFIG["r"])
    out = {"q_proj": hidden, "v_proj": shape["num_key_value_heads"] * shape["head_dim"]}
    chance = torch.Generator().manual_seed(7)
    matrices = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, rows in out.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            matrices[f"{at}.lora_A.weight"] = 0.1 * torch.randn(rank, hidden, generator=chance)
            matrices[f"{at}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=chance)
    return write_adapter(folder, weights=save(matrices), **config)
