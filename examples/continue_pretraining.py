"""Continue the pretraining of a model with hyper-connections, on one GPU or many.

    accelerate launch --config_file examples/configs/one_gpu.yaml examples/continue_pretraining.py \\
        examples/configs/recipe.yaml --model MODEL --train_files 'texts/*.txt' --output_dir runs/first

Settings come from a YAML file, if it is the first argument, and from the command line, which takes precedence. They
are the fields of `Recipe` and of Transformers' `TrainingArguments`. Run again with the same output folder, the script
continues from the last checkpoint there. docs/training.md explains the choices.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import torch
import yaml
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.distributed import DistributedConfig

from hf_hyperconn import HCMonitorCallback, HCTrainer
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.families.family import find_family


@dataclass
class Recipe:
    """The model to train, its data and the settings of both."""

    model: str = field(metadata={"help": "A converted model or a base to convert on loading: a folder or a Hub id."})
    hc_mult: int = field(default=4, metadata={"help": "Number of streams, for a base."})
    connection: str = field(default="dhc", metadata={"help": "Kind of connection, for a base; none: no connections."})
    hc_start: str = field(default="copies", metadata={"help": "Streams at the start, for a base: copies or history."})
    hc_lr: float | None = field(default=None, metadata={"help": "Learning rate of the connections."})
    muon: bool = field(default=False, metadata={"help": "Train the matrices of layers by Muon, the rest by AdamW."})
    train_files: list[str] | None = field(default=None, metadata={"help": "Text files or patterns, a document each."})
    dataset: str | None = field(default=None, metadata={"help": "Instead of files: a data set on the Hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    text_column: str = field(default="text", metadata={"help": "Column of the text in the data set."})
    streaming: bool = field(default=False, metadata={"help": "Read while training; needs max_steps."})
    shuffle_buffer: int = field(default=10_000, metadata={"help": "Documents to shuffle among when streaming."})
    held_out_files: list[str] | None = field(default=None, metadata={"help": "Text files to evaluate on."})
    sequence_length: int = field(default=2048, metadata={"help": "Tokens in a row."})
    tp_size: int = field(default=1, metadata={"help": "Ranks that share each layer: tensor parallelism."})


def parse_arguments(arguments: list[str]) -> tuple[Recipe, TrainingArguments]:
    """Return the settings of a YAML file, if the arguments begin with one, and of the command line."""
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        settings = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"{arguments[0]} holds no settings; write one in a line, as in 'hc_mult: 4'.")
        given = ((name, value if isinstance(value, list) else [value]) for name, value in settings.items())
        arguments = [word for name, values in given for word in (f"--{name}", *map(str, values))] + arguments[1:]
    return HfArgumentParser((Recipe, TrainingArguments)).parse_args_into_dataclasses(arguments)


@contextmanager
def without_traceback() -> Iterator[None]:
    """End the script with one line of error where its settings, its model or its texts are wrong."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError, HyperConnError, StrictDataclassError, DatasetsError) as error:
        raise SystemExit(f"error: {error}") from error


def load_model(recipe: Recipe) -> PreTrainedModel:
    """Return the converted model, or the base, converted on loading; in float32, as mixed precision needs."""
    settings = {"dtype": torch.float32}
    if recipe.tp_size > 1:
        settings["distributed_config"] = DistributedConfig(tp_size=recipe.tp_size)
    config = AutoConfig.from_pretrained(recipe.model)
    if hasattr(config, "hc_mult") or recipe.connection == "none":
        return AutoModelForCausalLM.from_pretrained(recipe.model, **settings)
    family = find_family(config.model_type)
    hc_class = getattr(family.modeling_module(), family.architectures[family.usual_architecture])
    settings |= {"hc_mult": recipe.hc_mult, "connection": recipe.connection, "hc_start": recipe.hc_start}
    return hc_class.from_prenorm(recipe.model, **settings)


def load_training_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments
) -> Dataset | IterableDataset:
    """Return rows of tokens to train on. Trainer shuffles them; a stream is shuffled here."""
    if (recipe.dataset is None) == (recipe.train_files is None):
        raise ValueError("Give either --train_files or --dataset.")
    if recipe.dataset is None:
        documents, column = load_texts(recipe.train_files, streaming=recipe.streaming), "text"
    else:
        documents = load_dataset(
            recipe.dataset, recipe.dataset_config, split="train", streaming=recipe.streaming
        ).select_columns(recipe.text_column)
        column = recipe.text_column
    if recipe.streaming:
        documents = documents.shuffle(seed=args.seed, buffer_size=recipe.shuffle_buffer)
    return pack(documents, column, tokenizer, recipe.sequence_length)


def load_texts(files: list[str], streaming: bool = False) -> Dataset | IterableDataset:
    """Load text files, one document each."""
    for pattern in files:
        if "://" not in pattern and not glob(pattern, recursive=True):
            raise FileNotFoundError(f"No file is {pattern}. Give text files, or a pattern in quotes: 'texts/*.txt'.")
    return load_dataset("text", data_files=files, split="train", sample_by="document", streaming=streaming)


def pack(
    documents: Dataset | IterableDataset, column: str, tokenizer: PreTrainedTokenizerBase, length: int
) -> Dataset | IterableDataset:
    """Return rows of one length: documents in order, an end-of-text token after each, cut anywhere.

    Raises `ValueError` when the documents do not fill one row.
    """
    settings = {"column": column, "tokenizer": tokenizer, "length": length}
    rows = documents.map(rows_of, batched=True, remove_columns=column, fn_kwargs=settings)
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise ValueError(f"The texts have less than {length} tokens. Give more, or a smaller --sequence_length.")
    return rows


def rows_of(
    batch: dict[str, list[str]], column: str, tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, list[list[int]]]:
    """Return the rows of one batch of documents; the rest that does not fill a row is dropped."""
    documents = tokenizer(batch[column]).input_ids
    ids = [token for document in documents for token in [*document, tokenizer.eos_token_id]]
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return {"input_ids": rows, "labels": rows}


def last_checkpoint(folder: str) -> str | None:
    """Return the last complete checkpoint."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*")}
    newest_first = sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -int(steps[path]))
    return next((str(path) for path in newest_first if is_complete(path)), None)


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint's last file, the trainer's state, is whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def checkpoint_of_all(folder: str, patience: int = 60) -> str | None:
    """Return the last checkpoint that the first rank sees, for all ranks.

    patience: seconds to wait until every rank sees it, as on a file system that shows it later.

    Raises `FileNotFoundError` when a rank does not see it.
    """
    (checkpoint,) = broadcast_object_list([last_checkpoint(folder)])
    if checkpoint is None:
        return None
    deadline = time.monotonic() + patience
    while not (seen := is_complete(Path(checkpoint))) and time.monotonic() < deadline:
        time.sleep(1)
    if not all(gather_object([seen])):
        raise FileNotFoundError(f"Not every node has {checkpoint}. Give them a folder that all share.")
    return checkpoint


def save(trainer: Trainer) -> None:
    """Save the logs and the model: in one piece, with the code that `trust_remote_code` runs."""
    trainer.save_state()
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


def main(arguments: list[str]) -> None:
    """Load, train, save and evaluate."""
    with without_traceback():
        recipe, args = parse_arguments(arguments)
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
        with args.main_process_first():
            training = load_training_data(recipe, tokenizer, args)
            held_out = None
            if recipe.held_out_files:
                held_out = pack(load_texts(recipe.held_out_files), "text", tokenizer, recipe.sequence_length)
        model = load_model(recipe)
    if args.torch_compile:  # layer by layer: the layers share one graph
        os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    has_connections = hasattr(model.config, "hc_mult")
    trainer = HCTrainer(
        model,
        args,
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        hc_lr=recipe.hc_lr if has_connections else None,
        muon=recipe.muon,
    )
    if has_connections:
        HCMonitorCallback().attach(trainer)
    with without_traceback():
        checkpoint = checkpoint_of_all(args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    save(trainer)
    if held_out is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    accelerator = trainer.accelerator
    # delete DDP while the process group exists: as its last owner it would wait for threads that wait for Python
    del trainer
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()  # otherwise a rank that ends before the others may abort


if __name__ == "__main__":
    main(sys.argv[1:])
