"""Masks of grammars over the demo model's tokens."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from devices import DEVICES
from tandem.core.errors import InvalidRequest
from tandem.core.plan import Draw, DrawResult
from tandem.core.sampling import TOO_COMPLEX, Grammar, GrammarKind, SamplingParams
from tandem.model import grammars as module
from tandem.model.grammars import Grammars
from tandem.model.names import locate
from tandem.model.sampling import NOT_FINITE, sample
from tandem.services.answering.tokenizer import Tokenizer

SOURCE = str(locate("demo", lambda stage, done: None))
TOKENIZER = Tokenizer.load(SOURCE)
VOCAB = TOKENIZER.size + 5  # as if the embedding were padded
END = TOKENIZER._backend.eos_token_id
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def made(ends: tuple[int, ...] = (END,)) -> Grammars:
    return Grammars(SOURCE, VOCAB, ends)


def draw_of(grammar: Grammar | None, output: tuple[int, ...] = (), seq_id: int = 0, **more) -> Draw:
    params = SamplingParams(temperature=0.0, grammar=grammar)
    return Draw(seq_id, 0, len(output), params, 2, (9, 9, *output), **more)


def allowed(grammars: Grammars, draw: Draw) -> set[int]:
    scores = torch.zeros(1, VOCAB)
    assert grammars.restrict(scores, [draw]) == {}
    return set(torch.nonzero(scores[0] == 0).flatten().tolist())


def written(grammars: Grammars, grammar: Grammar, seed: int, most: int = 400) -> str:
    """A text of random allowed tokens up to the end token."""
    chosen, output = random.Random(seed), []
    for _ in range(most):
        token = chosen.choice(sorted(allowed(grammars, draw_of(grammar, tuple(output), seed))))
        if token == END:
            break
        output.append(token)
    else:
        raise AssertionError("it does not end")
    return TOKENIZER.decode(output)


def test_a_mask_allows_what_the_text_may_go_on_with():
    grammars = made()
    first = allowed(grammars, draw_of(regex("ab|cd")))
    assert {TOKENIZER.decode([token]) for token in first} <= {"a", "ab", "c", "cd"}
    assert TOKENIZER.encode("a", add_special_tokens=False)[0] in first
    done = TOKENIZER.encode("ab", add_special_tokens=False)
    assert allowed(grammars, draw_of(regex("ab|cd"), done)) == {END}


@pytest.mark.parametrize("seed", range(5))
def test_random_allowed_tokens_match(seed):
    grammars = made()
    text = written(grammars, Grammar(GrammarKind.JSON, json.dumps(PERSON)), seed)
    person = json.loads(text)
    assert set(person) == {"name", "age"} and len(person["name"]) <= 6
    lark = Grammar(GrammarKind.LARK, 'start: ("x" | "yz")~2 "!"\n')
    assert written(grammars, lark, seed) in {"xx!", "xyz!", "yzx!", "yzyz!"}
    gbnf = Grammar(GrammarKind.GBNF, 'root ::= "x" digit "y"\ndigit ::= [0-9]\n')
    assert written(grammars, gbnf, seed) in {f"x{digit}y" for digit in range(10)}


@pytest.mark.parametrize("device", DEVICES)
def test_only_rows_with_a_grammar_change(device):
    grammars = made()
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    before = scores.clone()
    draws = [draw_of(None), draw_of(regex("[0-9]"), seq_id=1), draw_of(None)]
    assert grammars.restrict(scores, draws) == {}
    assert torch.equal(scores[0], before[0]) and torch.equal(scores[2], before[2])
    kept = scores[1].isfinite()
    assert torch.equal(scores[1][kept], before[1][kept]) and 10 <= int(kept.sum()) < VOCAB
    assert bool((scores[1][~kept] == -math.inf).all())


def test_a_mask_depends_on_the_output_only(monkeypatch):
    """Sequences come and go, lose their state, go back, and change their grammar."""
    monkeypatch.setattr(module, "_MOST_SPARE", 1)
    warm, chosen = made(), random.Random(4)
    texts = {regex("[a-f]{2,9}[0-9]"): "abcdef1", Grammar(GrammarKind.JSON, "{}"): '{"a": [1, 2]}'}
    for _ in range(60):
        grammar = chosen.choice(list(texts))
        tokens = TOKENIZER.encode(texts[grammar], add_special_tokens=False)
        draw = draw_of(grammar, tokens[: chosen.randrange(len(tokens))], chosen.randrange(4))
        assert allowed(warm, draw) == allowed(made(), draw)
        if chosen.random() < 0.3:
            warm.compile(grammar)([draw.seq_id])


def test_banned_tokens_go_unless_nothing_is_left():
    grammars, end = made(), (END,)
    some = TOKENIZER.encode("aa", add_special_tokens=False)
    assert END in allowed(grammars, draw_of(regex("a*"), some))
    assert END not in allowed(grammars, draw_of(regex("a*"), some, banned=end))
    assert allowed(grammars, draw_of(regex("aa"), some, banned=end)) == {END}


@pytest.fixture
def few_states(monkeypatch):
    """Lexers of few states."""

    def allow(states: int) -> None:
        limits = type(module._limits())(max_lexer_states=states, verbose_errors=False)
        monkeypatch.setattr(module, "_limits", lambda: limits)

    return allow


@pytest.mark.parametrize("seconds", [0.001, 0.05])
def test_a_full_lexer_is_made_anew(seconds, few_states, monkeypatch):
    """What other sequences of a grammar have used up is not this one's fault."""
    few_states(100)
    grammars, grammar, compiled = made(), regex(".*[ab].{8}"), []
    grammars.compile(grammar)
    grammars._ready(grammar).seconds = seconds
    matcher = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda it: compiled.append(it) or matcher(it))
    helped = 0
    for seq_id in range(40):
        letters = "".join(random.Random(seq_id).choice("abcd") for _ in range(30))
        tokens = TOKENIZER.encode(letters, add_special_tokens=False)
        before = len(compiled)
        problems = grammars.restrict(torch.zeros(1, VOCAB), [draw_of(grammar, tokens, seq_id)])
        helped += len(compiled) > before and problems == {}
    assert helped


def test_a_full_lexer_is_made_anew_once_for_all_its_sequences(few_states, monkeypatch):
    """Those that come after the first one only change over."""
    few_states(600)
    grammars, grammar, compiled = made(), regex(".*[ab].{8}"), []
    grammars.compile(grammar)
    matcher = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda it: compiled.append(it) or matcher(it))
    changed = 0
    for wave in range(12):
        texts = ["".join(random.Random(8 * wave + i).choices("abcd", k=20)) for i in range(8)]
        for letters in (10, 15, 20):
            outputs = [TOKENIZER.encode(text[:letters], add_special_tokens=False) for text in texts]
            draws = [draw_of(grammar, out, 8 * wave + i) for i, out in enumerate(outputs)]
            before = len(compiled)
            assert grammars.restrict(torch.zeros(8, VOCAB), draws) == {}
            assert len(compiled) - before <= 1
            ready = grammars._ready(grammar)
            states = [ready.running[draw.seq_id] for draw in draws]
            changed += len(compiled) > before and sum(s.begun is ready.matcher for s in states) > 1
        grammars.compile(grammar)(range(8 * wave, 8 * wave + 8))
    assert changed


def test_what_is_held_is_never_compiled_again(monkeypatch):
    """However many others come: a draw never waits for a compiler."""
    monkeypatch.setattr(module, "_MOST_SPARE", 2)
    grammars, compiled = made(), []
    matcher = grammars._matcher
    monkeypatch.setattr(grammars, "_matcher", lambda it: compiled.append(it.text) or matcher(it))
    texts = ["a", "b", "c", "d", "e"]
    held = [grammars.compile(regex(text)) for text in texts]
    for seq_id, text in enumerate(texts):
        assert allowed(grammars, draw_of(regex(text), (), seq_id))
    assert compiled == texts
    del held
    grammars.compile(regex("e"))
    assert compiled == texts, "the last ones stay although nobody holds them"
    grammars.compile(regex("a"))
    assert compiled == [*texts, "a"]


def test_the_states_of_ended_sequences_are_freed():
    grammars = made()
    end = grammars.compile(regex("a+"))
    for seq_id in range(3):
        allowed(grammars, draw_of(regex("a+"), (), seq_id))
    end([0, 2, 7])
    assert list(grammars._ready(regex("a+")).running) == [1]


def test_a_full_lexer_of_a_slow_grammar_is_made_anew_beside_the_loop(few_states, monkeypatch):
    """Its sequence ends with an error of its own; the next request compiles for all."""
    few_states(100)
    monkeypatch.setattr(module, "_SHORT_S", 0.0)
    grammars, grammar = made(), regex(".*[ab].{8}")
    grammars.compile(grammar)
    ready, helped = grammars._ready(grammar), 0
    for seq_id in range(60):
        letters = "".join(random.Random(seq_id).choice("abcd") for _ in range(30))
        draw = draw_of(grammar, TOKENIZER.encode(letters, add_special_tokens=False), seq_id)
        problems = grammars.restrict(torch.zeros(1, VOCAB), [draw])
        if problems:
            assert problems == {0: TOO_COMPLEX} and ready.full
            grammars.compile(grammar)
            assert grammars._ready(grammar) is ready and not ready.full
            helped += grammars.restrict(torch.zeros(1, VOCAB), [draw]) == {}
    assert helped


def test_a_grammar_that_cannot_be_followed_any_more_fails_its_draw_alone(few_states):
    few_states(40)
    hard, easy = regex(".*[ab].{30}"), regex("[0-9]+")
    letters = TOKENIZER.encode("abcabdbdacbabdacbabdcabdbacbabd" * 3, add_special_tokens=False)
    draws = [draw_of(hard, letters, 1), draw_of(easy, (), 2), draw_of(None, (), 3)]
    found = sample(torch.randn(3, VOCAB), draws, made())
    assert found[0] == TOO_COMPLEX
    assert isinstance(found[1], DrawResult) and isinstance(found[2], DrawResult)


def test_logits_that_are_not_finite_are_said_first():
    logits = torch.randn(2, VOCAB)
    logits[0, 3] = math.nan
    draws = [draw_of(regex("[0-9]+"), (), seq_id) for seq_id in (1, 2)]
    found = sample(logits, draws, made())
    assert found[0] == NOT_FINITE and isinstance(found[1], DrawResult)
    draws[0] = draw_of(regex("[0-9]+"), TOKENIZER.encode("letters"), 1)  # which it does not allow
    assert sample(logits, draws, made())[0] == NOT_FINITE


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.JSON, '{"not": {}}', "response_format"), '"not"'),
        (Grammar(GrammarKind.JSON, '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar(GrammarKind.JSON, "nonsense"), "cannot be used"),
        (regex("(a"), "unclosed group"),
        (regex(r"[^\s\S]"), "no text matches it"),
        (Grammar(GrammarKind.LARK, 'start: a\na: "x" a\n'), "Too many items"),
        (Grammar(GrammarKind.LARK, "start: other"), "unknown name"),
        (Grammar(GrammarKind.GBNF, 'root ::= ("a"'), "Expected"),
        (Grammar(GrammarKind.GBNF, "root ::= " + "(" * 5000), "cannot be used"),
    ],
)
def test_wrong_grammars_are_refused_with_the_reason(grammar, reason):
    with pytest.raises(InvalidRequest, match="cannot be used") as refused:
        made().compile(grammar)
    assert reason in str(refused.value) and refused.value.param == grammar.param
    assert len(str(refused.value)) < 700


def test_what_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_S", 0.0)
    with pytest.raises(InvalidRequest, match="takes more than"):
        made().compile(regex("a"))


def test_models_without_what_it_needs_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidRequest, match="no end token"):
        made(()).compile(regex("a"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Grammars(str(tmp_path), VOCAB, (END,)).compile(regex("a"))
