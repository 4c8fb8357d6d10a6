import pytest

from pabench.models.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer


@pytest.mark.parametrize("text", ["plain", " two  spaces ", "naïve Straße — 東京 🙂", "line\r\nline\t\0", "don 't . x"])
def test_a_token_is_a_byte_and_comes_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, EOS_ID)
    assert tokenizer("<bos>a").input_ids == [BOS_ID, ord("a")]
