"""Files that a stranger might send, made on the spot: each kind has a good example, and ways to spoil it.

Each kind has a file of its own beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hostile.checkpoints import checkpoints
from hostile.configurations import configurations
from hostile.directories import directories
from hostile.spoil import TOKENIZER, TOKENS, TOML, Spoil
from hostile.token_files import token_files
from hostile.tokenizers import good_tokenizer, tokenizers
from ottava.checkpoint import Checkpoints
from ottava.models.hf_files import described, export_hf
from ottava.models.hf_llama import rows
from ottava.models.llama import LlamaConfig
from ottava.train.token_file import write_token_file


@dataclass(frozen=True)
class Case:
    """One thing that is tried."""

    kind: str
    name: str
    spoil: Spoil


def cases() -> list[Case]:
    """All of them, in order."""
    kinds: dict[str, Iterator[tuple[str, Spoil]]] = {
        "checkpoint": checkpoints(),
        "Hugging Face directory": directories(),
        "token file": token_files(),
        "tokenizer": tokenizers(),
        "configuration": configurations(),
    }
    return [Case(kind, name, spoil) for kind, found in kinds.items() for name, spoil in found]


def make_good(kind: str, folder: Path) -> None:
    """The example that cases of a kind spoil."""
    if kind == "checkpoint":
        Checkpoints(folder / "root", hash="blake2b").save(1, {"w": torch.arange(64.0).view(16, 4), "step": 1})
    elif kind == "Hugging Face directory":
        shape = LlamaConfig(vocab_size=8, hidden_size=8, ffn_hidden_size=8, layers=1, heads=2, kv_heads=1, max_length=8)
        sizes = {"embedding.weight": (8, 8), "head.weight": (8, 8), "layernorm_qkv.weight": (16, 8)}
        weights = {
            row.ours: torch.ones(8)
            if "norm" in row.ours.rsplit(".", 2)[-1] or row.ours == "norm.weight"
            else torch.ones(8, 8)
            for row in rows(shape)
        }
        weights |= {name: torch.ones(size) for name in weights for end, size in sizes.items() if name.endswith(end)}
        saved = Checkpoints(folder / "source", config=described(shape)).save(1, {"model": weights})
        export_hf(saved, folder / "hf")
    elif kind == "token file":
        write_token_file(folder / TOKENS, [[1, 2, 3], [4, 5], [0]], vocab_size=7, tokenizer="by hand", end_token=6)
    elif kind == "tokenizer":
        (folder / TOKENIZER).write_text(json.dumps(good_tokenizer()))
    else:
        (folder / TOML).write_text("[train]\nsteps = 3\n")
