"""Tests of `torch.export` on every class of a family."""

import copy

import torch
from parameterized import parameterized
from transformers.testing_utils import torch_device


class ExportTesterMixin:
    """For test classes with `ModelTesterMixin`: an exported program returns what the model returns."""

    @parameterized.expand([("fixed",), ("dynamic",)])
    def test_torch_export(self, shapes):
        if not self.test_torch_exportable:
            self.skipTest("the test class says that the model cannot be exported")
        for model_class in self.all_model_classes if shapes == "fixed" else self.all_generative_model_classes:
            with self.subTest(model_class.__name__):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                config.use_cache = False
                model = model_class(copy.deepcopy(config)).to(torch_device).eval()
                axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} if shapes == "dynamic" else {}
                dynamic_shapes = dict.fromkeys(inputs, axes)
                with torch.no_grad():
                    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes).module()
                    others = {name: value[1:4, :-2] for name, value in inputs.items()}
                    for call in [inputs, others] if shapes == "dynamic" else [inputs]:
                        for exported, eager in zip(program(**call).values(), model(**call).values(), strict=True):
                            torch.testing.assert_close(exported, eager)
