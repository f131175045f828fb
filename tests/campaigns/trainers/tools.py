"""The tools, and the virtual environment that each has, without this package."""

from dataclasses import dataclass, field

from tests.campaigns.environments import Environment

INSTALL = ("install", "--no-compile", "--constraint", "constraints.txt")


@dataclass(frozen=True)
class Tool(Environment):
    """A tool that trains, or merges.

    script: that runs it. modules: that the script imports. variables: of its processes.
    """

    script: str = ""
    modules: tuple[str, ...] = ()
    is_shared: bool = True
    variables: dict[str, str] = field(default_factory=dict, hash=False)


# of what they ask for, what a job on texts on a CPU imports
LLAMA_FACTORY_NEEDS = (
    "av==18.1.0",
    "fire==0.7.1",
    "modelscope==1.40.2",
    "omegaconf==2.4.0",
    "sentencepiece==0.2.3",
    "sse-starlette==3.7.0",
    "tiktoken==0.14.0",
    "torchdata==0.11.0",
    "trl==0.24.0",
    "tyro==0.8.14",
)
AXOLOTL_NEEDS = (
    "accelerate==1.13.0",
    "addict==2.4.0",
    "art==6.5",
    "bitsandbytes==0.50.2",
    "colorama==0.4.6",
    "datasets==4.8.4",
    "evaluate==0.4.1",
    "fastcore==2.2.41",
    "fire==0.7.1",
    "huggingface_hub==1.17.0",
    "numba==0.68.1",
    "peft==0.20.0",
    "posthog==6.7.11",
    "python-dotenv==1.0.1",
    "schedulefree==1.4.1",
    "tokenizers==0.23.1",
    "transformers==5.16.1",
    "trl==1.9.0",
    "wandb==0.31.0",
)
# the last ones that lighteval's calls of them are for
LIGHTEVAL_NEEDS = ("huggingface_hub==1.33.0", "xxhash==3.8.2")
TRL = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo", "reward"))
TOOLS = {
    "DeepSpeed": Tool(
        folder="trainers/deepspeed",
        pip=((*INSTALL, "deepspeed==0.19.8"),),
        script="deepspeed_job.py",
        modules=("deepspeed",),
        variables={"DS_ACCELERATOR": "cpu"},
    ),
    "TRL": Tool(folder="trainers/trl", pip=((*INSTALL, "trl==1.16.0"),), script="trl_job.py", modules=TRL),
    "Lightning": Tool(
        folder="trainers/lightning",
        pip=((*INSTALL, "lightning==2.6.6"),),
        script="lightning_job.py",
        modules=("lightning",),
    ),
    "sentence-transformers, SetFit": Tool(
        folder="trainers/sentences",
        pip=((*INSTALL, "sentence-transformers==6.2.0", "setfit==1.2.0"),),
        script="sentences_job.py",
        modules=("sentence_transformers", "setfit"),
    ),
    "mergekit": Tool(
        folder="trainers/mergekit",
        pip=((*INSTALL, "mergekit==0.1.5"),),
        script="mergekit_job.py",
        modules=("mergekit.scripts.run_yaml",),
    ),
    "Optimizers": Tool(
        folder="trainers/optimizers",
        pip=((*INSTALL, "galore-torch==1.0", "schedulefree==1.4.1", "apollo-torch==1.0.3"),),
        script="optimizers_job.py",
    ),
    "LLaMA-Factory": Tool(
        folder="trainers/llamafactory",
        pip=((*INSTALL, "--no-deps", "llamafactory==0.9.5"), (*INSTALL, *LLAMA_FACTORY_NEEDS)),
        script="llamafactory_job.py",
        variables={"DISABLE_VERSION_CHECK": "1"},
    ),
    "axolotl": Tool(
        folder="trainers/axolotl",
        pip=(
            ("install", "--no-compile", "--no-deps", "axolotl==0.19.0", "axolotl-contribs-lgpl==0.0.7"),
            ("install", "--no-compile", *AXOLOTL_NEEDS),
        ),
        script="axolotl_job.py",
        variables={"AXOLOTL_DO_NOT_TRACK": "1"},
    ),
    "lighteval": Tool(
        folder="trainers/lighteval",
        pip=((*INSTALL, "lighteval==0.13.0", *LIGHTEVAL_NEEDS),),
        script="evaluation_job.py",
    ),
}
