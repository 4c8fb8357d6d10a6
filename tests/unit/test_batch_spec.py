import pytest

from pabench.batch_spec import format_batch_spec, longest, parse_batch_spec


@pytest.mark.parametrize(
    ("text", "seqs"),
    [
        ("8q1s4k_2q2k", ((1, 4096),) * 8 + ((2048, 2048),) * 2),
        ("q1s0", ((1, 0),)),
        ("3q17_q5s40", ((17, 17),) * 3 + ((5, 40),)),
    ],
)
def test_a_spec_is_read_and_written(text, seqs):
    assert parse_batch_spec(text) == seqs
    assert format_batch_spec(seqs) == text


@pytest.mark.parametrize("text", ["", "q", "s4", "q0s4", "q5s4", "q1s4,q2", "q2s0"])
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(ValueError, match="must"):
        parse_batch_spec(text)


def test_the_longest_sequence_of_a_record():
    assert longest("plain-decode:q1s17_q1s0_q40") == 40
    assert longest(None) is None
