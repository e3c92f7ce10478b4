"""A random Llama over bytes, made on the spot: every process starts fast, every checkpoint is small."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 258
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_model(directory: Path, dtype: str = "float32", **sizes: int) -> Path:
    """Write model and tokenizer unless they are there; return the directory. One token for each byte.

    `sizes` are of the LlamaConfig, in place of those of a model that is as small as can be.
    """
    if (directory / "config.json").exists():
        return directory
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        **{**small, **sizes},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=2.4
        / sizes.get("hidden_size", 64)
        ** 0.5,  # 0.3 in the small one: far from uniform, so that a wrong weight shows in the log-probabilities
    )
    scratch = directory.with_suffix(".partial")
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(scratch)
    fast.save_pretrained(scratch)
    scratch.rename(directory)
    return directory


def token_of_byte() -> list[int]:
    """The token id of each byte value."""
    from tokenizers import pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [characters.index(written[byte]) for byte in range(256)]
