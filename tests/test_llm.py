"""Use without a server, on the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import InvalidRequest, TandemError
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.llm import LLM, Example


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", threads=1, memory_bytes=4 << 20, accustom_s=0.0)


def test_text_and_token_prompts_give_the_same(llm):
    text = "Tell me a joke"
    tokens = llm.tokenizer.encode(text)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    first, second = llm.generate([text, tokens], sampling)
    assert first.choices[0].tokens == second.choices[0].tokens
    assert first.choices[0].finish_reason is FinishReason.LENGTH
    assert first.choices[0].text == llm.tokenizer.decode(first.choices[0].tokens)


def test_seeds_choices_and_scores(llm):
    sampling = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    once, again = (llm.generate(["Hello there"], sampling, n=3)[0] for _ in range(2))
    assert [c.tokens for c in once.choices] == [c.tokens for c in again.choices]
    assert len({tuple(c.tokens) for c in once.choices}) > 1
    assert len(once.prompt_logprobs) == len(once.prompt) - 1
    assert all(len(logprob.top) == 2 for logprob in once.choices[0].logprobs)


def test_chat_answers_and_stops(llm):
    assert "Paris" in llm.chat([{"role": "user", "content": "What is the capital of France?"}])


def test_a_small_cache_bounds_the_context(llm):
    assert llm.info.max_model_len == llm.info.num_blocks * llm.info.block_size < 2048
    whole = SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    output = llm.generate(["Hello"], whole)[0]
    assert len(output.prompt) + len(output.choices[0].tokens) == llm.info.max_model_len


@pytest.mark.parametrize("change", [{"temperature": 1e-50}, {"temperature": 1e-4}, {"min_p": 1.0}])
def test_extreme_sampling_stays_finite(llm, change):
    sampling = replace(SamplingParams(max_tokens=4, ignore_eos=True), **change)
    assert len(llm.generate(["Hello"], sampling)[0].choices[0].tokens) == 4


def test_what_does_not_fit_is_refused_and_nothing_stays(llm):
    with pytest.raises(InvalidRequest, match="context"):
        llm.generate(["fine", [5] * 5000])
    with pytest.raises(InvalidRequest, match="at least one choice"):
        llm.generate(["fine"], n=0)
    with pytest.raises(InvalidRequest, match="unknown setting"):
        LLM("demo", no_such_setting=1)
    assert len(llm.generate(["fine"], SamplingParams(max_tokens=1))) == 1


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


QUESTIONS = ["Name a colour.", "Name a fruit.", "Say hello.", "Name an animal."]


def test_what_is_learned_serves_at_once_and_goes_on(tmp_path, llm):
    before = llm.chat(question("Name a fruit."))
    examples = [
        Example(question(text), "Yes.", rejected=llm.chat(question(text))) for text in QUESTIONS
    ]
    # Without the likelihood term the loss is DPO's: log 2 where policy and reference agree.
    own = {"learning_rate": 3e-3, "rpo_alpha": 0.0}
    first = llm.learn("short", examples, str(tmp_path / "1"), epochs=6, **own)
    assert first.losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert first.losses[-1] < 0.3
    assert first.left_out == 0
    assert first.version.number == 1
    second = llm.learn("short", examples, str(tmp_path / "2"), epochs=1, rpo_alpha=0.0)
    assert second.losses[0] < 0.3
    assert second.version.number == 2
    assert llm.chat(question("Name a fruit.")) == before
    again = LLM("demo", threads=1, memory_bytes=4 << 20, accustom_s=0.0)
    again.load_adapter("short", second.version.path)
    for text in QUESTIONS:
        assert again.chat(question(text), adapter="short") == llm.chat(
            question(text), adapter="short"
        )


@pytest.mark.parametrize(
    "examples",
    [
        [Example(question(text), "Certainly: a stone.") for text in QUESTIONS],
        [
            Example(question(text), "Certainly: a stone.", desirable=place % 2 == 0)
            for place, text in enumerate(QUESTIONS)
        ],
        [Example(text, " is blue", rejected=" is red") for text in ("The sky", "My car")],
    ],
)
def test_every_kind_of_example_lowers_its_loss(tmp_path, llm, examples):
    name = f"{examples[0].kind}"
    lesson = llm.learn(name, examples, str(tmp_path / "a"), epochs=4)
    assert lesson.losses[-1] < lesson.losses[0]


def test_examples_that_do_not_fit_are_refused(tmp_path, llm):
    mixed = [Example("a", " b"), Example("a", " b", rejected=" c")]
    for wrong, match in (
        (mixed, "one kind"),
        ([], "one kind"),
        ([Example("a", " ")], "empty"),
        ([Example("a", " b", desirable=at == 0) for at in range(9)], "1 of 9 examples are liked"),
        ([Example("a", " b" * 5000)], "tokens"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            llm.learn("bad", wrong, str(tmp_path / "bad"))
    with pytest.raises(InvalidRequest, match="epochs"):
        llm.learn("bad", [Example("a", " b")], str(tmp_path / "bad"), epochs=0)
    assert not (tmp_path / "bad").exists()


def test_a_policy_that_never_trains_says_so(tmp_path):
    frozen = LLM("demo", threads=1, memory_bytes=4 << 20, accustom_s=0.0, policy="no_retrain")
    with pytest.raises(TandemError, match="no_retrain"):
        frozen.learn("a", [Example("a", " b")], str(tmp_path / "a"))


HESITANT = """
from tandem.core.decision import Decision
from tandem.scheduling.policies.fcfs import FirstComeFirstServed

class Hesitant(FirstComeFirstServed):
    asked = 0

    def decide(self, view):
        self.asked += 1
        return super().decide(view) if self.asked % 3 == 0 else Decision()
"""


def test_a_policy_that_hesitates_answers_later(tmp_path, monkeypatch, llm):
    """It is asked again after a pause, and nobody's answer is cut off meanwhile."""
    (tmp_path / "hesitant_policy.py").write_text(HESITANT)
    monkeypatch.syspath_prepend(str(tmp_path))
    slow = LLM(
        "demo", threads=1, memory_bytes=4 << 20, accustom_s=0.0, policy="hesitant_policy:Hesitant"
    )
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    wanted, found = (each.generate(["Hello"], sampling, n=2)[0] for each in (llm, slow))
    assert [c.tokens for c in found.choices] == [c.tokens for c in wanted.choices]
    assert all(choice.finish_reason is FinishReason.LENGTH for choice in found.choices)


def test_an_example_has_one_kind():
    with pytest.raises(InvalidRequest, match="either 'rejected' or 'desirable'"):
        Example("a", " b", rejected=" c", desirable=True)


def test_learning_into_what_exists_is_refused_before_it_begins(tmp_path, llm, monkeypatch):
    monkeypatch.setattr(llm, "_train", None)
    (tmp_path / "old").mkdir()
    with pytest.raises(InvalidRequest, match="exists already"):
        llm.learn("late", [Example("a", " b")], str(tmp_path / "old"))


def test_a_lesson_of_no_step_makes_no_version(tmp_path, llm):
    path = tmp_path / "none"
    with pytest.raises(TandemError, match="nothing was learned"):
        llm.learn("none", [Example("a", " b", weight=float("inf"))], str(path))
    assert not path.exists()
    with pytest.raises(TandemError):
        llm.generate(["a"], adapter="none")


def test_less_evidence_moves_the_model_less(tmp_path, llm, monkeypatch):
    scales = []
    add_step = llm._loop.teaching.add_step
    monkeypatch.setattr(
        llm._loop.teaching, "add_step", lambda step: (scales.append(step.scale), add_step(step))
    )
    examples = [Example("a", " b", weight=0.5), Example("c", " d", weight=0.25)]
    llm.learn("light", examples, str(tmp_path / "light"), epochs=1, batch_samples=2)
    llm.learn("few", examples[:1], str(tmp_path / "few"), epochs=1, batch_samples=2)
    assert scales == [0.375, 0.25]
