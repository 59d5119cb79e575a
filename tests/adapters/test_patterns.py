"""Regular expressions of strangers: what people write is taken, what never ends is not."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.adapters.patterns import count_ways
from tandem.core.errors import AdapterError

NAMES = [
    f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(12) for name in ("q", "gate")
]
ATTENTION = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
LAYERS = "(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj)"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k|v|o)_proj",
        r".*\.layers\.\d+\.self_attn\.(?:q_proj|v_proj)$",
        r"^(?:.*\.)?layers\.([0-9]|1[0-9])\.mlp\.[a-z]+_proj",
        r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
        # As Unsloth writes it.
        rf"(?:.*?(?:language|text).*?{ATTENTION}.*?{LAYERS}.*?)|"
        rf"(?:\bmodel\.layers\.[\d]{{1,}}\.{ATTENTION}\.(?:{LAYERS}))",
        "model.layers.0.self_attn.q_proj",
        "all-linear",
    ],
)
def test_what_people_write_is_taken(pattern: str) -> None:
    assert count_ways(pattern).number <= 150_000


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z0-9_.]+)+!",
        "(a|a)*!",
        "(?:x?y?)+",
        "((a))*",
        "(a{1,9}){9}",
        ".*.*.*.*.*!",
        ".?" * 18 + "!",
        "(?:.|.)" * 18 + "!",
        "(" * 50 + ")" * 50,
        "(?=a)a",
        "(?i)a",
        r"(a)\1",
        r"(?P<a>x)(?P=a)",
        "a" * 5000,
        "(",
        ")",
        "[a",
        "*",
        "a**",
        "\\",
        r"\q",
        "a{1,99999}",
        "[[a]",
        "(?P<1>a)",
    ],
)
def test_what_may_never_end_or_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(AdapterError, match="is not taken"):
        if count_ways(pattern).number > 150_000:
            raise AdapterError("is not taken")


PIECES = st.sampled_from(
    [*"am.q_", "\\.", "\\d", "[a-z]", "[^.]", "(", "(?:", ")", "|", "*", "+", "?", "{2}", "{1,3}"]
)


@given(st.lists(PIECES, max_size=14).map("".join))
def test_whatever_is_counted_ends(pattern: str) -> None:
    try:
        ways = count_ways(pattern)
    except AdapterError:
        return
    if ways.number > 150_000:
        return
    begun_s = time.thread_time()
    for name in NAMES:
        re.fullmatch(pattern, name)
        re.fullmatch(f"{pattern}!", name)
    assert time.thread_time() - begun_s < 2.0
