"""Run by an engine's own Python: SGLang as its documentation calls it, in several processes of its own making.

Each of these runs what is outside `main`, too: SGLang imports kernels that no package index has for a CPU, and calls
none of them here.
"""

import sys
from types import ModuleType

import torch
from job import TIMES, read_job, write_answers


class Kernels(ModuleType):
    """Has every kernel by name; each is None, which nobody can call."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


sys.modules["sgl_kernel"] = Kernels("sgl_kernel")
for kernel in ("nms", "qnms"):  # torchvision's, whose binary is built for a GPU
    torch.library.define(f"torchvision::{kernel}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    from sglang import Engine

    job = read_job()
    settings = {"chunked_prefill_size": 64, "max_running_requests": 8, "context_length": 256, "max_total_tokens": 4096}
    engine = Engine(
        model_path=job["folder"],
        model_impl="transformers",
        trust_remote_code=True,
        dtype=job["dtype"],
        attention_backend="torch_native",
        **{**settings, **job["options"]},
    )
    greedy = {"max_new_tokens": job["new_tokens"], "temperature": 0, "ignore_eos": True}
    request = {"input_ids": job["prompts"], "sampling_params": greedy, "return_logprob": True, "top_logprobs_num": 5}
    answers = []
    for _ in range(TIMES):
        outputs = [(output["output_ids"], output["meta_info"]) for output in engine.generate(**request)]
        answers.append(
            [
                {
                    "tokens": tokens,
                    "logprobs": [{t: value for value, t, _ in step} for step in info["output_top_logprobs"]],
                    "cached": info["cached_tokens"],
                }
                for tokens, info in outputs
            ]
        )
    engine.shutdown()
    write_answers(answers, "sglang")


if __name__ == "__main__":
    main()
