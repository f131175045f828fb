"""Programs of other tests run where hf_hyperconn is not, and leave nothing to each other."""

import json
import time
from threading import Timer

import pytest

from .isolated import Program, _process, isolated, printed, run


@pytest.mark.parametrize("variables", [{}, {"ANY": "1"}], ids=["fork", "process"])
def test_the_package_is_not_there(variables, tmp_path):
    done = isolated("import hf_hyperconn", place=tmp_path, **variables)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: import of hf_hyperconn halted; None in sys.modules\n")


def test_a_program_gets_its_input_arguments_and_place(tmp_path):
    code = "import os, sys; print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ['HF_MODULES_CACHE'])"
    modules = tmp_path / "modules"
    assert printed(code, "a", 1, place=tmp_path, stdin="é") == f"['a', '1'] é {tmp_path.resolve()} {modules}\n"


def test_what_one_does_no_other_sees(tmp_path):
    code = "import sys, transformers; print(sys.argv[1], hasattr(transformers, 'seen')); transformers.seen = True"
    programs = [Program(code, [name], str(tmp_path), str(tmp_path / "modules")) for name in "ab"]
    assert [done.stdout for done in run(programs)] == ["a False\n", "b False\n"]
    assert [done.stdout for done in run(programs)] == ["a False\n", "b False\n"]


@pytest.mark.slow
def test_an_interrupted_program_is_ended_and_answers_to_nobody(tmp_path):
    first, late = _process(), tmp_path / "late"
    Timer(1, first.kill).start()
    with pytest.raises(json.JSONDecodeError):
        printed(f"import time; time.sleep(3); open({str(late)!r}, 'w')", place=tmp_path)
    assert printed("print('next')", place=tmp_path) == "next\n"
    assert _process() is not first
    time.sleep(3)
    assert not late.exists()
