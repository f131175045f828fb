"""A model with a tokenizer, and a text for it."""

import pytest

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.demo import byte_tokenizer
from tests.conftest import hc_llama


@pytest.fixture
def folder(tmp_path):
    hc_llama(vocab_size=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("def read(self):\n    return self.value\n" * 20)
    return tmp_path / "model"


@pytest.fixture
def refusal(capsys):
    """A function that runs `plot` and returns its refusal."""

    def run(*arguments) -> str:
        assert main(["plot", *map(str, arguments)]) == 1
        return capsys.readouterr().err

    return run
