"""Language models that are built from Ottava's modules, each small enough to read in one sitting."""

from ottava.models.causal_lm import CausalLM, FlopsPerToken
from ottava.models.gpt import GPT, GPTConfig
from ottava.models.llama import Llama, LlamaConfig

__all__ = ["GPT", "CausalLM", "FlopsPerToken", "GPTConfig", "Llama", "LlamaConfig"]
