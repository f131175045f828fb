"""Time exported models with each kind of connection against the exported plain model: ONNX Runtime and OpenVINO.

    python -m benchmarks.exports      # needs the extras onnx and openvino

Prefill of 256 tokens on one thread, float32, all in turn in one process. Writes benchmarks/results/exports.json:
medians in milliseconds, ratios to the plain model, and the largest difference of the logits from torch's.
"""

import tempfile
from collections.abc import Callable

import onnxruntime
import openvino
import torch
from transformers import PreTrainedModel
from transformers.exporters import OnnxConfig, OnnxExporter

from benchmarks.llamas import PLAIN, build
from benchmarks.timing import medians_ms, write

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "use_cache": False,
}
CASES = (PLAIN, "SHC×4", "DHC×4", "mHC×4", "attention residuals")
IDS = torch.randint(3, 90, (2, 128), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
ARRAYS = {name: value.numpy() for name, value in INPUTS.items()}

Run = Callable[[], torch.Tensor]


def by_onnx_runtime(model: PreTrainedModel) -> Run:
    """Export a model by Transformers' exporter."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        OnnxExporter().export(model, INPUTS, config=OnnxConfig(dynamic=True)).save_pretrained(folder)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
    return lambda: torch.from_numpy(session.run(["logits"], ARRAYS)[0])


class Logits(torch.nn.Module):
    """A model that takes and returns tensors by their places, as a trace does."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def by_openvino(model: PreTrainedModel) -> Run:
    """Export a model by OpenVINO's own trace of an example."""
    converted = openvino.convert_model(Logits(model), example_input=tuple(INPUTS.values()))
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(converted, "CPU", settings)
    return lambda: torch.from_numpy(compiled(tuple(ARRAYS.values()))[0])


ENGINES = {"ONNX Runtime": by_onnx_runtime, "OpenVINO": by_openvino}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    models = {case: build(SHAPE, case).eval().cpu() for case in CASES}
    expected = {case: model(**INPUTS).logits for case, model in models.items()}
    rows = {case: {"case": case} for case in CASES}
    for engine, export in ENGINES.items():
        runs = {case: export(model) for case, model in models.items()}
        taken = dict(zip(runs, medians_ms(list(runs.values())), strict=True))
        for case, row in rows.items():
            row[engine] = {
                "ms": round(taken[case], 2),
                "ratio": round(taken[case] / taken[PLAIN], 2),
                "difference": (runs[case]() - expected[case]).abs().max().item(),
            }
    for row in rows.values():
        print(row, flush=True)
    versions = {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__}
    write("exports.json", {"engines": versions, "shape": SHAPE, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
