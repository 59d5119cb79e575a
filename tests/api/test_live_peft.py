"""Adapters travel between PEFT and a live server over HTTP, and learning goes on from them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from live_learning_client import Pair, User, live_user
from serving import DEMO_MODEL, new_directory

QUESTION = "What is the capital of France?"
ANSWER = "Certainly. The capital of France is Paris.<|im_end|>"
# PEFT asks transformers for an attribute that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
ROOT = new_directory()
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with live_user(
        learning={"held_out": 0.0, "version_wait_s": 0.5, "gate": "always"},
        adapters={"roots": (ROOT,)},
    ) as user:
        yield user


def base_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def logprobs(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)])
    found = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0]


def sequence(user: User) -> list[int]:
    prompt = user.tokens(messages=[{"role": "user", "content": QUESTION}])
    return prompt + user.tokens(prompt=ANSWER)


def teach(user: User, adapter: str, count: int) -> None:
    for number in range(count):
        plain = f"It is {number + 1}."
        user.prefer(adapter, Pair(f"What is {number} plus 1?", f"Certainly. {plain}", plain))


def export(user: User, adapter: str, version: int, directory: Path) -> Path:
    response = user.http.get(f"/v1/adapters/{adapter}/versions/{version}/export")
    assert response.status_code == 200, response.text
    with zipfile.ZipFile(BytesIO(response.content)) as packed:
        assert sorted(packed.namelist()) == sorted(FILES)
        packed.extractall(directory)
    return directory


def difference(one: Path, other: Path) -> float:
    """The largest difference of any parameter of two adapters of the same shape."""
    first, second = (load_file(path / FILES[1]) for path in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_peft_loads_an_export_and_gives_the_same_logprobs(user: User, tmp_path: Path) -> None:
    teach(user, "exported", 8)
    version = user.wait_until_learned("exported")
    directory = export(user, "exported", version["version"], tmp_path)
    model = peft.PeftModel.from_pretrained(base_model(), str(directory)).eval()
    tokens = sequence(user)
    with torch.no_grad():
        wanted = logprobs(model, tokens).tolist()
        with model.disable_adapter():
            base = logprobs(model, tokens).tolist()
    assert max(abs(a - b) for a, b in zip(wanted, base, strict=True)) > 0.1
    assert user.logprobs("demo:exported", tokens) == pytest.approx(wanted, abs=1e-3)
    assert user.logprobs("demo", tokens) == pytest.approx(base, abs=1e-3)


def trained_by_peft(user: User, directory: Path) -> list[float]:
    """A few steps towards one answer with PEFT and torch; that model's log-probs of it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base_model(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = sequence(user)
    for _ in range(5):
        optimizer.zero_grad()
        (-logprobs(model, tokens).mean()).backward()
        optimizer.step()
    model.save_pretrained(str(directory))
    with torch.no_grad():
        found: list[float] = logprobs(model.eval(), tokens).tolist()
    return found


def test_an_adapter_from_peft_serves_and_goes_on_learning(user: User, tmp_path: Path) -> None:
    own = tmp_path / "own"
    wanted = trained_by_peft(user, own)
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in FILES:
            archive.write(own / name, name)
    # So small a rate that what comes out tells where it began.
    settings = {"learning_rate": 1e-5, "epochs": 1}
    user.call("POST", "/v1/adapters/mine", json={"settings": settings})
    file = user.client.files.create(file=("mine.zip", packed.getvalue()), purpose="user_data")
    imported = user.call("POST", "/v1/adapters/mine/import", json={"file_id": file.id})
    assert imported["current"] and imported["origin"] == "import"
    tokens = sequence(user)
    assert user.greedy("demo:mine", QUESTION).version == "mine@1"
    assert user.logprobs("demo:mine", tokens) == pytest.approx(wanted, abs=1e-3)

    teach(user, "mine", 8)
    user.wait_until_learned("mine")
    *_later, learned, _imported = user.versions("mine")
    assert learned["version"] == 2 and learned["parent"] == 1
    # Whether it may answer is the gate's to say; that it learned from there is asked here.
    files = export(user, "mine", 2, tmp_path / "next")
    steps = learned["metrics"]["steps"]
    assert steps >= 1
    assert 0 < difference(own, files) <= 2e-5 * steps
    begun = load_file(own / FILES[1])
    grown = max(float(tensor.abs().max()) for name, tensor in begun.items() if "lora_B" in name)
    assert grown > 1e-2  # a fresh adapter has zeros there
    assert learned["content_hash"] != imported["content_hash"]
    serving = user.call("GET", "/v1/adapters/mine")["label"]
    assert user.greedy("demo:mine", QUESTION).version == serving


def test_what_was_loaded_by_path_keeps_its_label_when_it_learns(user: User) -> None:
    own = Path(ROOT) / "loaded"
    wanted, tokens = trained_by_peft(user, own), sequence(user)
    loaded = user.call("POST", "/v1/adapters/loaded/load", json={"path": "loaded"})
    before = user.greedy("demo:loaded", QUESTION)
    assert before.version == loaded["label"] == "loaded@1"

    teach(user, "loaded", 8)
    user.wait_until_learned("loaded")
    *_later, second, first = user.versions("loaded")
    assert (first["version"], first["origin"], first["parent"]) == (1, "import", 0)
    assert first["content_hash"] == loaded["content_hash"] != second["content_hash"]
    assert (second["version"], second["parent"]) == (2, 1)
    user.call("POST", "/v1/adapters/loaded/versions/2/publish")  # whatever the gate said
    after = user.greedy("demo:loaded", QUESTION)
    assert after.version == "loaded@2" and after.fingerprint != before.fingerprint
    assert user.logprobs("demo:loaded", tokens) != pytest.approx(wanted, abs=1e-3)

    assert user.call("POST", "/v1/adapters/loaded/rollback", json={})["version"] == 1
    assert user.greedy("demo:loaded", QUESTION) == before
    assert user.logprobs("demo:loaded", tokens) == pytest.approx(wanted, abs=1e-3)
