"""Folders of every format that there was, kept so that later releases are known to read them.

    python -m tests.golden_folders NAME MODEL_TYPE

writes tests/golden/folders/NAME.zip: a tiny base, and its conversion by the release that is there, both as
`base/` and `converted/`. Do so whenever the format changes, and never again for the same name.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers

from hf_hyperconn.conversion import cli

FOLDERS = Path(__file__).parent / "golden" / "folders"
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def main(name: str, model_type: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **SIZES))
    with tempfile.TemporaryDirectory() as place:
        base, converted = Path(place, "base"), Path(place, "converted")
        model.save_pretrained(base)
        assert cli.main(["convert", str(base), str(converted), "-n", "2", "--verify", "full"]) == 0
        FOLDERS.mkdir(exist_ok=True)
        with zipfile.ZipFile(FOLDERS / f"{name}.zip", "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(path for path in Path(place).rglob("*") if path.is_file()):
                archive.write(path, path.relative_to(place))


if __name__ == "__main__":
    main(*sys.argv[1:])
