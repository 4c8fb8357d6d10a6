"""A tokenizer made in code for the random models: one token a byte, then <bos> and <eos>."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 258
BOS_ID, EOS_ID = 256, 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Any text encodes and decodes exactly; no token is added by itself, <eos> pads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel spells each byte as one printable character; 0–255 are those, in the byte's own order
    vocab = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def _characters() -> list[str]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
