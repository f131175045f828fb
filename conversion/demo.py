"""`hf-hyperconn demo`: training, conversion, verification and further training of a tiny model."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from huggingface_hub.utils import tqdm
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_hyperconn.errors import ConversionError, HyperConnError
from hf_hyperconn.registration import register_auto_classes

from .checkpoint.loading import quiet_loading
from .convert import convert_checkpoint
from .terminal import print_result

LENGTH, BATCH, STREAMS = 128, 16, 4
PROMPT = "def read"

LOAD_ELSEWHERE = """
import sys
sys.modules["hf_hyperconn"] = None  # as if it were not installed
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=48, do_sample=False, pad_token_id=0)[0]))
"""


def run_demo(folder: str | None = None, *, steps: int = 300, say: Callable[[str], None] = print) -> None:
    """Train a tiny byte-level Llama on the standard library's source, convert it and train both further.

    Prints its progress with `say` and a table of held-out losses on stdout. Needs no network.

    folder: a new folder that keeps the models; by default they are removed.
    steps: training steps of the base; the continuation takes half as many.

    Raises `ConversionError` when `folder` exists or can't be made, and `VerificationError` should the conversion
    differ from its base.
    """
    register_auto_classes()
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True)
    except FileExistsError as error:
        raise ConversionError(f"'{folder}' already exists. Choose another DIR.") from error
    except (OSError, ValueError) as error:  # a name with a null character is no OSError
        reason = getattr(error, "strerror", None) or error
        raise ConversionError(f"can't make the folder '{folder:.200}': {reason}. Choose another DIR.") from error
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        _demonstrate(Path(place), steps, say)


def _demonstrate(place: Path, steps: int, say: Callable[[str], None]) -> None:
    training, held_out = map(_tokens, standard_library())
    base = byte_llama()
    say(f"1. a Llama of {base.num_parameters():,} parameters, trained on the standard library's source")
    _train([base], training, steps, learning_rate=3e-3, seed=1)
    with quiet_loading():
        base.save_pretrained(place / "base")
    byte_tokenizer().save_pretrained(place / "base")

    say(f"2. converted to DHC×{STREAMS} and verified")
    converted = convert_checkpoint(str(place / "base"), place / f"base-HCx{STREAMS}", hc_mult=STREAMS, say=say).path

    say("3. loaded in a process that has no hf_hyperconn, it writes")
    say("   " + _generate_elsewhere(converted).replace("\n", "\n   "))

    say("4. both trained further, on the same data")
    with quiet_loading():
        models = [LlamaForCausalLM.from_pretrained(place / "base"), AutoModelForCausalLM.from_pretrained(converted)]
    before = [_loss(model, held_out) for model in models]
    _train(models, training, max(steps // 2, 1), learning_rate=1e-3, seed=2)
    after = [_loss(model, held_out) for model in models]
    print_result(f"{'held-out loss':<16}{'converted':>12}{'trained on':>12}")
    for name, *losses in zip(("Llama", f"Llama DHC×{STREAMS}"), before, after, strict=True):
        print_result(f"{name:<16}" + "".join(f"{loss:>12.4f}" for loss in losses))


def byte_llama(eos_token_id: int | None = None) -> LlamaForCausalLM:
    """Return an untrained Llama over bytes, of 0.8M parameters; always the same."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * LENGTH,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            tie_word_embeddings=True,
        )
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which each byte is a token, with the byte's value as its id."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def standard_library() -> tuple[list[Path], list[Path]]:
    """Return the standard library's top-level modules: nine files in ten to train on, the others held out.

    Raises `HyperConnError` when this Python lacks them.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise HyperConnError(
            "this Python comes without the source of its standard library, which the demo trains on. Use another."
        )
    return [path for i, path in enumerate(files) if i % 10], files[::10]


def _tokens(files: list[Path]) -> torch.Tensor:
    """Return the bytes of files as token ids."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def _train(
    models: list[PreTrainedModel], tokens: torch.Tensor, steps: int, *, learning_rate: float, seed: int
) -> None:
    """Train each model on the same batches, in order of steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = [torch.optim.AdamW(m.train().parameters(), lr=learning_rate, weight_decay=0.0) for m in models]
    with tqdm(total=steps, desc="Training", unit="step", disable=None) as bar:
        for _ in range(steps):
            starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
            batch = tokens[starts + torch.arange(LENGTH)]
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses))
            bar.update()


@torch.no_grad()
def _loss(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    model.eval()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[:: max(len(rows) // 64, 1)]
    return model(input_ids=rows, labels=rows).loss.item()


def _generate_elsewhere(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as modules:
        environment = {**os.environ, "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", LOAD_ELSEWHERE, str(folder.resolve()), PROMPT]
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, cwd=modules, env=environment
        )
    if done.returncode:
        raise HyperConnError(f"loading {folder} without hf_hyperconn failed:\n{done.stderr}")
    return done.stdout.strip()
