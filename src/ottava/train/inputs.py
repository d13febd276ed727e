"""What a run reads: its data, and the tokenizer that it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ottava.train.config import Config
from ottava.train.data import Data
from ottava.train.tokenize import Tokenizer, load_tokenizer, standard_library


def open_data(config: Config) -> tuple[Data, Data | None]:
    """(training data, validation data if some is kept)."""
    section = config.data
    files: Any = section.files or [standard_library(Path(section.cache).expanduser())]
    options: dict[str, Any] = {
        "length": section.length,
        "seed": config.train.seed,
        "weights": section.weights or None,
        "validation_fraction": section.validation_fraction,
        "document_mask": section.document_mask,
    }
    held_out = Data(files, split="validation", **options) if section.validation_fraction else None
    return Data(files, **options), held_out


def open_tokenizer(config: Config, data: Data) -> Tokenizer:
    """What turns samples into text; it must be the one that the data was made with."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.name.rpartition("@")[2] != data.tokenizer.rpartition("@")[2]:
        raise ValueError(
            f"data.tokenizer {config.data.tokenizer!r} is {tokenizer.name}, but the files were made with {data.tokenizer}: give that one, "
            "or train.sample_tokens 0, which needs none."
        )
    return tokenizer
