"""Rates are found again from samples of a device that has them; files and data sheets hold."""

from __future__ import annotations

import math
import random
import re
from codecs import BOM_UTF8
from dataclasses import replace
from itertools import chain

import pytest

from rates import slice_rates
from tandem.core.errors import InvalidRequest
from tandem.core.plan import KeptLayers
from tandem.estimators.calibrate import Samples, TimedPass, fit, rough
from tandem.estimators.datasheet import DEVICES, SHAPES, datasheet_profile
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.profile import (
    NO_CACHES,
    SCHEMA,
    Caches,
    FitError,
    Profile,
    profile_for,
    read_profile,
    write_profile,
)
from tandem.estimators.terms import FORWARD_TERMS
from tandem.estimators.work import BackwardWork, PassWork

GUESS = Rates.guess(weight_bytes=10**9, num_parameters=5 * 10**8, num_layers=24)


def true_rates(rho: float) -> Rates:
    """0.5B on something faster: a pass 12 ms, a row 0.1 ms, recording and scoring on top."""
    forward = (
        0.012, 2e-4, 1e-4, 2e-5, 2e-5, 1e-4, 5e-3, 1e-4, 2e-4, 2e-3, 5e-5, 2e-3, 4e-5, 3e-3,
    )  # fmt: skip
    slices = slice_rates(
        slice=5e-4, layer=1e-4, layer_row=2e-5, layer_pairs=2e-2, layer_sequence=1e-4, again=2e-3,
        again_row=1e-5, again_pairs=1e-2, rest_row=4e-6, first=2e-3, first_row=1e-6,
    )  # fmt: skip
    return Rates(forward, slices, 4e-3, rho, measured=True)


class Device(LatencyModel):
    """Runs passes one after the other, and takes as long as predicted."""

    before_s = math.inf

    def after(self, seconds: float) -> None:
        super().after(seconds)
        self.before_s = seconds

    def timed(self, work: PassWork, factor: float = 1.0, over_s: float = 0.0) -> TimedPass:
        """`factor` times as long, and `over_s` longer."""
        found = TimedPass(work, self.forward_s(work) * factor + over_s, self.before_s)
        self.after(found.seconds)
        return found


def samples_of(rates: Rates, count: int, noise: float, seed: int = 0) -> Samples:
    device, rng, samples = Device(rates), random.Random(seed), Samples()
    for place in range(count):
        work = PassWork()
        if place % 3 != 1:
            for _ in range(rng.choice((1, 2, 4, 8, 16, 32, 64))):
                work.decode(rng.randint(10, 3000))
        if place % 3:
            rows = rng.choice((16, 64, 200, 900))
            record = rows if place % 2 else 0
            work.span(rng.choice((0, 500)), rows, draws=1, scored=record // 2, recorded=record)
            work.whole = record > 0 and not work.decodes
        samples.passes.append(device.timed(work, rng.uniform(1 - noise, 1 + noise)))
        kept = rng.choice(((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)))
        lengths = [rng.randint(8, 300) for _ in range(rng.choice((1, 2, 2, 8)))]
        recorded = BackwardWork.of(lengths).with_kept(KeptLayers(0, *kept))
        recorded = recorded.after_slice() if rng.random() < 0.5 else recorded
        layers = rng.randint(1, 24)
        samples.slices.append((recorded, layers, device.slice_s(recorded, layers)))
        samples.updates.append(4e-3)
    return samples


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_a_few_passes_put_guesses_right(factor: float):
    guess = replace(
        GUESS,
        forward=tuple(factor * each for each in GUESS.forward),
        slices=tuple(factor * each for each in GUESS.slices),
    )
    samples = samples_of(true_rates(1.0), 14, 0.03)
    samples.passes = [each for each in samples.passes if not each.work.recorded]
    samples.passes.append(TimedPass(PassWork(), 0.0))  # what did not fit
    found = rough(samples, guess)
    model = LatencyModel(found)
    unseen = samples_of(true_rates(1.0), 60, 0.0, seed=1).passes
    errors = []
    for work, seconds, before_s in unseen:
        model.after(before_s)
        if not work.recorded:
            errors.append(abs(model.forward_s(work) / seconds - 1.0))
    assert sum(errors) / len(errors) < 0.25
    ratio = found.forward[5] / guess.forward[5]  # of a row
    assert factor * ratio == pytest.approx(1e-4 / GUESS.forward[5], rel=0.2)
    assert found.slices == pytest.approx([ratio * each for each in guess.slices])
    first, last = (FORWARD_TERMS.index(name) for name in ("scored", "cold"))  # nothing shows them
    wanted = [ratio * each for each in guess.forward[first:last]]
    wanted[1] = found.forward[0]  # what recording costs in any case: as much as a pass
    assert found.forward[first:last] == pytest.approx(wanted)
    assert not (found.measured or found.slices_measured)
    assert rough(Samples(), guess) == guess


def test_a_few_noisy_passes_leave_what_they_do_not_show_near_the_guess():
    found = []
    for seed in range(12):
        rng = random.Random(seed)
        device = Device(replace(GUESS, forward=tuple(2.0 * x for x in GUESS.forward)))
        samples = Samples()
        for decodes, rows in ((1, 0), (8, 0), (0, 64), (32, 0), (0, 128), (8, 256), (0, 512)):
            work = PassWork()
            work.decode_all([256] * decodes)
            if rows:
                work.span(0, rows, draws=1)
            samples.passes.append(device.timed(work, rng.uniform(0.8, 1.2)))
        long = PassWork()
        long.span(3000, 800, draws=1)
        told = LatencyModel(rough(samples, GUESS))
        found.append(abs(math.log(told.forward_s(long) / device.forward_s(long))))
    assert sum(found) / len(found) < 0.25


def test_a_profile_without_slices_does_not_claim_to_know_them():
    samples = samples_of(true_rates(1.0), 100, 0.03)
    assert not LatencyModel(fit(samples, GUESS).rates).guessed
    samples.slices.clear()
    found = fit(samples, GUESS).rates
    assert found.measured and LatencyModel(found).guessed


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_a_fit_predicts_passes_that_it_has_not_seen(rho: float):
    found = fit(samples_of(true_rates(rho), 300, 0.03), GUESS)
    assert found.errors["pass"].mape < 0.04 and found.errors["pass"].p95 < 0.09
    assert found.errors["slice"].mape < 0.01
    assert found.rates.update_s == pytest.approx(4e-3)
    assert found.rates.rho == pytest.approx(rho, abs=0.31)
    device, model = LatencyModel(true_rates(rho)), LatencyModel(found.rates)
    for work, seconds, before_s in samples_of(true_rates(rho), 60, 0.0, seed=1).passes:
        device.after(before_s)
        model.after(before_s)
        assert device.forward_s(work) == pytest.approx(seconds)
        assert model.forward_s(work) == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_fit_is_not_held_by_a_guess_that_is_far_off(factor: float):
    place = FORWARD_TERMS.index("pairs")
    forward = list(true_rates(1.0).forward)
    guess = replace(true_rates(1.0), forward=tuple(forward))
    forward[place] = 0.3  # seconds a million pairs: long prefixes take most of a pass
    device = Device(replace(guess, forward=tuple(forward)))
    samples, rng = samples_of(true_rates(1.0), 120, 0.0), random.Random(3)
    samples.passes = []
    for _ in range(120):
        work = PassWork()
        work.span(rng.choice((0, 0, 30, 1000, 3000)), rng.choice((4, 30, 200, 900)), draws=1)
        samples.passes.append(device.timed(work))
    off = list(forward)
    off[place] *= factor
    found = fit(samples, replace(guess, forward=tuple(off)))
    assert found.rates.forward[place] == pytest.approx(0.3, rel=0.05)
    assert found.errors["pass"].mape < 0.03


def test_noise_is_what_the_fit_could_not_explain():
    found = fit(samples_of(true_rates(0.4), 300, 0.1), GUESS)
    assert set(found.noise) == {"pass", "decode", "prefill", "mixed", "training", "slice"}
    each = [found.noise[kind] for kind in ("decode", "prefill", "mixed", "training")]
    passes = found.noise["pass"]
    assert passes == tuple(sorted(chain.from_iterable(each)))
    assert len(passes) == 60 and -0.15 < min(passes) < -0.05 and 0.05 < max(passes) < 0.15


def of_decodes(decodes: int) -> PassWork:
    work = PassWork()
    work.decode_all([100] * decodes)
    return work


def test_what_a_sleep_costs_and_prompts_save_are_medians_and_never_the_reverse():
    """Against what the rates say of the very work."""
    rates = true_rates(1.0)
    samples, device, works = samples_of(rates, 60, 0.0), Device(rates), []
    for rows in (50, 100, 200):
        works.append(PassWork())
        works[-1].span(0, rows, draws=1)
    for over_s, expected in (((0.002, 0.003, 0.4), 0.003), ((-0.001,) * 3, 0.0)):
        taken = [device.timed(w, over_s=s) for w, s in zip(works, over_s, strict=True)]
        samples.resumes, samples.warm_prompts = taken, []
        caches = fit(samples, GUESS).caches
        assert (caches.resume_s, caches.prompt_s) == (pytest.approx(expected, rel=0.1), 0.0)
        under = [device.timed(w, over_s=-s) for w, s in zip(works, over_s, strict=True)]
        samples.resumes, samples.warm_prompts = [], under
        caches = fit(samples, GUESS).caches
        assert (caches.resume_s, caches.prompt_s) == (0.0, pytest.approx(expected, rel=0.1))


def test_what_warm_caches_save_is_found_from_streaks():
    """Each pass leaves 0.6 of the way, so the seventh still lacks a little; once one is
    disturbed."""
    rates = true_rates(1.0)
    samples, device = samples_of(rates, 60, 0.0), Device(rates)
    for decodes in (1, 2, 4, 8):
        saved_s = [0.002 * (1.0 - 0.6**place) for place in range(7)]
        streak = [device.timed(of_decodes(decodes), over_s=-each) for each in saved_s]
        samples.streaks.append(tuple(streak))
    caches = fit(samples, GUESS).caches
    assert caches.decode_s == pytest.approx(0.002, rel=0.05)
    assert caches.cold_share == pytest.approx(0.6, abs=0.02)
    first, second, *others = samples.streaks[0]
    disturbed = second._replace(seconds=second.seconds + 0.1)
    samples.streaks[0] = (first, disturbed, *others)
    assert fit(samples, GUESS).caches.cold_share == pytest.approx(0.6, abs=0.1)
    samples.streaks = [tuple([first._replace(seconds=each) for each in (9.0, 8.0, 8.0)])]
    assert fit(samples, GUESS).caches.decode_s == 0.0, "never a loss"
    samples.streaks = []
    assert fit(samples, GUESS).caches == NO_CACHES


def test_without_samples_the_guess_stays():
    found = fit(Samples(), GUESS)
    assert (found.rates.forward, found.rates.slices) == (GUESS.forward, GUESS.slices)
    assert found.errors == {} and found.noise == {}


def test_equal_samples_give_equal_rates():
    samples = samples_of(true_rates(0.4), 60, 0.05)
    assert fit(samples, GUESS) == fit(samples, GUESS)


def test_the_same_share_of_each_kind_is_held_out_and_a_rare_one_is_fitted():
    """Whatever the turns in which kinds were measured."""
    rng, samples = random.Random(0), Samples()
    device = Device(true_rates(1.0))
    for place in range(100):
        work = PassWork()
        if place % 5 == 0:  # in step with the share that is held out
            work.span(0, rng.randint(2, 900), draws=1)
        else:
            for _ in range(rng.randint(1, 60)):
                work.decode(rng.randint(1, 3000))
        samples.passes.append(device.timed(work))
    alone = PassWork()
    alone.span(0, 500, scored=499, recorded=500)
    device.after(samples.passes[49].seconds)
    samples.passes.insert(50, device.timed(alone))
    found = fit(samples, GUESS)
    assert (found.errors["decode"].samples, found.errors["prefill"].samples) == (16, 4)
    assert "training" not in found.errors
    model = LatencyModel(found.rates)
    assert model.forward_s(alone) == pytest.approx(device.forward_s(alone), rel=0.02)


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_data_sheets_give_times_of_the_right_size(device: str, shape: str):
    """A decode streams the weights, and so does a short slice; a long prompt, and a long slice,
    take their operations at the matrix rate."""
    profile = datasheet_profile(device, shape)
    model, sheet, sizes = LatencyModel(profile.rates), DEVICES[device], SHAPES[shape]
    decode, prompt = PassWork(), PassWork()
    decode.decode(100)
    prompt.span(0, 2000, draws=1)
    streaming_s = sizes.parameters * sizes.itemsize / sheet.bytes_per_s
    assert streaming_s < model.forward_s(decode) < 2.0 * streaming_s + 5e-3
    products_s = 2.0 * sizes.parameters * 2000 / sheet.flops
    assert products_s < model.forward_s(prompt) < 4.0 * products_s + 2.0 * streaming_s + 5e-3
    layers_bytes = (sizes.parameters - sizes.vocabulary * sizes.hidden) * sizes.itemsize
    short_s = model.slice_s(BackwardWork.of((1,)), sizes.layers)
    assert layers_bytes / sheet.bytes_per_s < short_s < 3.0 * streaming_s + 5e-3
    long_s = model.slice_s(BackwardWork.of((1000,) * 8), sizes.layers)
    assert 8.0 * products_s < long_s < 16.0 * products_s + short_s  # two products of 8000 rows
    assert sheet.source and profile.source == sheet.source
    held = profile.info.num_blocks * profile.info.block_size * sizes.kv_bytes
    assert held + profile.info.weight_bytes < sheet.memory_bytes


def test_unknown_devices_and_shapes_are_refused_by_name():
    with pytest.raises(InvalidRequest, match="no data sheet of 'h1000'"):
        datasheet_profile("h1000", "llama-3-8b")
    with pytest.raises(InvalidRequest, match="no model shape 'gpt-5'"):
        datasheet_profile("h100", "gpt-5")


def test_a_profile_comes_back_from_its_file(tmp_path):
    profile = replace(datasheet_profile("l4", "llama-3-8b"), threads=2)
    profile = replace(profile, caches=Caches(0.01, 0.002, 0.001, 0.6))
    profile = replace(profile, noise={"decode": (-0.1, 0.2)}, kept_beside=(0.0, 1.0))
    profile = replace(profile, repeat=FitError(3, 0.0, 0.1, 0.2), host_s=2e-4)
    path = tmp_path / "l4.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    path.write_bytes(BOM_UTF8 + path.read_bytes())  # as editors on Windows save it
    assert read_profile(path) == profile
    assert profile.mismatch(profile.info) is None
    other = replace(profile.info, dtype="float32")
    assert profile.mismatch(other) == "dtype is bfloat16 in the profile and float32 here"


@pytest.mark.parametrize("caches", [Caches(resume_s=-0.1), Caches(cold_share=1.5)])
def test_caches_that_cannot_be_are_refused(tmp_path, caches):
    path = tmp_path / "l4.json"
    write_profile(replace(datasheet_profile("l4", "llama-3-8b"), caches=caches), path)
    with pytest.raises(InvalidRequest, match="caches must be 0 or more"):
        read_profile(path)


def test_an_iteration_takes_no_less_than_no_time_beside_its_work(tmp_path):
    path = tmp_path / "l4.json"
    write_profile(replace(datasheet_profile("l4", "llama-3-8b"), host_s=-1e-3), path)
    with pytest.raises(InvalidRequest, match="host_s must be 0 or more"):
        read_profile(path)


def test_a_profile_of_other_threads_is_of_something_else(tmp_path):
    profile = replace(datasheet_profile("l4", "llama-3-8b"), threads=2)
    one, two = (replace(profile.info, threads=count) for count in (1, 2))
    assert profile.mismatch(two) is None
    assert profile.mismatch(one) == "threads is 2 in the profile and 1 here"
    assert replace(profile, threads=0).mismatch(one) is None  # they were not counted
    path = tmp_path / "two.json"
    write_profile(profile, path)
    assert profile_for(str(path), two) == profile and profile_for("", two) is None
    with pytest.raises(InvalidRequest, match="threads is 2 in the profile and 1 here"):
        profile_for(str(path), one)


@pytest.mark.parametrize(
    ("mine", "theirs", "doubt"),
    [
        ("cpu+fused+packed", "cpu+fused+packed:panels", "packed as unknown, here .* as panels"),
        ("cpu+fused+packed:onednn", "cpu+fused+packed:panels", "as onednn, here .* as panels"),
        ("cpu+fused+packed:panels", "cpu+fused+packed:panels", None),
        ("triton", "triton", None),
    ],
)
def test_a_profile_of_another_packing_is_used_with_a_warning(tmp_path, caplog, mine, theirs, doubt):
    profile = datasheet_profile("l4", "llama-3-8b")
    profile = replace(profile, info=replace(profile.info, kernels=mine))
    path, here = tmp_path / "packed.json", replace(profile.info, kernels=theirs)
    write_profile(profile, path)
    assert profile_for(str(path), here) == profile
    assert len(caplog.messages) == (doubt is not None)
    assert doubt is None or re.search(doubt, caplog.text)


def test_a_profile_of_other_kernels_is_of_something_else():
    profile = datasheet_profile("l4", "llama-3-8b")
    profile = replace(profile, info=replace(profile.info, kernels="cpu+fused+packed:panels"))
    for other in ("sdpa+packed:panels", "cpu+packed:panels", "cpu+fused", "sdpa"):
        problem = profile.mismatch(replace(profile.info, kernels=other))
        assert problem == f"kernels is cpu+fused+packed:panels in the profile and {other} here"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nothing", "cannot read"),
        ('{"schema": "other"}', "its schema is not"),
        ('{"schema": "tandem-profile-2"}', "make it again"),
        ('{"schema": "tandem-profile-3"}', "make it again"),
        (f'{{"schema": "{SCHEMA}"}}', "cannot read the profile .*: 'rates'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, content: str, said: str):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=said):
        read_profile(path)


def test_a_profile_with_a_rate_of_zero_is_refused(tmp_path):
    profile: Profile = datasheet_profile("l4", "llama-3-8b")
    rates = replace(profile.rates, update_s=0.0)
    write_profile(replace(profile, rates=rates), tmp_path / "profile.json")
    with pytest.raises(InvalidRequest, match="a rate is not above 0"):
        read_profile(tmp_path / "profile.json")


def test_what_passes_kept_is_a_mean_of_each_kind():
    samples = samples_of(true_rates(1.0), 30, 0.0)
    assert fit(samples, GUESS).kept_alone == (0.0, 0.0) == fit(samples, GUESS).kept_beside
    samples.kept = [(False, KeptLayers(0, 0.0, 1.0)), (False, KeptLayers(1, 0.0, 0.5))]
    found = fit(samples, GUESS)
    assert found.kept_alone == found.kept_beside == (0.0, 0.75), "the only kind that was seen"
    samples.kept.append((True, KeptLayers(2, 1.0, 0.0)))
    assert fit(samples, GUESS).kept_alone == (1.0, 0.0)
