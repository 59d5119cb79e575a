"""vLLM's CPU engine, driven step by step in this process so that every token's time is seen."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.worker import token_times


class VllmEngine:
    """The offline engine without prefix cache or detokenisation."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._llm = load(model, options)
        self._jobs = 0

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily; a token's time is the end of the step that returned it."""
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=job["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self._llm.llm_engine
        self._jobs += 1
        names = [f"{self._jobs}-{index}" for index in range(len(job["prompts"]))]
        times: dict[str, list[float]] = {name: [] for name in names}
        started = time.perf_counter()
        for name, prompt in zip(names, job["prompts"], strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id
                times[name] += [now] * len(output.outputs[0].token_ids)
        assert all(len(each) == job["output_tokens"] for each in times.values())
        return token_times(started, [times[name] for name in names])


def load(model: str, options: dict[str, Any]) -> LLM:
    """The engine with the settings of the comparison."""
    return LLM(
        model=model,
        dtype=options.get("dtype", "bfloat16"),
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=options.get("max_num_batched_tokens", 4096),
        enforce_eager=options.get("enforce_eager", False),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )


def start(model: str, options: dict[str, Any]) -> VllmEngine:
    """Load `model`; compiles unless `enforce_eager` (cached by vLLM for the next start)."""
    return VllmEngine(model, options)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {"vllm": vllm.__version__, "torch": torch.__version__}
