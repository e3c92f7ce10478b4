"""The forward pass of Llama-like decoders over a flat batch of tokens with a paged KV cache.

Supported `model_type`s: llama (SmolLM2 too), mistral, qwen2, qwen3. Tokens of all sequences lie in one dimension; only
attention knows where one sequence ends. Shapes: T tokens, H hidden size, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
