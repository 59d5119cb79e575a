"""`kill -9` of the shipped server at every stage of learning: what was acknowledged is used once.

The demo model behind HTTP, started by `mortal_server.py`, which dies where it is told to: the whole
process tree, the engine alone, or the server alone. One state directory lives through all of it, so
each kill also meets what the ones before it left. Afterwards every acknowledged feedback is there
once and trained on once, the version that was published last (or a newer one) serves and answers as
it did, and a job that was running ends with the parameters of a job that nobody killed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mortal import STEPS, STEPS_AN_EPOCH, Mortal
from mortality import ENGINE, SERVER, TREE

from patience import START_S, eventually

ACCEPTED = "accepted"
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def one_life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    made = Mortal(tmp_path_factory.mktemp("mortal"))
    yield made
    made.close()


@pytest.fixture
def mortal(one_life: Mortal) -> Mortal:
    """The server, up."""
    one_life.revive()
    return one_life


@pytest.fixture(scope="module")
def unharmed(one_life: Mortal) -> dict[str, torch.Tensor]:
    """What a job makes that nobody kills."""
    return one_life.check_job(one_life.create_job(), STEPS)


@pytest.mark.parametrize(
    ("point", "scope"),
    [
        pytest.param(ACCEPTED, TREE, marks=FULL),
        ("after commit", TREE),
        pytest.param("committed", TREE, marks=FULL),
        pytest.param("before rename", TREE, marks=FULL),
        pytest.param("after rename", TREE, marks=FULL),
        pytest.param("before commit", TREE, marks=FULL),
        pytest.param("before adopt", TREE, marks=FULL),
        pytest.param("after adopt", TREE, marks=FULL),
        pytest.param("committed", SERVER, marks=FULL),
        pytest.param("after rename", SERVER, marks=FULL),
        *(
            pytest.param(point, ENGINE, marks=FULL)
            for point in ("before rename", "after rename", "before commit", "after commit",
                          "before adopt", "after adopt")
        ),
    ],
)  # fmt: skip
def test_feedback_survives_a_kill_around_its_commit(mortal: Mortal, point: str, scope: str) -> None:
    before = mortal.current()
    if point != ACCEPTED:
        mortal.order(point, scope, 1)
    mortal.give()
    if point == ACCEPTED:
        mortal.kill_tree()
    mortal.wait_killed(scope)
    mortal.send_again()
    mortal.check_serving(before)
    mortal.check_feedback()
    if scope != ENGINE:
        mortal.check_files()


@FULL
def test_learning_goes_on_after_the_engine_died_between_two_feedbacks(mortal: Mortal) -> None:
    """Its trainer was open and waited for more; nobody has told the learner that it is gone."""
    mortal.give()
    mortal.check_feedback()
    mortal.kill_engine()
    mortal.wait_killed(ENGINE)
    mortal.give()
    mortal.check_feedback()


@pytest.mark.parametrize(
    ("point", "scope"),
    [
        pytest.param("mid-forward", TREE, marks=FULL),
        ("mid-backward", ENGINE),
        pytest.param("mid-forward", ENGINE, marks=FULL),
        pytest.param("mid-backward", TREE, marks=FULL),
        *(
            pytest.param(point, scope, marks=FULL)
            for point in ("between slices", "before update", "after update",
                          "files written", "files complete")
            for scope in (TREE, ENGINE)
        ),
    ],
)  # fmt: skip
def test_steps_survive_a_kill_in_their_middle(
    mortal: Mortal, unharmed: dict[str, torch.Tensor], point: str, scope: str
) -> None:
    """Of a job and of feedback, which train side by side."""
    before = mortal.current()
    job = mortal.create_job()
    eventually(lambda: mortal.committed(job), START_S)
    committed = mortal.committed(job)
    mortal.order(point, scope, 1)
    mortal.give()
    mortal.wait_killed(scope)
    mortal.send_again()
    mortal.check_serving(before)
    made = mortal.check_job(job, committed)
    check_same(made, unharmed)
    mortal.check_feedback()


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        # tests/services/jobs/test_jobs.py has these points without processes, too.
        pytest.param("job after rename", STEPS_AN_EPOCH, marks=FULL),
        pytest.param("job before rename", STEPS_AN_EPOCH, marks=FULL),
        pytest.param("job after commit", 2 * STEPS_AN_EPOCH, marks=FULL),
    ],
)
@pytest.mark.parametrize("scope", [TREE, pytest.param(ENGINE, marks=FULL)])
def test_a_job_goes_on_from_its_last_commit(
    mortal: Mortal, unharmed: dict[str, torch.Tensor], point: str, committed: int, scope: str
) -> None:
    """At the second commit; what was renamed but not committed is done again."""
    mortal.order(point, scope, 2)
    job = mortal.create_job()
    mortal.wait_killed(scope)
    check_same(mortal.check_job(job, committed), unharmed)


def test_other_parameters_are_noticed(mortal: Mortal, unharmed: dict[str, torch.Tensor]) -> None:
    """Negative control: a job with its examples in another order."""
    other = mortal.check_job(mortal.create_job(seed=2), STEPS)
    with pytest.raises(AssertionError):
        check_same(other, unharmed)


def check_same(made: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same parameters but for rounding, relative to how far they went (B begins at zero)."""
    assert made.keys() == wanted.keys()
    travelled = sum(float(value.norm()) ** 2 for key, value in wanted.items() if "lora_B" in key)
    gap = sum(float((made[key] - value).norm()) ** 2 for key, value in wanted.items())
    print(f"{(gap / travelled) ** 0.5:.1e} apart, relative to the distance")
    assert travelled > 0.0 and gap < (1e-2**2) * travelled
