"""transformers' continuous batching on the same weights, through its persistent manager."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.peers.worker import token_times


class ContinuousBatching:
    """A running manager.

    Sizes are chosen once, as a server would choose them: pages of 32 and 512 tokens a batch
    were the best of 16, 32, 256 and of 128 to 2,048 on two AMX cores.
    """

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        generation = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=-1)
        config = ContinuousBatchingConfig(
            page_size=options.get("page_size", 32),
            num_blocks=options.get("num_blocks", 2048),
            max_batch_tokens=options.get("max_batch_tokens", 512),
            allow_block_sharing=False,
            use_async_batching=options.get("async"),
            use_cuda_graph=options.get("cuda_graph"),
            default_compile_level=options.get("compile", 0),
            auto_switch_to_flash=False,
        )
        self._patience_s = options.get("patience_s", 600.0)
        self.manager = model.init_continuous_batching(generation, config)
        self.manager.start()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily; the manager's own timestamps say when each token came."""
        started = time.perf_counter()
        names = self.manager.add_requests(
            job["prompts"], max_new_tokens=job["output_tokens"], record_timestamps=True
        )
        times: dict[str, list[float]] = {}
        while len(times) < len(names):
            output = self.manager.get_result(timeout=self._patience_s)
            assert output is not None and output.is_finished(), "the manager stopped"
            assert len(output.generated_tokens) == job["output_tokens"]
            times[output.request_id] = output.timestamps
        return token_times(started, [times[name] for name in names])

    def close(self) -> None:
        """Stop the manager's thread and free its cache."""
        self.manager.stop(timeout=self._patience_s)


def start(model: str, options: dict[str, Any]) -> ContinuousBatching:
    """Load `model` and start the manager."""
    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    return ContinuousBatching(loaded, options)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("torch", "transformers")}
