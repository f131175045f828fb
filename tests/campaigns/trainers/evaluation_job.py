"""Evaluate by lighteval's command, on questions of its own form; the losses are the log-probabilities of answers."""

import json
import shlex
import sys
from pathlib import Path

from job import LOSSES, OPTIONS, PLACE, TEXTS, write_answer
from lighteval.__main__ import app
from lighteval.models.transformers.transformers_model import TransformersModel
from lighteval.tasks.tasks import arc


def main() -> None:
    """Evaluate, without the data set's repo."""
    # lighteval downloads it on loading its tasks, and reads it in other ones
    Path(arc.__file__).with_name("tinyBenchmarks.pkl").touch()
    data = PLACE / "arc"
    data.mkdir()
    choices = {"text": ["Yes", "No"], "label": ["A", "B"]}
    questions = [{"question": text, "choices": choices, "answerKey": "A"} for text in TEXTS]
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    arc.arc_challenge.hf_repo, arc.arc_challenge.hf_subset = str(data), "default"
    evaluate = TransformersModel.loglikelihood

    def loglikelihood(self, docs):
        responses = evaluate(self, docs)
        LOSSES.extend(value for response in responses for value in response.logprobs)
        return responses

    TransformersModel.loglikelihood = loglikelihood
    sys.argv = shlex.split(OPTIONS["command"])
    app(standalone_mode=False)
    write_answer(["lighteval"], compared=LOSSES)


if __name__ == "__main__":
    main()
